"""A job's tasks come from where its config says, and the user's code that makes them has a deadline."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from opentinker.config.rollout import EnvironmentConfig
from opentinker.config.tasks import TasksConfig
from opentinker.env.environment import Environment
from opentinker.env.tasks import ListTasks, TaskSource
from opentinker.errors import ConfigError, EnvironmentLoadError
from opentinker.training.tasks import JobTasks


def tasks_of(environment: type[Environment], timeout_s: float = 10.0, **config: Any) -> JobTasks:
    return JobTasks(environment, EnvironmentConfig(name="x", **{"tasks_timeout_s": timeout_s, **config}), timeout_s=timeout_s)


async def test_tasks_depend_on_seed_and_place_alone() -> None:
    async def drawn(seed: int, start: int, count: int = 50) -> list[int]:
        return [t["seed"] for t in await tasks_of(Environment).draw(seed, start, count)]

    assert await drawn(0, 0) == await drawn(0, 0)
    assert len({*await drawn(0, 0), *await drawn(0, 50), *await drawn(1, 0)}) == 150
    assert await drawn(0, 0, 20) + await drawn(0, 20, 30) == await drawn(0, 0)


async def test_a_file_that_the_config_names_replaces_the_environments_own_tasks(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    config = EnvironmentConfig(name="x", train_tasks=TasksConfig(name="t.jsonl", columns={"question": "q"}))
    tasks = JobTasks(Environment, config, timeout_s=10.0, base_dir=tmp_path)
    assert sorted(t["question"] for t in await tasks.draw(0, 0, 4)) == ["a", "a", "b", "b"]
    assert await tasks.held_out(5) == []
    missing = JobTasks(Environment, EnvironmentConfig(name="x", held_out_tasks=TasksConfig(name="no.csv")), timeout_s=10.0)
    with pytest.raises(ConfigError, match=r"no.csv does not exist"):
        await missing.held_out(5)


async def test_the_environment_may_refuse_tasks_of_a_file_before_any_episode(tmp_path: Path) -> None:
    class Picky(Environment):
        @classmethod
        def check_tasks(cls, tasks: TaskSource, args: Mapping[str, Any]) -> None:
            if any(task["q"] == args["bad"] for task in tasks.first(10)):
                raise ConfigError(f"the question {args['bad']!r} has no answer")

    (tmp_path / "t.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')

    def tasks(bad: str) -> JobTasks:
        config = EnvironmentConfig(name="x", train_tasks=TasksConfig(name="t.jsonl"), args={"bad": bad})
        return JobTasks(Picky, config, timeout_s=10.0, base_dir=tmp_path)

    assert len(await tasks("c").draw(0, 0, 2)) == 2
    with pytest.raises(ConfigError, match="'b' has no answer"):
        await tasks("b").draw(0, 0, 2)


async def test_sources_given_in_python_come_before_everything() -> None:
    tasks = JobTasks(
        Environment,
        EnvironmentConfig(name="x"),
        timeout_s=10.0,
        sources={"train": ListTasks([7]), "held_out": ListTasks([8, 9])},
    )
    assert (await tasks.draw(0, 3, 2), await tasks.held_out(1)) == ([7, 7], [8])


async def test_an_environment_that_cannot_make_tasks_is_named() -> None:
    class Broken(Environment):
        @classmethod
        def make_task(cls, seed: int) -> None:
            raise KeyError("words.txt")

        @classmethod
        def held_out_tasks(cls) -> list[int]:
            raise KeyError("words.txt")

    with pytest.raises(EnvironmentLoadError, match=r"Broken.make_task raised KeyError: 'words.txt'"):
        await tasks_of(Broken).draw(0, 0, 1)
    with pytest.raises(EnvironmentLoadError, match=r"Broken.held_out_tasks raised KeyError"):
        await tasks_of(Broken).held_out(3)


async def test_an_environment_that_makes_tasks_for_ever_is_named_and_stalls_nobody() -> None:
    class Endless(Environment):
        @classmethod
        def make_task(cls, seed: int) -> None:
            time.sleep(60.0)

        @classmethod
        def held_out_tasks(cls) -> Iterator[int]:  # type: ignore[override]
            return count()

    drawing = asyncio.create_task(tasks_of(Endless, 0.2).draw(0, 0, 1))
    ticks = 0
    while not drawing.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks > 5
    with pytest.raises(EnvironmentLoadError, match=r"Endless.make_task did not return within 0.2 s"):
        drawing.result()
    assert await tasks_of(Endless).held_out(3) == [0, 1, 2]


async def test_the_first_tasks_have_the_time_that_a_dataset_takes_and_later_ones_that_of_a_reset() -> None:
    class Slow(Environment):
        first = True

        @classmethod
        def make_task(cls, seed: int) -> int:
            time.sleep(0.6)
            return seed

    tasks = tasks_of(Slow, 0.2, tasks_timeout_s=30.0)
    assert len(await tasks.draw(0, 0, 1)) == 1
    with pytest.raises(EnvironmentLoadError, match=r"did not return within 0.2 s .rollout.reset_timeout_s sets"):
        await tasks.draw(0, 1, 1)
