"""The order of one policy's commands: each sequence number runs once, in order, whatever is retried or reordered."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from opentinker.errors import ConflictError

T = TypeVar("T")
GAP_TIMEOUT_S = 30.0
MAX_BUFFERED = 1_000
REMEMBERED = 10_000
"""Digests of the newest commands are kept, so that a late retry with another body is told from a repeat."""


@dataclass(frozen=True)
class Accepted(Generic[T]):
    """A new command. `ready` are the commands that may run now, in order: empty while a predecessor is missing."""

    ready: tuple[T, ...]


@dataclass(frozen=True)
class Duplicate:
    """The same command was accepted before: answer with the first attempt's operation."""


@dataclass
class _Waiting(Generic[T]):
    digest: bytes
    command: T
    expires_at: float


class CommandQueue(Generic[T]):
    """Decides about the commands of one policy. No clock of its own: `now` is in seconds on any monotonic scale."""

    def __init__(self, next_seq: int = 0, *, gap_timeout_s: float = GAP_TIMEOUT_S) -> None:
        self._next_seq = next_seq
        self._gap_timeout_s = gap_timeout_s
        self._ran: OrderedDict[int, bytes] = OrderedDict()
        self._waiting: dict[int, _Waiting[T]] = {}

    @property
    def next_seq(self) -> int:
        """The lowest number that has not run."""
        return self._next_seq

    def offer(self, seq: int, digest: bytes, command: T, now: float) -> Accepted[T] | Duplicate:
        """Take in a command.

        Raises:
            ConflictError: another body was accepted under this number, or too many commands wait for one that is missing.
        """
        if seq < self._next_seq:
            known = self._ran.get(seq, digest)
        elif seq in self._waiting:
            known = self._waiting[seq].digest
        elif len(self._waiting) >= MAX_BUFFERED:
            raise ConflictError(f"{MAX_BUFFERED} commands already wait for command {self._next_seq}")
        else:
            self._waiting[seq] = _Waiting(digest, command, now + self._gap_timeout_s)
            return Accepted(tuple(self._release()))
        if known != digest:
            raise ConflictError(
                f"command {seq} was already sent with another body",
                hint="one client at a time numbers a policy's commands; ask the policy for its next_seq",
            )
        return Duplicate()

    def expire(self, now: float) -> list[T]:
        """Commands whose predecessor did not come in time. They are forgotten, so they may be sent again."""
        late = sorted(seq for seq, waiting in self._waiting.items() if waiting.expires_at <= now)
        return [self._waiting.pop(seq).command for seq in late]

    def close(self) -> list[T]:
        """Commands that still wait for a predecessor; they are forgotten."""
        return self.expire(math.inf)

    def _release(self) -> list[T]:
        ready = []
        while (waiting := self._waiting.pop(self._next_seq, None)) is not None:
            ready.append(waiting.command)
            self._ran[self._next_seq] = waiting.digest
            self._next_seq += 1
        while len(self._ran) > REMEMBERED:
            self._ran.popitem(last=False)
        return ready
