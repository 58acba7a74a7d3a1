"""The coordinator's shell: runs by name, a channel to each driver, the clock, and the games in between.

Whoever serves it hands over decoded messages and gives back what is answered; see `opentinker.environments.hosting`.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from opentinker.config.agents import TurnsConfig
from opentinker.config.base import parse_config
from opentinker.config.rollout import RolloutConfig
from opentinker.env.frames import pack, unpack
from opentinker.env.processes import SessionFactory
from opentinker.errors import (
    AgentLostError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OpenTinkerError,
    RateLimitedError,
    UnavailableError,
    from_problem,
)
from opentinker.multiagent.coordination.channel import Channel, Words
from opentinker.multiagent.coordination.games import RoundOfGames, Rules
from opentinker.multiagent.coordination.run import CoordinatedRun, Patience, Round, disagreement
from opentinker.multiagent.coordination.words import Answer
from opentinker.multiagent.phases import Moment, Phase
from opentinker.multiagent.seats import Seats

MAX_RUNS = 256
TICK_S = 0.2
STALL_S = 1.0
"""A look at the time that comes so much later than the one before: the process stood still."""
LONGEST_WAIT_S = 30.0
KEPT_S = 600.0
"""A driver that has not heard how its run ended can ask for so long."""
log = logging.getLogger(__name__)


class _Desk:
    """A driver, and what is said to it."""

    def __init__(self, driver: str, table: "_Table") -> None:
        self.driver = driver
        self.table = table
        self.channel = Channel()
        self.left = False
        self.seen_at = time.monotonic()
        self._news = asyncio.Event()

    def say(self, word: Sequence[Any]) -> None:
        self.channel.say(pack(list(word), "what an environment says"))
        self._news.set()

    def wake(self) -> None:
        """Let who waits look again."""
        self._news.set()

    async def wait(self, timeout_s: float) -> None:
        """Until there is something to say."""
        self._news.clear()
        if not self.channel.waiting and timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()


class _Table:
    """A run, its drivers and its games."""

    def __init__(self, run: CoordinatedRun, rules: Rules) -> None:
        self.run = run
        self.rules = rules
        self.desks: dict[str, _Desk] = {}
        self.games: RoundOfGames | None = None
        self._tasks: list[Any] = []
        self._rounds = 0
        self._playing: asyncio.Task[None] | None = None
        self._told_end = False

    def to(self, agent: str, word: Sequence[Any]) -> None:
        for desk in self.desks.values():
            if agent in (known.agents if (known := self.run.drivers.get(desk.driver)) else ()):
                desk.say(word)

    def to_all(self, word: Sequence[Any]) -> None:
        for desk in self.desks.values():
            desk.say(word)

    def said(self, desk: _Desk, word: Any, now: float) -> None:
        """A driver's word. One that makes no sense is the run's end."""
        try:
            self._said(desk, word, now)
        except (TypeError, ValueError, KeyError) as error:
            self.run.fail(InvalidRequestError(f"a driver says what nobody understands: {error!r}"[:300]))
        except OpenTinkerError as error:
            self.run.fail(error)
        self.follow()

    def _said(self, desk: _Desk, word: Any, now: float) -> None:
        match word:
            case ["open", kind, step, first_index, group_size, tasks]:
                digest = hashlib.blake2b(pack(tasks), digest_size=16).hexdigest()
                self._tasks = tasks  # of all the same, or there are no games
                self.run.open(desk.driver, Round(kind, step, first_index, group_size, len(tasks), digest), now)
            case ["answer", game, agent, turn, answer]:
                mine = self.run.drivers.get(desk.driver)
                if self.games is not None and mine is not None and agent in mine.agents:
                    self.games.answered(game, agent, turn, Answer.from_wire(answer))
            case ["finish", iteration, phase]:
                self.run.finish(desk.driver, Moment(iteration, Phase(phase)), now)
            case ["leave", problem]:
                desk.left = True
                self.run.leave(desk.driver, None if problem is None else from_problem(problem))
            case ["stop", why]:
                desk.left = True
                self.run.stop(desk.driver, str(why))
            case _:
                raise InvalidRequestError(f"there is no such word: {word!r}"[:200])

    def follow(self) -> None:
        """Tell and do what has become true."""
        news, self.run.news = self.run.news, []
        for item in news:
            self.to_all([item.word, *item.args])
            if item.word == "gone" and self.games is not None:
                self.games.gone(*item.args)
        if self.run.ended is not None:
            if not self._told_end:
                self._told_end = True
                log.warning("run=%s ended: %s", self.run.name, self.run.ended)
                self.to_all(["failed", self.run.ended.to_problem()])
                if self._playing is not None:
                    self._playing.cancel()  # once: a second time would interrupt the closing of environments
        elif self.run.barrier is None:
            self._tell_dropped()
        elif self.run.ready is not None:
            asked, self.run.ready = self.run.ready, None
            self._playing = asyncio.ensure_future(self._play(asked))

    def _tell_dropped(self) -> None:
        """Whoever is lost while the run gathers has lost its seats, and hears so if it is heard of again."""
        for desk in self.desks.values():
            if not desk.left and desk.driver not in self.run.drivers:
                desk.left = True
                cause = f"run '{self.run.name}': this driver gave no sign of life for {self.run.patience.lease_s:.3g} s"
                desk.say(["failed", AgentLostError(f"{cause}, and has lost its seats", hint="start it again").to_problem()])

    async def _play(self, asked: Round) -> None:
        self._rounds += 1
        kinds = self.kinds
        self.games = RoundOfGames(self._rounds, asked, self._tasks, kinds, self.rules, self)
        if self.run.barrier is not None:
            for agent, cause in self.run.barrier.gone.items():
                self.games.gone([agent], cause)
        try:
            await self.games.play()
        except OpenTinkerError as error:
            self.run.fail(error)
        except Exception as error:
            log.exception("run=%s: the games failed", self.run.name)
            self.run.fail(OpenTinkerError(f"the coordinator failed: {error!r}", hint="its log has the traceback"))
        self.games = None
        if self.run.ended is None:
            self.run.played()
            self.to_all(["round_over", self._rounds])
        self.follow()

    @property
    def kinds(self) -> dict[str, Any]:
        """Who plays each seat; of those who are gone it makes no difference."""
        known = {name: kind for one in self.run.drivers.values() for name, kind in one.agents.items()}
        return {name: known.get(name, "policy") for name in self.run.seats}

    async def close(self) -> None:
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)
        await self.rules.sessions.close()


class Coordinator:
    """`describe` tells what the environment is that is played here (`name`, `version`, `agents`), and its order of play;
    `sessions` makes its sessions with given constructor's arguments."""

    def __init__(
        self,
        describe: Callable[[], tuple[Mapping[str, Any], Seats]],
        sessions: Callable[[Mapping[str, Any]], SessionFactory],
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._describe = describe
        self._sessions = sessions
        self._lease_s = lease_s
        self._clock = clock
        self._looked_at = clock()
        self._stood_still_s = 0.0
        self._tables: dict[str, _Table] = {}
        self._desks: dict[str, _Desk] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def join(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A driver takes seats in a run, which begins with it if there is none of that name. Where another driver holds one of
        them, this waits until that one gives a sign of life, or its lease ends.

        Raises:
            ConflictError: a seat is played by another driver, or the drivers do not agree.
            NotFoundError: the environment has no such agent.
            RateLimitedError: there are too many runs.
            UnavailableError: the server is told to end.
            InvalidRequestError: something is missing.
        """
        self._check_open()
        try:
            driver, name, agents = str(body["driver"]), str(body["run"]), dict(body["agents"])
            terms, steps = dict(body["terms"]), [int(step) for step in body["steps"]]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"a driver joins with driver, run, agents, terms and steps: {error!r}") from error
        if (
            len(driver) < 16
            or not 0 < len(name) <= 200
            or not agents
            or not set(agents.values()) <= {"policy", "script"}
            or not steps
        ):
            raise InvalidRequestError("a driver joins with an id of its own, a run's name, its agents and its steps")
        about, seats = self._describe()
        _check_environment(about, seats, agents, terms)
        if driver not in self._desks:
            await self._wait_for_seats(name, driver, agents)
            self._check_open()
        now = self._now()
        if driver in self._desks:  # it asks again, or has asked twice at once
            self._desks[driver].table.run.alive(driver, now)
            return {"lease_s": self._lease_s}
        table = self._tables.get(name)
        if table is None or table.run.over:
            if table is not None:
                self._close(table.close())
            table = self._tables[name] = self._new(name, seats, terms, now)
        table.run.join(driver, agents, terms, steps, now)
        desk = self._desks[driver] = table.desks[driver] = _Desk(driver, table)
        desk.seen_at = now
        log.info("run=%s joined: %s", name, ", ".join(agents))
        table.follow()
        self._start()
        return {"lease_s": self._lease_s}

    async def talk(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Words of a driver, for words that it has not heard; waits up to `wait_s` for some.

        Raises:
            NotFoundError: there is no such driver (any more).
            UnavailableError: it would wait for words, and the server is told to end.
            InvalidRequestError: the message is none.
        """
        try:
            message = Words(int(body["heard"]), int(body["first"]), [bytes(word) for word in body["words"]])
            wait_s = min(float(body.get("wait_s", 0.0)), LONGEST_WAIT_S)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"a driver talks with heard, first and words: {error!r}") from error
        desk = self._seen(body)
        for word in desk.channel.take(message):
            desk.table.said(desk, unpack(word), self._now())
        if not self._stopped:
            await desk.wait(wait_s)
        self._seen(body)
        if wait_s > 0 and not desk.channel.waiting:
            self._check_open()
        heard, first, words = desk.channel.message()
        return {"heard": heard, "first": first, "words": words}

    def alive(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A driver's sign of life.

        Raises:
            NotFoundError: there is no such driver (any more).
        """
        desk = self._seen(body)
        return {"over": desk.table.run.over}

    def runs(self) -> dict[str, Any]:
        """What there is to say of the runs."""
        now = self._now()
        return {"runs": [table.run.document(now) for table in self._tables.values()]}

    async def stop(self) -> None:
        """End all runs, and take no more; whoever waits is answered at once."""
        self._stopped = True
        for table in self._tables.values():
            table.run.fail(AgentLostError(f"run '{table.run.name}': the coordinator shuts down"))
            table.follow()
        for desk in self._desks.values():
            desk.wake()
        if self._ticking is not None:
            self._ticking.cancel()
        await asyncio.gather(*(table.close() for table in self._tables.values()), *self._closing, return_exceptions=True)

    def _check_open(self) -> None:
        """Raises: UnavailableError when the server is told to end."""
        if self._stopped:
            raise UnavailableError("the server is shutting down")

    def _seen(self, body: Mapping[str, Any]) -> _Desk:
        desk = self._desks.get(str(body.get("driver")))
        if desk is None:
            raise NotFoundError(
                "the coordinator does not know this driver",
                hint="it was started anew, or the run is long over: start the drivers again, from their checkpoints",
            )
        desk.seen_at = self._now()
        desk.table.run.alive(desk.driver, desk.seen_at)
        return desk

    async def _wait_for_seats(self, name: str, driver: str, agents: Mapping[str, Any]) -> None:
        """Raises: ConflictError when another driver holds a seat and is alive."""
        table = self._tables.get(name)
        if table is None or table.run.over or (other := table.run.holder(agents, driver)) is None:
            return
        seen_at, taken = other.seen_at, next(agent for agent in agents if agent in other.agents)
        while not table.run.over and other.id in table.run.drivers:
            if other.seen_at > seen_at:
                raise ConflictError(
                    f"'{taken}' of run '{name}' is played by another driver, which is alive",
                    hint="each seat has one driver; name another run if this is to be one of its own",
                )
            await asyncio.sleep(TICK_S / 2)

    def _new(self, name: str, seats: Seats, terms: Mapping[str, Any], now: float) -> _Table:
        if sum(not table.run.over for table in self._tables.values()) >= MAX_RUNS:
            raise RateLimitedError(f"{MAX_RUNS} runs are coordinated here already", retry_after_s=30.0)
        turns = parse_config(TurnsConfig, _below("turns.", terms))
        # How long a sample may take each driver decides for itself, and says when it was too long: here the turn's limit holds.
        limits = _below("rollout.", terms) | {"generation_timeout_s": turns.turn_timeout_s}
        rollout = parse_config(RolloutConfig, limits)
        patience = Patience(self._lease_s, turns.join_timeout_s, turns.barrier_timeout_s, turns.on_lost)
        rules = Rules(seats, rollout, turns, self._sessions(terms.get("environment.args", {})))
        return _Table(CoordinatedRun(name, seats.agents, patience, now), rules)

    def _start(self) -> None:
        if self._ticking is None or self._ticking.done():
            self._looked_at = self._clock()
            self._ticking = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.look()

    def look(self) -> None:
        """Look at the time, as happens several times a second: end leases, find who is late, forget what is over."""
        seen = self._clock()
        if (gap := seen - self._looked_at) > STALL_S:  # nobody can be blamed for what this process did not hear meanwhile
            self._stood_still_s += gap - TICK_S
        self._looked_at = seen
        now = self._now()
        for name, table in list(self._tables.items()):
            table.run.tick(now)
            table.follow()
            if table.run.over and all(desk.left or now - desk.seen_at > KEPT_S for desk in table.desks.values()):
                del self._tables[name]
                self._close(table.close())
        for driver, desk in list(self._desks.items()):
            if (desk.table.run.over or driver not in desk.table.run.drivers) and now - desk.seen_at > KEPT_S:
                del self._desks[driver]

    def _now(self) -> float:
        """The time, without that for which this process stood still."""
        return self._clock() - self._stood_still_s

    def _close(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _check_environment(about: Mapping[str, Any], seats: Seats, agents: Mapping[str, Any], terms: Mapping[str, Any]) -> None:
    """Raises: NotFoundError for an agent without a seat, ConflictError when the driver knows another environment."""
    if unknown := [name for name in agents if name not in seats.agents]:
        raise NotFoundError(
            f"the environment {about['name']} has no agent '{unknown[0]}'", hint=f"its agents are {', '.join(seats.agents)}"
        )
    mine = " and ".join(f"'{name}'" for name in agents)
    for key in ("name", "version", "agents"):
        here, there = about[key], terms.get(f"environment.{key}")
        if there != here:
            raise disagreement(f"environment.{key}", f"for {mine}", there, "on the server that coordinates", here)


def _below(prefix: str, terms: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in terms.items() if key.startswith(prefix)}
