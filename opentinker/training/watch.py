"""Watches a run's rows for the end of learning and for its collapse. Pure: rows in, a verdict out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentinker.config.rl import StopConfig


@dataclass(frozen=True)
class Verdict:
    """What is wrong, in words; `final` when no lower learning rate can help."""

    reason: str
    final: bool


class Watch:
    """Feed it every row in order; after a resume, the rows that stand first."""

    def __init__(self, config: StopConfig, metric: str, whose: str = "") -> None:
        """`whose` is the score that it is told, in words, for its verdicts."""
        self._config = config
        self._metric = metric
        self._name = (metric or "the held-out score") + whose
        self.best: float | None = None
        """The best evaluation so far."""
        self._since_best = 0
        self._falls = 0
        self._last: float | None = None

    def row(self, row: Mapping[str, Any]) -> Verdict | None:
        """What the row shows, if it is something to act on."""
        match row["kind"]:
            case "evaluation":
                return self.scored(score(row, self._metric))
            case "step":
                return self._step(row)
        return None

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {"best": self.best, "since_best": self._since_best, "falls": self._falls, "last": self._last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self._last = state["best"], state["last"]
        self._since_best, self._falls = int(state["since_best"]), int(state["falls"])

    @property
    def needs_score(self) -> bool:
        """Whether it looks at evaluations at all."""
        return self._config.plateau is not None or self._config.falls is not None

    def improves(self, row: Mapping[str, Any]) -> bool:
        """Whether this evaluation is better than all before it. Ask before `row` sees it."""
        return self.better(score(row, self._metric))

    def better(self, value: float | None) -> bool:
        """As `improves`, of an evaluation's score."""
        return value is not None and (self.best is None or value > self.best)

    def scored(self, value: float | None) -> Verdict | None:
        """As `row`, of an evaluation's score."""
        if value is None:
            return None
        self._falls = self._falls + 1 if self._last is not None and value < self._last else 0
        self._since_best = 0 if self.better(value) else self._since_best + 1
        self.best = value if self.best is None else max(self.best, value)
        self._last = value
        config = self._config
        if config.plateau is not None and self._since_best >= config.plateau:
            return Verdict(f"{self._name} has not risen above {self.best:.3f} in {self._since_best} evaluations", final=True)
        if config.falls is not None and self._falls >= config.falls:
            self._falls, fallen = 0, self._falls
            return Verdict(f"{self._name} has fallen {fallen} evaluations in a row, to {value:.3f}", final=False)
        return None

    def _step(self, row: Mapping[str, Any]) -> Verdict | None:
        limits = {
            "grad_norm": self._config.max_grad_norm,
            "mismatch_kl_mean": self._config.max_mismatch_kl,
            "reference_kl_mean": self._config.max_reference_kl,
        }
        for name, limit in limits.items():
            value = row.get(name)
            if limit is not None and value is not None and value > limit:
                return Verdict(f"{name} is {value:.4g} at step {row['step']}, above its limit {limit:g}", final=False)
        return None


def score(row: Mapping[str, Any], metric: str) -> float | None:
    """An evaluation's value of a metric: `reward`, `exact`, `pass@4`, or one that the environment reports; see the config for
    an empty one."""
    if metric == "reward" or (not metric and "exact" not in row["env"]):
        value = row["reward_mean"]
    else:
        value = (
            row.get("pass_at", {}).get(metric.removeprefix("pass@"))
            if metric.startswith("pass@")
            else row["env"].get(metric or "exact")
        )
    return None if value is None else float(value)
