"""The barrier between rollouts and updates: ROLLOUT -> UPDATE -> ROLLOUT, for all learners of a run together. No I/O, no clock.

A learner is whoever samples and updates one policy; learners may live in different driver processes and on different servers.
Each tells when it has finished a phase of an iteration, and may go on when every other has:

- nobody updates in iteration i before all rollouts of i are complete;
- nobody samples in iteration i + 1 before all updates of i are published.

Words may be lost, come twice or late: what was said before changes nothing, and who asks again hears the same answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from opentinker.errors import ConfigError, ConflictError, NotFoundError


class Phase(StrEnum):
    ROLLOUT = "rollout"
    UPDATE = "update"


@dataclass(frozen=True, order=True)
class Moment:
    """A phase of an iteration. Moments are in the order of time."""

    iteration: int
    phase: Phase

    def __post_init__(self) -> None:
        if self.iteration < 0:
            raise ValueError(f"iterations count from 0, not {self.iteration}")

    @property
    def next(self) -> "Moment":
        if self.phase is Phase.ROLLOUT:
            return Moment(self.iteration, Phase.UPDATE)
        return Moment(self.iteration + 1, Phase.ROLLOUT)

    def __str__(self) -> str:
        return f"{self.phase} {self.iteration}"


@dataclass(frozen=True)
class Awaited:
    """Who holds the others up, and for how long: since the first of them has finished, in seconds of the caller's clock."""

    learners: tuple[str, ...]
    moment: Moment
    since: float


class PhaseBarrier:
    """Where a run's learners are. `lag` is by how many iterations a learner's updates may be behind its rollouts; only 0 is
    played today, which is: never.

    Raises:
        ConfigError: there are no learners, two have one name, or the lag is not 0.
    """

    def __init__(self, learners: Sequence[str], *, lag: int = 0, start: Moment | None = None) -> None:
        if not learners or len(set(learners)) < len(learners):
            raise ConfigError(f"a barrier needs learners of different names, not {list(learners)}")
        if lag:
            raise ConfigError(f"lag {lag} is not served", hint="only 0: nobody samples before all updates are published")
        self._moment = start or Moment(0, Phase.ROLLOUT)
        self._learners = tuple(learners)
        self._finished: set[str] = set()
        self._gone: dict[str, str] = {}
        self._first_at: float | None = None

    @property
    def moment(self) -> Moment:
        """The phase that is being played."""
        return self._moment

    @property
    def gone(self) -> dict[str, str]:
        """Who left, and why."""
        return dict(self._gone)

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(name for name in self._learners if name not in self._gone)

    def may(self, learner: str, moment: Moment) -> bool:
        """Whether the learner may be in this phase now.

        Raises:
            NotFoundError: there is no such learner.
            ConflictError: it has left, or the phase is over for everybody.
        """
        self._check(learner)
        if moment < self._moment:
            raise ConflictError(f"{moment} is over; all are in {self._moment}", hint="go on from there")
        return moment == self._moment

    def finish(self, learner: str, moment: Moment, now: float) -> bool:
        """The learner has finished this phase; whether that was what the others waited for. Saying it again changes nothing.

        Raises:
            NotFoundError: there is no such learner.
            ConflictError: it has left, or the phase has not begun.
        """
        self._check(learner)
        if moment > self._moment:
            raise ConflictError(f"'{learner}' cannot have finished {moment}: all are in {self._moment}")
        if moment < self._moment:
            return False
        self._finished.add(learner)
        if self._first_at is None:
            self._first_at = now
        return self._advance()

    def leave(self, learner: str, cause: str) -> bool:
        """The learner is gone, and nobody waits for it any more; whether that was what the others waited for.

        Raises:
            NotFoundError: there is no such learner.
        """
        if learner not in self._learners:
            raise NotFoundError(f"there is no learner '{learner}'", hint=f"there are {', '.join(self._learners)}")
        self._gone.setdefault(learner, cause)
        return self._advance()

    def awaited(self) -> Awaited | None:
        """Who holds the others up; None while nobody waits."""
        if self._first_at is None:
            return None
        late = tuple(name for name in self.present if name not in self._finished)
        return Awaited(late, self._moment, self._first_at)

    def late(self, now: float, timeout_s: float) -> Awaited | None:
        """Who has held the others up for longer than `timeout_s`."""
        awaited = self.awaited()
        return awaited if awaited is not None and now - awaited.since > timeout_s else None

    def _advance(self) -> bool:
        if not self.present or not self._all_finished(self.present):
            return False
        self._moment, self._first_at = self._moment.next, None
        self._finished.clear()
        return True

    def _all_finished(self, present: Iterable[str]) -> bool:
        return all(name in self._finished for name in present)

    def _check(self, learner: str) -> None:
        if learner not in self._learners:
            raise NotFoundError(f"there is no learner '{learner}'", hint=f"there are {', '.join(self._learners)}")
        if learner in self._gone:
            raise ConflictError(f"'{learner}' has left: {self._gone[learner]}")
