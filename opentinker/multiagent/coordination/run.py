"""One run whose agents are driven by different processes: who has joined, on what they agree, who is where, and what becomes of
the others when one is late or lost. No I/O, no clock: the caller says what time it is.

A run gathers until every seat has its driver, and is over when nobody is left to gather. All drivers say from which steps they
could go on; it begins at the newest that all have. From then on `PhaseBarrier` says who may do what, and games begin when all
have asked for the same ones. A run ends when all have left, or with the cause that `ended` holds and every driver is told.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from opentinker.errors import AgentLostError, ConflictError, DeadlineError, OpenTinkerError
from opentinker.multiagent.phases import Moment, Phase, PhaseBarrier

SeatKind = Literal["policy", "script"]


@dataclass(frozen=True)
class Patience:
    """How long a run waits for what."""

    lease_s: float = 20.0
    """A driver that gives no sign of life for so long is lost."""
    join_timeout_s: float = 600.0
    """From the first driver until all seats have one; and from then until all have asked for the first games."""
    barrier_timeout_s: float = 30.0
    """From when the first driver has done its part until the last one has."""
    on_lost: Literal["fail", "go_on"] = "fail"


@dataclass(frozen=True)
class Round:
    """Games that all drivers ask for. `digest` stands for the tasks."""

    kind: Literal["train", "evaluation"]
    step: int
    first_index: int
    group_size: int
    tasks: int
    digest: str

    def __str__(self) -> str:
        return f"the {'evaluation at' if self.kind == 'evaluation' else 'games of'} step {self.step}"


@dataclass
class Driver:
    """A process that plays seats."""

    id: str
    agents: Mapping[str, SeatKind]
    terms: Mapping[str, Any]
    steps: tuple[int, ...]
    seen_at: float
    opened: Round | None = None
    opened_at: float = 0.0

    def __str__(self) -> str:
        return " and ".join(f"'{name}'" for name in self.agents)


@dataclass(frozen=True)
class News:
    """What drivers are to be told: `start` (step), `moment` (iteration, phase), `gone` (agents, cause)."""

    word: str
    args: tuple[Any, ...] = field(default=())


class CoordinatedRun:
    """`terms` of the first driver are everybody's. What is to be told or done since the last look is in `news` and `ready`."""

    def __init__(self, name: str, seats: Sequence[str], patience: Patience, now: float) -> None:
        self.name = name
        self.seats = tuple(seats)
        self.patience = patience
        self.drivers: dict[str, Driver] = {}
        self.barrier: PhaseBarrier | None = None
        self.ended: OpenTinkerError | None = None
        self.news: list[News] = []
        self.ready: Round | None = None
        """Games that are to be played now."""
        self._playing = False
        self._began_at = now
        self._rounds = 0
        self._finished: dict[str, str] = {}
        """Agents whose drivers left in order, and after which step."""

    @property
    def over(self) -> bool:
        """Nobody needs it any more: it has ended, or all have left. So has a run that only gathered: whoever comes then begins
        another one, by rules of its own."""
        return self.ended is not None or not self.drivers

    @property
    def terms(self) -> Mapping[str, Any]:
        return next(iter(self.drivers.values())).terms if self.drivers else {}

    def holder(self, agents: Iterable[str], driver: str = "") -> Driver | None:
        """Which other driver plays one of these seats."""
        wanted = set(agents)
        return next((other for other in self.drivers.values() if other.id != driver and wanted & set(other.agents)), None)

    def join(
        self, driver: str, agents: Mapping[str, SeatKind], terms: Mapping[str, Any], steps: Sequence[int], now: float
    ) -> None:
        """A driver takes its seats. The same words again change nothing.

        Raises:
            ConflictError: a seat is taken, or the driver and those who joined before do not agree on something.
        """
        if driver in self.drivers:
            self.alive(driver, now)
            return
        if self.barrier is not None:
            raise ConflictError(
                f"run '{self.name}' has begun: all its seats have drivers", hint="give another run a name of its own"
            )
        if (other := self.holder(agents)) is not None:
            [taken, *_] = [name for name in agents if name in other.agents]
            raise ConflictError(
                f"'{taken}' of run '{self.name}' is played by another driver already",
                hint="each seat has one driver; name another run if this is to be one of its own",
            )
        joining = Driver(driver, dict(agents), terms, tuple(steps), now)
        for earlier in self.drivers.values():
            check_terms(joining, earlier)
        if not self.drivers:
            self._began_at = now
        self.drivers[driver] = joining
        if not self._vacant():
            self._begin()

    def alive(self, driver: str, now: float) -> None:
        """The driver gives a sign of life."""
        if (known := self.drivers.get(driver)) is not None:
            known.seen_at = max(known.seen_at, now)

    def open(self, driver: str, round_: Round, now: float) -> None:
        """The driver asks for games, and waits until all do. Unlike ones are the run's end."""
        if self.ended is not None or driver not in self.drivers:
            return
        mine = self.drivers[driver]
        if self.barrier is None or self._playing or mine.opened is not None:
            self.fail(ConflictError(f"the driver of {mine} asks for {round_} out of order"))
            return
        if round_.kind == "train" and self.barrier.moment != Moment(round_.step - 1, Phase.ROLLOUT):
            self.fail(ConflictError(f"the driver of {mine} asks for {round_}; all are in {self.barrier.moment}"))
            return
        self._part_with_finished()
        if self.ended is not None:
            return
        for other in self.drivers.values():
            if other.opened is not None and other.opened != round_:
                self.fail(_unlike(mine, round_, other, other.opened))
                return
        mine.opened, mine.opened_at = round_, now
        self._open_if_all()

    def played(self) -> None:
        """The games that were `ready` are over."""
        self._playing = False

    def finish(self, driver: str, moment: Moment, now: float) -> None:
        """The driver has finished a phase of an iteration."""
        if self.ended is not None or driver not in self.drivers:
            return
        mine = self.drivers[driver]
        if self.barrier is None or self._playing or mine.opened is not None:
            self.fail(ConflictError(f"the driver of {mine} has finished {moment}, it says, and games are played"))
            return
        try:
            before = self.barrier.moment
            for agent in mine.agents:
                self.barrier.finish(agent, moment, now)
        except OpenTinkerError as error:
            self.fail(error)
            return
        self._tell_moment(before)
        if self.barrier.moment == before:
            self._part_with_finished()

    def leave(self, driver: str, cause: OpenTinkerError | None) -> None:
        """The driver leaves: in order, or because of `cause`."""
        if (mine := self.drivers.get(driver)) is None or self.ended is not None:
            return
        if cause is None and self.barrier is not None:
            # A driver never leaves in order within a phase that it has to finish: whoever waits for it then is to know.
            del self.drivers[driver]
            self._finished |= dict.fromkeys(mine.agents, f"in order in {self.barrier.moment}")
            if waiting := [other for other in self.drivers.values() if other.opened is not None]:
                self._part(f"the driver of {mine} left in order, and that of {waiting[0]} waits", mine.agents, ConflictError)
            elif self.barrier.awaited() is not None:
                self._part(f"the driver of {mine} left in order within {self.barrier.moment}", mine.agents, ConflictError)
            if self.ended is None:
                self._go_on_without()
            return
        self._lose(mine, f"is lost: {'it left' if cause is None else _first_line(cause)}")

    def stop(self, driver: str, why: str) -> None:
        """The driver's training has ended before its last step, in order: the others go on without it, or end. No restart would
        bring it back, so that this is no AgentLostError."""
        if (mine := self.drivers.get(driver)) is not None and self.ended is None:
            self._lose(mine, f"stopped early: {why}"[:500], ConflictError)

    def fail(self, error: OpenTinkerError) -> None:
        """The run is over for all."""
        if self.ended is None:
            self.ended = error

    def tick(self, now: float) -> None:
        """Look at the time: leases, and who is late."""
        if self.ended is not None:
            return
        for mine in list(self.drivers.values()):
            if now - mine.seen_at > self.patience.lease_s and self.ended is None:
                self._lose(mine, f"is lost: it gave no sign of life for {self.patience.lease_s:.3g} s")
        if self.ended is not None or not self.drivers:
            return
        if self.barrier is None:
            if now - self._began_at > self.patience.join_timeout_s:
                self.fail(
                    DeadlineError(
                        f"run '{self.name}': nobody joined for {_names(self._vacant())} within "
                        f"{self.patience.join_timeout_s:.3g} s; {_names(self._held())} waited",
                        hint="start the driver of every seat; turns.join_timeout_s is how long they wait for each other",
                    )
                )
            return
        self._see_late_openers(now)
        if self.ended is None and (awaited := self.barrier.late(now, self.patience.barrier_timeout_s)) is not None:
            self._late(awaited.learners, f"in {awaited.moment}", now - awaited.since)

    def document(self, now: float) -> dict[str, Any]:
        """What there is to say of it."""
        awaited = self.barrier.awaited() if self.barrier is not None else None
        return {
            "run": self.name,
            "state": "ended" if self.over else "gathering" if self.barrier is None else "running",
            "agents": {name: round(now - one.seen_at, 1) for one in self.drivers.values() for name in one.agents},
            "vacant": self._vacant() if self.barrier is None else [],
            "moment": str(self.barrier.moment) if self.barrier is not None else None,
            "awaited": list(awaited.learners) if awaited else [],
            "cause": self.ended.detail if self.ended is not None else "",
        }

    def _held(self) -> list[str]:
        return [name for name in self.seats if self.holder([name]) is not None]

    def _vacant(self) -> list[str]:
        return [name for name in self.seats if self.holder([name]) is None]

    def _begin(self) -> None:
        common = set.intersection(*(set(one.steps) for one in self.drivers.values()))
        if not common:
            said = "; ".join(f"{one} from {_steps(one.steps)}" for one in self.drivers.values())
            self.fail(
                ConflictError(
                    f"run '{self.name}': there is no step from which all drivers can go on: {said}",
                    hint="start all of them anew, or all from checkpoints of one step",
                )
            )
            return
        step = max(common)
        self.barrier = PhaseBarrier(self.seats, start=Moment(step, Phase.ROLLOUT))
        self.news.append(News("start", (step,)))

    def _open_if_all(self) -> None:
        waiting = [one.opened for one in self.drivers.values()]
        if not waiting or None in waiting:
            return
        self.ready, self._playing = waiting[0], True
        self._rounds += 1
        for one in self.drivers.values():
            one.opened = None

    def _see_late_openers(self, now: float) -> None:
        waiting = [one for one in self.drivers.values() if one.opened is not None]
        if not waiting:
            return
        first = min(waiting, key=lambda one: one.opened_at)
        # Before the first games policies are made and checkpoints loaded.
        limit_s = self.patience.barrier_timeout_s if self._rounds else self.patience.join_timeout_s
        if now - first.opened_at > limit_s:
            late = [name for one in self.drivers.values() if one.opened is None for name in one.agents]
            self._late(late, f"before {first.opened}", now - first.opened_at)

    def _late(self, agents: Iterable[str], where: str, for_s: float) -> None:
        names = list(agents)
        drivers = [one for one in self.drivers.values() if set(one.agents) & set(names)]
        self._part(
            f"{_names(names)} held up the others {where} for {for_s:.3g} s",
            [name for one in drivers for name in one.agents],
            AgentLostError,
            hint="turns.barrier_timeout_s is how long one may",
        )
        if self.ended is None:
            for one in drivers:
                self.drivers.pop(one.id, None)
            self._go_on_without()

    def _part_with_finished(self) -> None:
        """Somebody waits for those who have left in order."""
        for agent, after in list(self._finished.items()):
            self._part(f"the driver of '{agent}' left {after}", [agent], ConflictError)

    def _lose(self, mine: Driver, cause: str, kind: Callable[..., OpenTinkerError] = AgentLostError) -> None:
        del self.drivers[mine.id]
        if self.barrier is None:  # its seats are free again
            return
        self._part(f"the driver of {mine} {cause}", mine.agents, kind)
        if self.ended is None:
            self._go_on_without()

    def _part(self, cause: str, agents: Iterable[str], kind: Callable[..., OpenTinkerError], *, hint: str = "") -> None:
        """These agents are gone: the run ends with that cause, or goes on without them."""
        assert self.barrier is not None
        if self.patience.on_lost == "fail":
            self.fail(kind(f"run '{self.name}': {cause}", hint=hint))
            return
        before = self.barrier.moment
        names = [name for name in agents if name not in self.barrier.gone]
        for name in names:
            self.barrier.leave(name, cause)
            self._finished.pop(name, None)
        if names:
            self.news.append(News("gone", (names, cause)))
        self._tell_moment(before)

    def _go_on_without(self) -> None:
        if not self._playing:
            self._open_if_all()

    def _tell_moment(self, before: Moment) -> None:
        assert self.barrier is not None
        if (now := self.barrier.moment) != before:
            self.news.append(News("moment", (now.iteration, now.phase.value)))


def check_terms(joining: Driver, earlier: Driver) -> None:
    """Whether two drivers agree on everything that they must.

    Raises:
        ConflictError: the detail names both values.
    """
    for key in dict.fromkeys((*earlier.terms, *joining.terms)):
        theirs, mine = earlier.terms.get(key), joining.terms.get(key)
        if theirs != mine:
            raise disagreement(key, f"for {joining}", mine, f"for {earlier}", theirs)


def disagreement(key: str, who: str, mine: Any, other: str, theirs: Any) -> ConflictError:
    """Two do not agree on something."""
    what = "the environment's version" if key == "environment.version" else key
    return ConflictError(
        f"the agents do not agree on {what}: {mine!r} {who}, {theirs!r} {other}",
        hint="drivers of one run play the same environment by the same rules",
    )


def _unlike(one: Driver, mine: Round, other: Driver, theirs: Round) -> ConflictError:
    if str(mine) != str(theirs):
        return ConflictError(f"the driver of {one} asks for {mine}, that of {other} for {theirs}")
    if (mine.digest, mine.first_index, mine.tasks) != (theirs.digest, theirs.first_index, theirs.tasks):
        return ConflictError(
            f"the drivers of {one} and {other} have different tasks for {mine}",
            hint="their seeds agree, so their files or generators of tasks differ",
        )
    return ConflictError(
        f"{mine}: {mine.group_size} episodes per task for the driver of {one}, {theirs.group_size} for that of {other}"
    )


def _first_line(error: OpenTinkerError) -> str:
    """The rest, such as what Ray has to say, is for whom it happened to."""
    lines = str(error).splitlines() or [error.code]
    return lines[0][:500] + (" ..." if len(lines) > 1 or len(lines[0]) > 500 else "")


def _names(agents: Iterable[str]) -> str:
    return " and ".join(f"'{name}'" for name in agents)


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(str(step) for step in sorted(steps, reverse=True)[:5])
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (" ..." if len(steps) > 5 else "")
