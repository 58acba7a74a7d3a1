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
from opentinker.multiagent.players import DrawnPlayers, Player, PolicyPlayer, SeatPlayer, SeedOfTurn
from opentinker.multiagent.seats import Seats
from opentinker.multiagent.turns import TurnBarrier
from opentinker.rollout.seeds import derive_seed
from opentinker.rollout.types import Episode, Group, Termination

OnGame = Callable[[Mapping[str, Episode]], None]
Groups = dict[str, list[Group]]
"""By agent: one group per task, in the order of the tasks."""


@dataclass(frozen=True)
class _Batch:
    """What the episodes of one call to `run` share."""

    players: Mapping[str, SeatPlayer]
    first_index: int
    step: int
    nonce: str
    threads: UserThreads
    slots: asyncio.Semaphore
    on_game: OnGame | None


class GameRunner:
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

    async def run(
        self,
        players: Mapping[str, SeatPlayer],
        tasks: Sequence[Any],
        group_size: int,
        step: int,
        on_game: OnGame | None = None,
        *,
        first_index: int = 0,
    ) -> Groups:
        """`group_size` episodes per task. The groups of an agent compare episodes of the same task in the same seat.

        An episode in which an agent's ends in an error is run anew, up to `member_retries` times, and then missing from the
        group of every agent that failed; with `turns.on_late: forfeit` the others' episodes of the last attempt count.

        Raises:
            ConfigError: a seat has no player, or there is a player without a seat; a model elsewhere refuses to be asked.
            DeadlineError: an agent was too late, and `turns.on_late` is 'fail'.
            OpenTinkerError: a policy's server refuses or is lost.
        """
        check_players(players, self._seats.agents)
        played = [name for name in self._seats.agents if isinstance(players[name], PolicyPlayer | DrawnPlayers)]
        groups: Groups = {name: [Group(task, index) for index, task in enumerate(tasks, first_index)] for name in played}
        with UserThreads() as threads:
            slots = asyncio.Semaphore(self._config.max_concurrent_episodes)
            batch = _Batch(players, first_index, step, uuid.uuid4().hex[:16], threads, slots, on_game)
            members = [
                asyncio.ensure_future(self._run_member(task, index, {n: groups[n][place] for n in played}, member, batch))
                for place, (index, task) in enumerate(enumerate(tasks, first_index))
                for member in range(group_size)
            ]
            try:
                await asyncio.gather(*members)
            finally:
                for running in members:
                    if not running.cancelling():  # a second cancellation would interrupt the closing of environments
                        running.cancel()
                await asyncio.gather(*members, return_exceptions=True)
        for group in (group for of_agent in groups.values() for group in of_agent):
            group.episodes.sort(key=lambda episode: episode.member)
        return groups

    async def close(self) -> None:
        """End the processes of the environments, if they have any."""
        await self._sessions.close()

    async def _run_member(self, task: Any, index: int, groups: Mapping[str, Group], member: int, batch: _Batch) -> None:
        for attempt in range(self._config.member_retries + 1):
            async with batch.slots:
                episodes = await self._run_game(task, index, member, attempt, batch)
            if batch.on_game is not None:
                batch.on_game(episodes)
            last = attempt == self._config.member_retries
            if file_game(groups, episodes, again=not last and bool(failed_in(episodes))):
                return

    async def _run_game(self, task: Any, index: int, member: int, attempt: int, batch: _Batch) -> dict[str, Episode]:
        driver = GameDriver(
            task,
            {name: player_at(batch.players[name], index - batch.first_index) for name in self._seats.agents},
            TurnBarrier(self._seats.protocol, self._seats.agents),
            self._sessions.session(batch.threads),
            batch.threads,
            self._config,
            self._turns,
            request_id=f"{batch.nonce}-{index}-{member}-{attempt}",
            seed_of_turn=seeds_of_game(self._run_seed, batch.step, index, member, attempt),
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
