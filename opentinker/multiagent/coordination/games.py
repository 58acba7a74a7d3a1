"""The games of a round, played by the coordinator: one `GameDriver` each, whose seats are played by drivers elsewhere."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Message
from opentinker.env.processes import SessionFactory
from opentinker.env.threads import UserThreads
from opentinker.multiagent.coordination.run import Round, SeatKind
from opentinker.multiagent.coordination.seat import RemotePlayer, RemoteSeat
from opentinker.multiagent.coordination.words import Answer, Taken, event_to_wire
from opentinker.multiagent.episode import GameDriver
from opentinker.multiagent.runner import failed_in
from opentinker.multiagent.seats import Seats
from opentinker.multiagent.turns import TurnBarrier
from opentinker.rollout.machine import DeadlinePassed, Event
from opentinker.rollout.types import Episode

log = logging.getLogger(__name__)


class Voice(Protocol):
    """How games speak to the drivers."""

    def to(self, agent: str, word: Sequence[Any]) -> None: ...

    def to_all(self, word: Sequence[Any]) -> None: ...


@dataclass(frozen=True)
class Rules:
    """What the games of a run have in common."""

    seats: Seats
    rollout: RolloutConfig
    turns: TurnsConfig
    sessions: SessionFactory


class RoundOfGames:
    """`number` distinguishes the rounds of a run. What is said to the drivers:

    | word                                                        | to       |                                               |
    |-------------------------------------------------------------|----------|-----------------------------------------------|
    | `game`, id, index, member, attempt                          | all      | it begins                                     |
    | `event`, id, agent, event                                   | a policy | for the machine of its seat                   |
    | `ask`, id, agent, turn, messages                            | a script |                                               |
    | `over`, id, [late, error] or nil, again, environment_s      | all      | `again`: the member is run anew                |
    | `round_over`, number                                        | all      |                                               |
    """

    def __init__(
        self, number: int, round_: Round, tasks: Sequence[Any], kinds: Mapping[str, SeatKind], rules: Rules, voice: Voice
    ):
        self.number = number
        self._round = round_
        self._tasks = tasks
        self._kinds = kinds
        self._rules = rules
        self._voice = voice
        self._gone: dict[str, str] = {}
        self._games: dict[str, dict[str, RemoteSeat]] = {}

    async def play(self) -> None:
        """All games, to their ends.

        Raises:
            DeadlineError: an agent was too late, and `turns.on_late` is 'fail'.
            ProtocolError: the order of play cannot go on.
        """
        slots = asyncio.Semaphore(self._rules.rollout.max_concurrent_episodes)
        with UserThreads() as threads:
            members = [
                asyncio.ensure_future(self._member(task, index, member, slots, threads))
                for index, task in enumerate(self._tasks, self._round.first_index)
                for member in range(self._round.group_size)
            ]
            try:
                await asyncio.gather(*members)
            finally:
                for running in members:
                    if not running.cancelling():  # a second cancellation would interrupt the closing of environments
                        running.cancel()
                await asyncio.gather(*members, return_exceptions=True)

    def answered(self, game: str, agent: str, turn: int, answer: Answer) -> None:
        """A driver has answered. An answer to a game that is over is too late for anything."""
        if (seats := self._games.get(game)) is not None and agent in seats:
            seats[agent].answered(turn, answer)

    def gone(self, agents: Sequence[str], cause: str) -> None:
        """These agents answer no more."""
        for agent in agents:
            self._gone[agent] = cause
            for seats in self._games.values():
                seats[agent].gone(cause)

    async def _member(self, task: Any, index: int, member: int, slots: asyncio.Semaphore, threads: UserThreads) -> None:
        for attempt in range(self._rules.rollout.member_retries + 1):
            async with slots:
                if not await self._game(task, index, member, attempt, threads):
                    return

    async def _game(self, task: Any, index: int, member: int, attempt: int, threads: UserThreads) -> bool:
        """Play a member; whether it is to be run anew."""
        game = f"{self.number}-{index}-{member}-{attempt}"
        rules, voice = self._rules, self._voice
        seats = self._games[game] = {name: RemoteSeat() for name in rules.seats.agents}
        for name, cause in self._gone.items():
            seats[name].gone(cause)
        voice.to_all(["game", game, index, member, attempt])
        session = rules.sessions.session(threads)
        driver = GameDriver(
            task,
            {name: self._player(game, name, seat) for name, seat in seats.items()},
            TurnBarrier(rules.seats.protocol, rules.seats.agents),
            session,
            threads,
            rules.rollout,
            rules.turns,
            request_id=game,
            seed_of_turn=_not_here,
        )
        try:
            episodes: dict[str, Episode] = await driver.run(member)
        finally:
            del self._games[game]
        again = bool(failed_in(episodes) - set(self._gone)) and attempt < rules.rollout.member_retries
        why = driver.aborted
        aborted = None if why is None else [isinstance(why, DeadlinePassed), why.error]
        voice.to_all(["over", game, aborted, again, session.seconds])
        return again

    def _player(self, game: str, name: str, seat: RemoteSeat) -> RemotePlayer:
        def tell(event: Event | Taken) -> None:
            self._voice.to(name, ["event", game, name, event_to_wire(event)])

        def ask(turn: int, seen: Sequence[Message]) -> None:
            self._voice.to(name, ["ask", game, name, turn, list(seen)])

        seat.ask = ask
        return RemotePlayer(self._kinds[name], seat, tell)


def _not_here(agent: str, turn: int) -> int:
    raise AssertionError("whoever samples knows the seeds")
