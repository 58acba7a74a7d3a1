"""The tasks of a job, whose code is the user's: every call has a deadline."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opentinker.config.rollout import EnvironmentConfig
from opentinker.env.datasets import load_tasks
from opentinker.env.environment import Environment
from opentinker.env.tasks import Split, TaskSource
from opentinker.env.threads import UserThreads
from opentinker.errors import EnvironmentLoadError, OpenTinkerError


class JobTasks:
    """A job's tasks of both splits: from `sources`, from the files or datasets that its config names, or its environment's own.

    Raises:
        EnvironmentLoadError: from each method, when the environment's code raised or took longer than `timeout_s`; the first
        draw
            of a split may take the config's `tasks_timeout_s`.
        ConfigError: from each method, when a file or dataset cannot be read.
    """

    def __init__(
        self,
        environment: type[Environment],
        config: EnvironmentConfig,
        *,
        timeout_s: float,
        base_dir: Path | None = None,
        sources: Mapping[Split, TaskSource] | None = None,
    ) -> None:
        self._environment = environment
        self._config = config
        self._timeout_s = timeout_s
        self._base_dir = base_dir
        self._sources = dict(sources or {})

    async def draw(self, seed: int, start: int, count: int) -> list[Any]:
        """Training tasks `start` to `start + count` of the stream that `seed` determines."""
        return await self._call("train", lambda source: source.draw(seed, start, count))

    async def held_out(self, limit: int) -> list[Any]:
        """The first `limit` held-out tasks."""
        return await self._call("held_out", lambda source: source.first(limit))

    async def standing(self, seed: int, count: int) -> list[Any]:
        """`count` tasks that stay the same: held-out ones, or where there are none, the first training tasks of `seed`."""
        return await self.held_out(count) or await self.draw(seed, 0, count)

    async def _call(self, split: Split, ask: Callable[[TaskSource], list[Any]]) -> list[Any]:
        """In a thread, because it is user code: one that never returns is left behind."""
        method = "task_source"
        if self._is_simple():
            method = "make_task" if split == "train" else "held_out_tasks"
        what = f"{self._environment.__name__}.{method}"

        # Making a source may download a dataset or check its rows; drawing from it is as quick as a reset.
        made = split in self._sources
        timeout_s = self._timeout_s if made else max(self._timeout_s, self._config.tasks_timeout_s)

        def make() -> list[Any]:
            if split not in self._sources:
                self._sources[split] = self._source(split)
            return ask(self._sources[split])

        with UserThreads() as threads:
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    return await threads.call(make)
            except Exception as error:
                if limit.expired():
                    raise EnvironmentLoadError(
                        f"{what} did not return within {timeout_s:g} s",
                        hint=f"{'rollout.reset_timeout_s' if made else 'environment.tasks_timeout_s'} sets this deadline",
                    ) from error
                if isinstance(error, OpenTinkerError):
                    raise
                raise EnvironmentLoadError(f"{what} raised {type(error).__name__}: {error}") from error

    def _source(self, split: Split) -> TaskSource:
        given = self._config.train_tasks if split == "train" else self._config.held_out_tasks
        if given is None:
            return self._environment.task_source(split, self._config.args)
        tasks = load_tasks(
            given.name,
            split=given.split,
            subset=given.subset,
            columns=given.columns,
            limit=given.limit,
            shuffle=given.shuffle,
            base_dir=self._base_dir,
            required=self._environment.required_columns(self._config.args),
        )
        self._environment.check_tasks(tasks, self._config.args)
        return tasks

    def _is_simple(self) -> bool:
        return self._environment.task_source.__func__ is Environment.task_source.__func__  # type: ignore[attr-defined]
