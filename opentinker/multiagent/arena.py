"""Who beats whom: players meet in all seats, results become a matrix of scores and ratings."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from opentinker.errors import ConfigError
from opentinker.multiagent.players import Player
from opentinker.multiagent.runner import GameRunner
from opentinker.rollout.types import Episode

ELO_PER_NAT = 400.0 / math.log(10.0)
"""A rating of 400 points more wins ten times as often (Elo, 1978)."""

Floats = npt.NDArray[np.float64]
Score = Callable[[Episode], float]
"""What an episode is worth to its agent: 1 won, 0 lost, 0.5 drawn."""


@dataclass(frozen=True)
class Score95:
    """A mean over games, and half the width of its 95% interval."""

    mean: float
    half_width: float
    games: int


@dataclass(frozen=True)
class CrossPlay:
    """`scores[i, j]` is what player i scored against player j over both seats, of `games[i, j]`; NaN on the diagonal."""

    names: tuple[str, ...]
    scores: Floats
    games: npt.NDArray[np.int64]

    def against(self, name: str, other: str) -> Score95:
        """What a player scored against another."""
        i, j = self.names.index(name), self.names.index(other)
        mean, games = float(self.scores[i, j]), int(self.games[i, j])
        # The widest that results between 0 and 1 of this mean can spread.
        return Score95(mean, 1.96 * math.sqrt(max(mean * (1 - mean), 1e-9) / max(games, 1)), games)

    def ratings(self) -> dict[str, float]:
        """Elo ratings, whose mean is 0; see `elo`."""
        return dict(zip(self.names, elo(self.scores, self.games), strict=True))

    def table(self) -> str:
        """Rows score against columns; the last column is the rating."""
        width = max(len(name) for name in (*self.names, "rating"))
        ratings = self.ratings()
        head = " ".join([" " * width, *(f"{name:>{max(len(name), 5)}}" for name in self.names), "rating"])
        rows = [
            " ".join(
                [
                    f"{name:<{width}}",
                    *(
                        f"{'-' if i == j else f'{self.scores[i, j]:.3f}':>{max(len(other), 5)}}"
                        for j, other in enumerate(self.names)
                    ),
                    f"{ratings[name]:+6.0f}",
                ]
            )
            for i, name in enumerate(self.names)
        ]
        return "\n".join([head, *rows])


def won(episode: Episode) -> float:
    """Of games that report `won` and `lost`."""
    return (1.0 + episode.metrics.get("won", 0.0) - episode.metrics.get("lost", 0.0)) / 2


async def cross_play(
    runner: GameRunner,
    seats: tuple[str, str],
    players: Mapping[str, Player],
    tasks: Sequence[Any],
    samples: int,
    score: Score = won,
    *,
    step: int = 0,
) -> CrossPlay:
    """Every pair of players plays the tasks `samples` times in each arrangement of the two seats. At least one player of a pair
    is a policy, whose episodes are scored; the other's score is 1 minus that.

    Raises:
        ConfigError: there are fewer than two players, or two that are no policies.
    """
    names = tuple(players)
    if len(names) < 2:
        raise ConfigError("a cross-play needs two players at least")
    total = np.zeros((len(names), len(names)))
    games = np.zeros((len(names), len(names)), np.int64)
    for i, j in combinations(range(len(names)), 2):
        for first, second in ((i, j), (j, i)):
            seated = dict(zip(seats, (players[names[first]], players[names[second]]), strict=True))
            groups = await runner.run(seated, tasks, samples, step)
            if not groups:
                raise ConfigError(f"neither '{names[i]}' nor '{names[j]}' is a policy", hint="one of them leaves the episodes")
            seat = seats[0] if seats[0] in groups else seats[1]
            row, column = (first, second) if seat == seats[0] else (second, first)
            for episode in (episode for group in groups[seat] for episode in group.episodes):
                value = score(episode)
                total[row, column] += value
                total[column, row] += 1.0 - value
                games[row, column] += 1
                games[column, row] += 1
    with np.errstate(invalid="ignore"):
        return CrossPlay(names, np.where(games > 0, total / np.maximum(games, 1), np.nan), games)


def elo(scores: Floats, games: npt.NDArray[np.int64], prior_games: float = 1.0) -> Floats:
    """Ratings, float64[P], of mean 0, under which the scores are most likely (Bradley and Terry, 1952; by the iteration of
    Hunter, 2004, eq. 3). Each pair that met is given `prior_games` more games that were drawn, so that who never lost has a
    finite rating. Players who never met, directly or by others, are not comparable: their ratings only say how they did among
    those whom they met."""
    count = len(scores)
    met = games > 0
    played = games + prior_games * met
    wins = np.where(met, np.nan_to_num(scores) * games + prior_games / 2 * met, 0.0).sum(axis=1)
    strength = np.ones(count)
    for _ in range(10_000):
        pairs = np.where(met, played / (strength[:, None] + strength[None, :]), 0.0).sum(axis=1)
        new = np.where(pairs > 0, wins / np.where(pairs > 0, pairs, 1.0), 1.0)
        new /= np.exp(np.log(np.maximum(new, 1e-300)).mean())
        moved = float(np.abs(np.log(new / strength)).max())
        strength = new
        if moved < 1e-10:
            break
    ratings: Floats = (np.log(strength) - np.log(strength).mean()) * ELO_PER_NAT
    return ratings
