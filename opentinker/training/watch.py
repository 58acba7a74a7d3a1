"""Watches a run's rows for the end of learning and for its collapse. Pure: rows in, a verdict out."""

from collections.abc import Mapping
from typing import Any

from opentinker.config.rl import StopConfig
from opentinker.training.trend import Trend, Verdict, Windows


class Watch:
    """Feed it every row in order; after a resume, the rows that stand first."""

    def __init__(self, config: StopConfig, metric: str, whose: str = "") -> None:
        """`whose` are the scores that it is told, in words, for its verdicts."""
        self._config = config
        self._metric = metric
        trains = config.score == "training"
        limits = (None, None) if trains else (config.plateau, config.falls)
        self._evaluations = Trend(*limits, (metric or "the held-out score") + whose, "evaluation")
        self._windows = Windows(config.window)
        self._training = (
            Trend(config.plateau, config.falls, f"the training reward{whose}", f"window of {config.window} steps")
            if trains
            else None
        )

    @property
    def best(self) -> float | None:
        """The best evaluation so far."""
        return self._evaluations.best

    @property
    def needs_score(self) -> bool:
        """Whether it acts on evaluations at all."""
        return bool(self._config.counted) and self._training is None

    def row(self, row: Mapping[str, Any]) -> Verdict | None:
        """What the row shows, if it is something to act on; of several things that which ends the run, if there is one."""
        match row["kind"]:
            case "evaluation":
                return self.scored(score(row, self._metric))
            case "step":
                found = [self.earned(row["reward_mean"]), self.beyond(row)]
                return max(filter(None, found), key=lambda verdict: verdict.final, default=None)
        return None

    def improves(self, row: Mapping[str, Any]) -> bool:
        """Whether this evaluation is better than all before it. Ask before `row` sees it."""
        return self.better(score(row, self._metric))

    def better(self, value: float | None) -> bool:
        """As `improves`, of an evaluation's score."""
        return self._evaluations.better(value)

    def scored(self, value: float | None) -> Verdict | None:
        """What an evaluation's score shows."""
        return None if value is None else self._evaluations.scored(value)

    def earned(self, reward: float | None) -> Verdict | None:
        """What the mean reward of a training step shows; None where no episode was usable."""
        if self._training is None or reward is None or (window := self._windows.add(reward)) is None:
            return None
        return self._training.scored(*window)

    def beyond(self, row: Mapping[str, Any]) -> Verdict | None:
        """Whether a step's row is beyond a limit."""
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

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        training = (
            {} if self._training is None else {"training": {**self._training.state(), "window": list(self._windows.open)}}
        )
        return {**self._evaluations.state(), **training}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._evaluations.restore(state)
        if self._training is not None and (training := state.get("training")):
            self._training.restore(training)
            self._windows.open = [float(value) for value in training["window"]]


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
