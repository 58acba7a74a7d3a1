"""What is checked, and how: shared by all checks."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from opentinker.env.checks.actions import ActionScripts
from opentinker.env.checks.playing import Player, Script, Transcript, play
from opentinker.env.environment import Environment
from opentinker.env.execution import EnvironmentSession
from opentinker.env.processes import SessionFactory
from opentinker.env.remote import RemoteEnvironment
from opentinker.env.threads import UserThreads


@dataclass(frozen=True)
class CheckOptions:
    """How thoroughly an environment is checked."""

    episodes: int = 1000
    """Episodes over which memory is watched."""
    timeout_s: float = 10.0
    """Deadline of every call."""
    time_limit_s: float = 120.0
    """The watch over memory ends after this time, however many episodes it has seen."""
    max_turns: int = 16
    """An episode with this many turns is cut, as in training."""
    tasks: int = 8
    """Tasks that are played."""
    seed: int = 0
    """Tasks and actions derive from it."""


@dataclass
class Subject:
    """An environment with the tasks to play and what to say in them."""

    environment: type[Environment]
    args: Mapping[str, Any]
    options: CheckOptions
    threads: UserThreads
    sessions: SessionFactory
    """As in training: an episode runs in a thread or in a process, as the class declares."""
    tasks: list[Any] = field(default_factory=list)
    suggestions: list[list[str]] = field(default_factory=list)
    """What the environment's author would say, per task."""

    @cached_property
    def scripts(self) -> ActionScripts:
        return ActionScripts(self.environment)

    @property
    def name(self) -> str:
        return self.environment.__name__

    def make(self) -> Environment:
        return self.environment(**self.args)

    @property
    def elsewhere(self) -> str:
        """Where the environment's instances are, in words, if that is not this process."""
        if issubclass(self.environment, RemoteEnvironment):
            return "on a server"
        return "in processes of their own" if self.sessions.processes is not None else ""

    def player(self, task: Any, make: Callable[[], Environment] | None = None) -> Player:
        """An episode with a fresh instance, which `make` may hold back; then it runs in a thread."""
        session = self.sessions.session(self.threads) if make is None else EnvironmentSession(make, self.threads)
        return Player(self.environment, session, task, self.options.timeout_s)

    def script(self, index: int, style: str) -> Script:
        """The actions of a style ('good', 'plausible', 'hostile') for the task with this index; the same each time."""
        digest = hashlib.blake2b(f"{self.options.seed}/{index}/{style}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        match style:
            case "good":
                return lambda tools: self.scripts.good(self.suggestions[index], seed, tools)
            case "plausible":
                return lambda tools: self.scripts.plausible(seed, tools)
            case "hostile":
                return lambda tools: self.scripts.hostile(seed, tools)
        raise ValueError(f"there is no style {style}")

    async def episode(self, index: int, style: str) -> Transcript:
        """One whole episode of the task with this index."""
        return await play(self.player(self.tasks[index]), self.script(index, style), self.options.max_turns)


STYLES = ("good", "plausible", "hostile")
