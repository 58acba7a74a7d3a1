"""Which samples may start while commands run: the order that clients see where engine and trainer work side by side. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from opentinker.server.protocol import CommandWork, SampleWork, Work

SWITCHING = frozenset({"create", "delete", "publish", "load", "load_weights"})
"""Commands that change what their policy's samples come from: a sample behind one waits for it."""


@dataclass(frozen=True)
class _Waiting:
    work: SampleWork
    place: int
    behind: int
    """The last switching command of its policy before it; -1: none."""
    behind_any: int
    """The last command of its policy before it."""


class SampleGate:
    """Commands run in the order of arrival. A sample starts as soon as no command that was before it can still decide what it
    comes from: at once, if those are such as only compute; behind a switching command, when that is done. One that names a
    version that is not there (yet) waits for all of its policy's commands before it, for one of them may publish it.
    """

    def __init__(self) -> None:
        self._places = 0
        self._commands: deque[tuple[int, CommandWork]] = deque()
        self._samples: list[_Waiting] = []
        self._switching: dict[str, int] = {}
        self._any: dict[str, int] = {}
        self._running: int | None = None

    def put(self, work: Work) -> None:
        """Take in what has arrived."""
        place = self._places
        self._places += 1
        if isinstance(work, SampleWork):
            behind, behind_any = self._switching.get(work.policy, -1), self._any.get(work.policy, -1)
            self._samples.append(_Waiting(work, place, behind, behind_any))
            return
        self._commands.append((place, work))
        self._any[work.policy] = place
        if work.command in SWITCHING:
            self._switching[work.policy] = place

    def next_command(self) -> CommandWork | None:
        """The command whose turn it is; None if there is none. It runs until `done`."""
        if not self._commands:
            return None
        self._running, work = self._commands.popleft()
        return work

    def done(self) -> None:
        """The command has ended."""
        self._running = None
        # Policies come and go; what holds nobody back is forgotten.
        last = self._open()
        self._switching = {policy: place for policy, place in self._switching.items() if place >= last}
        self._any = {policy: place for policy, place in self._any.items() if place >= last}

    @property
    def has_commands(self) -> bool:
        return bool(self._commands)

    def startable(self, served: Callable[[SampleWork], bool], *, before_running: bool = False) -> list[SampleWork]:
        """Take out the samples that may start now, in their order. `served` says whether the version that one names is there.
        With `before_running`: only those that were before the command that runs, which is about to switch."""
        opened = self._open()
        ready = [
            waiting
            for waiting in self._samples
            if waiting.behind < opened
            and (waiting.behind_any < opened or served(waiting.work))
            and (not before_running or self._running is None or waiting.place < self._running)
        ]
        taken = {waiting.place for waiting in ready}
        self._samples = [waiting for waiting in self._samples if waiting.place not in taken]
        return [waiting.work for waiting in ready]

    def has_startable(self, served: Callable[[SampleWork], bool]) -> bool:
        opened = self._open()
        return any(
            waiting.behind < opened and (waiting.behind_any < opened or served(waiting.work)) for waiting in self._samples
        )

    def _open(self) -> int:
        """All commands before this place have ended."""
        if self._running is not None:
            return self._running
        return self._commands[0][0] if self._commands else self._places
