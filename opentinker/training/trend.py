"""Scores in their order: for how long none was the best, and how often in a row they fell. Pure."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """What is wrong, in words; `final` when no lower learning rate can help."""

    reason: str
    final: bool


class Trend:
    """Counts the scores since the best one, and the falls in a row."""

    def __init__(self, plateau: int | None, falls: int | None, name: str, unit: str) -> None:
        """After how many of each there is a verdict, None = never; what the scores are, and what one is made from, in its
        words."""
        self._plateau, self._limit = plateau, falls
        self._name, self._unit = name, unit
        self.best: float | None = None
        """The best score so far."""
        self._since_best = 0
        self._falls = 0
        self._last: float | None = None
        self._variance = 0.0

    def better(self, value: float | None) -> bool:
        """Whether a score would be better than all so far."""
        return value is not None and (self.best is None or value > self.best)

    def scored(self, value: float, variance: float = 0.0) -> Verdict | None:
        """What the next score shows, if it is something to act on. A score has fallen if it is below the last one by more than
        the standard error of their difference; `variance` is an estimate of the score's own, 0 to take it as it is."""
        error = (self._variance + variance) ** 0.5
        self._falls = self._falls + 1 if self._last is not None and self._last - value > error else 0
        self._since_best = 0 if self.better(value) else self._since_best + 1
        self.best = value if self.best is None else max(self.best, value)
        self._last, self._variance = value, variance
        if self._plateau is not None and self._since_best >= self._plateau:
            return Verdict(f"{self._name} has not risen above {self.best:.3f} in {self._many(self._since_best)}", final=True)
        if self._limit is not None and self._falls >= self._limit:
            self._falls, fallen = 0, self._falls
            return Verdict(f"{self._name} has fallen {self._many(fallen)} in a row, to {value:.3f}", final=False)
        return None

    def _many(self, count: int) -> str:
        noun, _, rest = self._unit.partition(" ")
        return f"{count} {noun}{'' if count == 1 else 's'} {rest}".rstrip()

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {
            "best": self.best,
            "since_best": self._since_best,
            "falls": self._falls,
            "last": self._last,
            "variance": self._variance,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self._last = state["best"], state["last"]
        self._since_best, self._falls = int(state["since_best"]), int(state["falls"])
        self._variance = float(state.get("variance", 0.0))  # older releases had none


class Windows:
    """Makes one score of each `size` values, which are 2 or more: their mean."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.open: list[float] = []
        """Values of the window that is not full."""

    def add(self, value: float) -> tuple[float, float] | None:
        """The mean of the window that this value fills, and the variance of that mean as the values of the window tell it."""
        self.open.append(value)
        if len(self.open) < self._size:
            return None
        full, self.open = self.open, []
        return statistics.fmean(full), statistics.variance(full) / len(full)
