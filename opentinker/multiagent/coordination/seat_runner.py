"""Runs a driver's seats in the rounds of games that the coordinator plays."""

import asyncio
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal

from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Action, Message
from opentinker.env.threads import UserThreads
from opentinker.errors import OpenTinkerError
from opentinker.multiagent.coordination.member import Member
from opentinker.multiagent.coordination.run import Round
from opentinker.multiagent.coordination.seat_play import AnswerTurn, Over, SeatPlay
from opentinker.multiagent.coordination.words import Answer, event_from_wire
from opentinker.multiagent.games import Games, GamesAsked, Groups
from opentinker.multiagent.players import ModelPlayer, PolicyPlayer, ScriptedPlayer, SeedOfTurn
from opentinker.multiagent.runner import file_game, player_at, seeds_of_game
from opentinker.multiagent.spoken import spoken
from opentinker.rollout.machine import DeadlinePassed, Failed
from opentinker.rollout.types import Group


class SeatRunner(Games):
    """Plays the seats of one driver: the games are the coordinator's. `kind` says what they are for."""

    def __init__(
        self, member: Member, kind: Literal["train", "evaluation"], config: RolloutConfig, turns: TurnsConfig, run_seed: int
    ) -> None:
        self._member = member
        self._kind: Literal["train", "evaluation"] = kind
        self._config = config
        self._turns = turns
        self._run_seed = run_seed

    async def _play(self, asked: GamesAsked) -> Groups:
        """The groups of this driver's own agents; the others ask for the same games.

        Raises:
            AgentLostError: another driver is lost.
            DeadlineError: an agent was too late, and `turns.on_late` is 'fail'.
            OpenTinkerError: why the run has ended; or a policy's server refuses or is lost.
        """
        wanted = Round(self._kind, asked.step, asked.first_index, asked.group_size, len(asked.tasks), "")
        with UserThreads() as threads:
            played = _Played(self, asked, threads)
            try:
                async with self._member.games(wanted, asked.tasks) as words:
                    return await played.follow(words)
            finally:
                await played.stop()

    async def close(self) -> None:
        """Nothing runs here that would have to be ended."""


class _Played:
    """One round of games, as one driver sees it."""

    def __init__(self, runner: SeatRunner, asked: GamesAsked, threads: UserThreads) -> None:
        self._runner = runner
        self._asked = asked
        self._threads = threads
        self._nonce = uuid.uuid4().hex[:16]
        self.groups = asked.groups(asked.players)
        self._games: dict[str, tuple[dict[str, SeatPlay], SeedOfTurn, asyncio.Future[bool]]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._acting: dict[str, set[asyncio.Task[None]]] = {}
        """By game: what is asked of those that are no policies."""
        self._words: asyncio.Queue[Any] = asyncio.Queue()

    async def follow(self, words: "asyncio.Queue[Any]") -> Groups:
        """Do what the coordinator says until all games are over."""
        self._words = words
        while True:
            match await words.get():
                case OpenTinkerError() as error:
                    raise type(error)(error.detail, hint=error.hint) from error
                case BaseException() as error:
                    raise error
                case ["game", game, index, member, attempt]:
                    self._begin(game, index, member, attempt)
                case ["event", game, agent, event]:
                    self._games[game][0][agent].events.put_nowait(event_from_wire(event))
                case ["ask", game, agent, turn, messages]:
                    self._acting[game].add(self._task(self._act(game, agent, turn, messages, self._games[game][1])))
                case ["over", game, aborted, again, environment_s]:
                    plays, _, ended = self._games.pop(game)
                    ended.set_result(again)
                    for acting in self._acting.pop(game):
                        acting.cancel()
                    for play in plays.values():
                        play.events.put_nowait(Over(_why(aborted), environment_s))
                case ["round_over", _]:
                    break
        await self._all_done()
        return self.groups

    async def stop(self) -> None:
        """End what still runs."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _begin(self, game: str, index: int, member: int, attempt: int) -> None:
        runner, asked, place = self._runner, self._asked, index - self._asked.first_index
        seeds = seeds_of_game(runner._run_seed, asked.step, index, member, attempt)
        request_id = f"{self._nonce}-{index}-{member}-{attempt}"

        def answers(name: str) -> AnswerTurn:
            return lambda turn, answer: runner._member.answer(game, name, turn, answer)

        plays = {
            name: SeatPlay(
                name, player, asked.tasks[place], runner._config, runner._turns, f"{request_id}-{name}", seeds, answers(name)
            )
            for name in asked.players
            if isinstance(player := player_at(asked.players[name], place), PolicyPlayer)
        }
        again: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._games[game] = (plays, seeds, again)
        self._acting[game] = set()
        self._task(self._game(plays, {name: self.groups[name][place] for name in plays}, member, again))

    async def _game(
        self, plays: Mapping[str, SeatPlay], groups: Mapping[str, Group], member: int, again: "asyncio.Future[bool]"
    ) -> None:
        ended = await asyncio.gather(*(play.run(member) for play in plays.values()))
        episodes = dict(zip(plays, ended, strict=True))
        if self._asked.on_game is not None:
            self._asked.on_game(episodes)
        file_game(groups, episodes, again=await again)

    async def _act(self, game: str, agent: str, turn: int, messages: Sequence[Message], seeds: SeedOfTurn) -> None:
        player = self._asked.players[agent]
        assert isinstance(player, ScriptedPlayer | ModelPlayer)
        said = await spoken(player, messages, seeds(agent, turn), self._threads, self._runner._turns.turn_timeout_s)
        if isinstance(said, Action):
            answer = Answer("act", said)
        else:
            answer = Answer("late" if isinstance(said, DeadlinePassed) else "failed", error=said.error)
        self._runner._member.answer(game, agent, turn, answer)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._words.put_nowait(error)

    async def _all_done(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
        if not self._words.empty() and isinstance(error := self._words.get_nowait(), BaseException):
            raise error


def _why(aborted: Any) -> DeadlinePassed | Failed | None:
    if aborted is None:
        return None
    late, error = aborted
    return DeadlinePassed(error) if late else Failed(error)
