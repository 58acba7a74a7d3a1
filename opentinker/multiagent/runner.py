"""Runs the episodes of several agents: all members of all groups at once, and groups them by task and seat."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Environment
from opentinker.env.processes import SessionFactory
from opentinker.env.threads import UserThreads
from opentinker.errors import ConfigError
from opentinker.multiagent.episode import GameDriver
from opentinker.multiagent.games import Games, GamesAsked, Groups
from opentinker.multiagent.players import DrawnPlayers, Player, SeatPlayer, SeedOfTurn
from opentinker.multiagent.seats import Seats
from opentinker.multiagent.turns import TurnBarrier
from opentinker.rollout.seeds import derive_seed
from opentinker.rollout.types import Episode, Group, Termination


@dataclass(frozen=True)
class _Batch:
    """What the episodes of one call to `run` share."""

    asked: GamesAsked
    nonce: str
    threads: UserThreads
    slots: asyncio.Semaphore


class GameRunner(Games):
    """Plays episodes of several agents. Seeds derive from (run seed, step, task, member, agent, turn), so that their order is
    free; who plays which seat is said at each call.

    `make_environment` is a class that `load_environment` gave for a `MultiAgentEnvironment`, or a `functools.partial` of it.
    """

    def __init__(
        self,
        make_environment: Callable[[], Environment],
        seats: Seats,
        config: RolloutConfig,
        turns: TurnsConfig,
        run_seed: int,
    ) -> None:
        self._sessions = SessionFactory(make_environment)
        self._seats = seats
        self._config = config
        self._turns = turns
        self._run_seed = run_seed

    async def _play(self, asked: GamesAsked) -> Groups:
        """The groups of all agents that policies play.

        Raises:
            ConfigError: a seat has no player, or there is a player without a seat; a model elsewhere refuses to be asked.
            DeadlineError: an agent was too late, and `turns.on_late` is 'fail'.
            OpenTinkerError: a policy's server refuses or is lost.
        """
        check_players(asked.players, self._seats.agents)
        groups = asked.groups(self._seats.agents)
        with UserThreads() as threads:
            slots = asyncio.Semaphore(self._config.max_concurrent_episodes)
            batch = _Batch(asked, uuid.uuid4().hex[:16], threads, slots)
            members = [
                asyncio.ensure_future(self._run_member(task, index, {n: groups[n][place] for n in groups}, member, batch))
                for place, (index, task) in enumerate(enumerate(asked.tasks, asked.first_index))
                for member in range(asked.group_size)
            ]
            try:
                await asyncio.gather(*members)
            finally:
                for running in members:
                    if not running.cancelling():  # a second cancellation would interrupt the closing of environments
                        running.cancel()
                await asyncio.gather(*members, return_exceptions=True)
        return groups

    async def close(self) -> None:
        """End the processes of the environments, if they have any."""
        await self._sessions.close()

    async def _run_member(self, task: Any, index: int, groups: Mapping[str, Group], member: int, batch: _Batch) -> None:
        for attempt in range(self._config.member_retries + 1):
            async with batch.slots:
                episodes = await self._run_game(task, index, member, attempt, batch)
            if batch.asked.on_game is not None:
                batch.asked.on_game(episodes)
            last = attempt == self._config.member_retries
            if file_game(groups, episodes, again=not last and bool(failed_in(episodes))):
                return

    async def _run_game(self, task: Any, index: int, member: int, attempt: int, batch: _Batch) -> dict[str, Episode]:
        asked = batch.asked
        driver = GameDriver(
            task,
            {name: player_at(asked.players[name], index - asked.first_index) for name in self._seats.agents},
            TurnBarrier(self._seats.protocol, self._seats.agents),
            self._sessions.session(batch.threads),
            batch.threads,
            self._config,
            self._turns,
            request_id=f"{batch.nonce}-{index}-{member}-{attempt}",
            seed_of_turn=seeds_of_game(self._run_seed, asked.step, index, member, attempt),
        )
        return await driver.run(member)


def seeds_of_game(run_seed: int, step: int, index: int, member: int, attempt: int) -> SeedOfTurn:
    """The seeds of a game's turns. A replaced member draws other actions: with the same ones a deterministic environment would
    fail again."""
    identity: list[int | str] = [step, index, member, *([f"attempt {attempt}"] if attempt else [])]
    return lambda agent, turn: derive_seed(run_seed, *identity, agent, turn)


def failed_in(episodes: Mapping[str, Episode]) -> set[str]:
    """Whose episode of a game ended in an error."""
    return {name for name, episode in episodes.items() if episode.termination.is_error}


def file_game(groups: Mapping[str, Group], episodes: Mapping[str, Episode], *, again: bool) -> bool:
    """Put the episodes of a game into the groups of their agents; whether the member is done with. `again`: it is run anew,
    because somebody's episode failed."""
    failed = failed_in(episodes)
    for name, episode in episodes.items():
        if again:
            groups[name].failures.append(episode)
            groups[name].replaced += 1
        elif name in failed:
            groups[name].failures.append(episode)
            groups[name].dropped += 1
        elif episode.termination is not Termination.CANCELLED:  # that one never took part
            groups[name].episodes.append(episode)
    return not again


def player_at(player: SeatPlayer, place: int) -> Player:
    """Who plays the games of the task at this place."""
    return player.players[place] if isinstance(player, DrawnPlayers) else player


def check_players(players: Mapping[str, Any], agents: Sequence[str]) -> None:
    """Raises: ConfigError when a seat has no player, or a player no seat."""
    if missing := [name for name in agents if name not in players]:
        raise ConfigError(f"nobody plays '{missing[0]}'", hint=f"the environment's agents are {', '.join(agents)}")
    if unknown := [name for name in players if name not in agents]:
        raise ConfigError(
            f"the environment has no agent '{unknown[0]}'", hint=f"the environment's agents are {', '.join(agents)}"
        )
