"""What players scored against each other, and what that says: means, intervals, ratings. Pure."""

import base64
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from opentinker.multiagent.arena import ELO_PER_NAT, elo

Floats = npt.NDArray[np.float64]
Z95 = 1.959964
"""Half the width of a 95% interval in standard deviations of a normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A mean, and its 95% interval."""

    mean: float
    low: float
    high: float
    games: int

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "low": self.low, "high": self.high, "games": self.games}


@dataclass(frozen=True)
class Met:
    """All results of one player against another."""

    total: float = 0.0
    squares: float = 0.0
    games: int = 0

    def and_(self, other: "Met") -> "Met":
        return Met(self.total + other.total, self.squares + other.squares, self.games + other.games)

    @property
    def mean(self) -> float:
        return self.total / self.games if self.games else math.nan


def met(results: Iterable[float]) -> Met:
    """Of single results."""
    found = list(results)
    return Met(math.fsum(found), math.fsum(value * value for value in found), len(found))


class Tally:
    """Results by (player, opponent); `won`: they are scores between 0 and 1, and an opponent's is 1 minus the player's."""

    def __init__(self, results: Mapping[tuple[str, str], Met] | None = None, *, won: bool) -> None:
        self.won = won
        self.results: dict[tuple[str, str], Met] = dict(results or {})

    def add(self, results: Mapping[tuple[str, str], Met]) -> None:
        """Count more games."""
        for pair, more in results.items():
            self.results[pair] = self.results.get(pair, Met()).and_(more)

    @property
    def names(self) -> list[str]:
        """All who played, in the order in which they came."""
        return list(dict.fromkeys(name for pair in self.results for name in pair))

    def estimate(self, name: str, other: str) -> Estimate | None:
        """None if they never met. The interval of scores is Wilson's (1927, "Probable inference", eq. of the score interval),
        which also holds for draws: no results between 0 and 1 spread more than won and lost ones. That of rewards is normal,
        with the deviation of the sample."""
        found = self.results.get((name, other), Met())
        if not found.games:
            return None
        mean, games = found.mean, found.games
        if self.won:
            weight = Z95**2 / games
            middle = (mean + weight / 2) / (1 + weight)
            half = Z95 * math.sqrt(max(mean * (1 - mean), 0.0) / games + weight / (4 * games)) / (1 + weight)
            return Estimate(mean, min(mean, max(0.0, middle - half)), max(mean, min(1.0, middle + half)), games)
        spread = max(found.squares - games * mean * mean, 0.0) / max(games - 1, 1)
        half = Z95 * math.sqrt(spread / games)
        return Estimate(mean, mean - half, mean + half, games)

    def ratings(self, anchor: str) -> dict[str, Estimate]:
        """Elo ratings by player, on one scale on which `anchor` has 0: those under which all scores are most likely (see
        `elo`). Intervals are those of the distance to the anchor: normal, from the inverse of the Fisher information at the
        ratings. Whom no chain of games links to the anchor has no interval. Empty where results are not scores."""
        names = self.names
        if not self.won or anchor not in names:
            return {}
        games, scores = self._matrices(names)
        found = elo(scores, games)
        found = found - found[names.index(anchor)]
        widths = _half_widths(found, games, names.index(anchor))
        played = games.sum(axis=1)
        return {
            name: Estimate(float(rating), float(rating - half), float(rating + half), int(count))
            for name, rating, half, count in zip(names, found, widths, played, strict=True)
        }

    def worst(self, name: str, others: Sequence[str]) -> tuple[str, Estimate] | None:
        """Against whom of the others the player did worst; None if it met none."""
        found = [(other, estimate) for other in others if (estimate := self.estimate(name, other)) is not None]
        return min(found, key=lambda pair: pair[1].mean) if found else None

    def _matrices(self, names: Sequence[str]) -> tuple[npt.NDArray[np.int64], Floats]:
        games = np.zeros((len(names), len(names)), np.int64)
        scores = np.full((len(names), len(names)), np.nan)
        place = {name: i for i, name in enumerate(names)}
        for (name, other), found in self.results.items():
            games[place[name], place[other]] = found.games
            scores[place[name], place[other]] = found.mean
        return games, scores

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes. It goes with every checkpoint, so it is short: some 70 bytes for a meeting of two."""
        return {"won": self.won, "results": _packed(self.results)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Tally":
        """Also of what older releases wrote, which is as `results_to_json`."""
        results = state["results"]
        return cls(_unpacked(results) if isinstance(results, str) else results_from_json(results), won=bool(state["won"]))


def results_to_json(results: Mapping[tuple[str, str], Met]) -> list[list[Any]]:
    """[player, opponent, total, squares, games] each."""
    return [[*pair, found.total, found.squares, found.games] for pair, found in results.items()]


def results_from_json(rows: Iterable[Sequence[Any]]) -> dict[tuple[str, str], Met]:
    return {(name, other): Met(float(total), float(squares), int(games)) for name, other, total, squares, games in rows}


def _packed(results: Mapping[tuple[str, str], Met]) -> str:
    """Names once and results by columns, deflated. Of two whose results tell each other's there is one row."""
    names = list(dict.fromkeys(name for pair in results for name in pair))
    place = {name: i for i, name in enumerate(names)}
    rows, told = list[tuple[Any, ...]](), set[tuple[str, str]]()
    for (name, other), found in results.items():
        if (name, other) in told:
            continue
        tells = results.get((other, name)) == _seen_by_other(found)
        if tells:
            told.add((other, name))
        rows.append((place[name], place[other], found.total, found.squares, found.games, int(tells)))
    text = json.dumps([names, list(zip(*rows, strict=True))], separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _unpacked(text: str) -> dict[tuple[str, str], Met]:
    names, columns = json.loads(zlib.decompress(base64.b64decode(text)))
    results: dict[tuple[str, str], Met] = {}
    for name, other, total, squares, games, tells in zip(*columns, strict=True):
        found = results[names[name], names[other]] = Met(float(total), float(squares), int(games))
        if tells:
            results[names[other], names[name]] = _seen_by_other(found)
    return results


def _seen_by_other(found: Met) -> Met:
    """The opponent's results, where they are 1 minus the player's."""
    return Met(found.games - found.total, found.games - 2 * found.total + found.squares, found.games)


def _half_widths(ratings: Floats, games: npt.NDArray[np.int64], anchor: int) -> Floats:
    """95% half widths of the distances to the anchor, infinite where nothing links the two."""
    count = len(ratings)
    nats = ratings / ELO_PER_NAT
    win = 1 / (1 + np.exp(nats[None, :] - nats[:, None]))
    information = -games * win * (1 - win)
    np.fill_diagonal(information, 0.0)
    np.fill_diagonal(information, -information.sum(axis=1))
    linked = _linked(games, anchor)
    free = [i for i in range(count) if i != anchor and linked[i]]
    widths: Floats = np.where(linked, 0.0, np.inf)
    if free:
        covariance = np.linalg.inv(information[np.ix_(free, free)])
        widths[free] = Z95 * np.sqrt(np.maximum(np.diag(covariance), 0.0)) * ELO_PER_NAT
    return widths


def _linked(games: npt.NDArray[np.int64], start: int) -> npt.NDArray[np.bool_]:
    reached = np.zeros(len(games), np.bool_)
    reached[start] = True
    while True:
        more = reached | (games[reached] > 0).any(axis=0)
        if (more == reached).all():
            return reached
        reached = more
