"""What is asked of whoever plays games of several agents, in this process or elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentinker.multiagent.players import DrawnPlayers, PolicyPlayer, SeatPlayer
from opentinker.rollout.types import Episode, Group

OnGame = Callable[[Mapping[str, Episode]], None]
Groups = dict[str, list[Group]]
"""By agent: one group per task, in the order of the tasks."""


@dataclass(frozen=True)
class GamesAsked:
    """One call to `Games.run`."""

    players: Mapping[str, SeatPlayer]
    tasks: Sequence[Any]
    group_size: int
    step: int
    on_game: OnGame | None
    first_index: int

    def groups(self, agents: Iterable[str]) -> Groups:
        """Empty ones, for those of the agents that are played by policies."""
        played = [name for name in agents if isinstance(self.players[name], PolicyPlayer | DrawnPlayers)]
        return {name: [Group(task, index) for index, task in enumerate(self.tasks, self.first_index)] for name in played}


class Games(ABC):
    """Plays games of several agents."""

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
        """`group_size` episodes per task. The groups of an agent compare episodes of the same task in the same seat. `on_game`
        is told the episodes of each game, of those that are run anew, too.

        An episode in which an agent's ends in an error is run anew, up to `member_retries` times, and then missing from the
        group of every agent that failed; with `turns.on_late: forfeit` the others' episodes of the last attempt count.

        Raises:
            OpenTinkerError: why they could not be played; see the class.
        """
        groups = await self._play(GamesAsked(players, tasks, group_size, step, on_game, first_index))
        for group in (group for of_agent in groups.values() for group in of_agent):
            group.episodes.sort(key=lambda episode: episode.member)
        return groups

    @abstractmethod
    async def _play(self, asked: GamesAsked) -> Groups:
        """The groups, with their episodes in any order."""

    @abstractmethod
    async def close(self) -> None:
        """End what the games have left running."""
