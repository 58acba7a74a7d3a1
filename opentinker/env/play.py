"""A person plays an episode: what the environment shows and answers, in the order in which a policy would see it."""

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from opentinker.env.environment import Action, Environment, Message, StepResult
from opentinker.env.processes import SessionFactory
from opentinker.env.tasks import Split
from opentinker.env.threads import UserThreads
from opentinker.errors import ConfigError, EnvironmentFailedError
from opentinker.images import Image

TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


@dataclass
class Totals:
    """What an episode came to."""

    turns: int = 0
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    done: bool = False

    def add(self, result: StepResult, turns: int) -> None:
        self.turns += turns
        self.reward += cast(float, result.reward)
        self.metrics.update(result.metrics)
        for name, value in result.components.items():
            self.components[name] = self.components.get(name, 0.0) + value


class Game:
    """One episode, played with blocking calls, in a thread or a process as the class declares. A context manager: leaving it
    closes the environment.

    Raises:
        ConfigError: a class that wants processes cannot be loaded in one.
        EnvironmentFailedError: from every call, what the environment raised or got wrong.
        DeadlineError: from every call, it took longer than a minute.
    """

    def __init__(self, environment: type[Environment], args: Mapping[str, Any]) -> None:
        self._environment = environment
        self._args = args
        self._runner = asyncio.Runner()
        self._threads = UserThreads()
        self._sessions = SessionFactory(functools.partial(environment, **args))
        self._session = self._sessions.session(self._threads)
        self.totals = Totals()
        self.tools: Sequence[Mapping[str, Any]] = ()

    def __enter__(self) -> Self:
        self._threads.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._run(self._closed)
        finally:
            self._threads.__exit__(kind, error, trace)
            self._runner.close()

    def task(self, split: Split, seed: int) -> Any:
        """The task that a seed gives in training, or the held-out task with this number.

        Raises:
            ConfigError: there is no such held-out task.
        """
        source = self._run(lambda: self._in_thread(lambda: self._environment.task_source(split, self._args)))
        if split == "train":
            return self._run(lambda: self._in_thread(lambda: source.draw(seed, 0, 1)))[0]
        held_out = self._run(lambda: self._in_thread(lambda: source.first(seed + 1)))
        if len(held_out) <= seed:
            raise ConfigError(f"there is no held-out task {seed}", hint=f"there are {len(held_out)}, from 0")
        return held_out[seed]

    def reset(self, task: Any) -> tuple[Message, ...]:
        """The first messages of an episode of this task."""
        first: tuple[Message, ...] = self._run(lambda: self._session.reset(task, TIMEOUT_S))
        self.tools = self._session.tools
        return first

    def step(self, text: str) -> StepResult:
        """What the environment answers; its observation is messages."""
        result: StepResult = self._run(lambda: self._session.step(Action(text), TIMEOUT_S))
        self.totals.add(result, 1)
        self.totals.done = result.done
        return result

    def finalize(self) -> StepResult | None:
        """The last reward, if the environment gives one and there was a turn."""
        if not (self._session.finalizes and self.totals.turns):
            return None
        result: StepResult = self._run(lambda: self._session.finalize(TIMEOUT_S))
        self.totals.add(result, 0)
        return result

    async def _closed(self) -> None:
        try:
            await self._session.close(CLOSE_TIMEOUT_S)
        finally:
            await self._sessions.close()

    def _run(self, start: Callable[[], Any]) -> Any:
        async def awaited() -> Any:
            return await start()

        return self._runner.run(awaited())

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._threads.call(function)
        except TimeoutError:
            raise EnvironmentFailedError(f"{self._environment.__name__}'s tasks were not there after {TIMEOUT_S:g} s") from None


def saved_image(image: Image, folder: Path) -> tuple[Path, str]:
    """Write an image under its hash; where, and what it is, in words."""
    path = folder / f"{image.sha256[:12]}.{image.media_type.partition('/')[2]}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.data)
    return path, f"{_size(image)}{image.media_type}, {len(image.data) / 1024:.1f} KiB"


def _size(image: Image) -> str:
    try:
        width, height = image.pil().size
    except (ImportError, OSError):  # without Pillow, or damaged: the file itself shows it
        return ""
    return f"{width} x {height} "


def read_actions(text: str) -> list[str]:
    """Actions for scripted play: one a line; a line that is a JSON text stands for that text, which may have several lines.

    Raises:
        ConfigError: a line begins like a JSON text and is none.
    """
    actions = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith('"'):
            actions.append(line)
            continue
        try:
            actions.append(str(json.loads(line)))
        except ValueError as error:
            raise ConfigError(f"line {number} of the actions is no JSON text: {error}") from None
    return actions
