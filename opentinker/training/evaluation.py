"""Evaluation: episodes of held-out tasks through the training's own runner, without a loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb

import numpy as np
import numpy.typing as npt

from opentinker.rollout.types import Episode, Group

RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks, and half the width of its 95% interval."""

    mean: float
    half_width: float


def bootstrap(per_task: Sequence[float] | npt.NDArray[np.float64], *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Mean over tasks with the percentile bootstrap's 95% interval (Efron & Tibshirani, 1993, section 13.3).

    Tasks are resampled, not episodes: samples of one task are not independent.

    Raises:
        ValueError: there is no task.
    """
    values = np.asarray(per_task, np.float64)
    if not values.size:
        raise ValueError("a mean needs at least one task")
    drawn = np.random.default_rng(seed).integers(0, values.size, (resamples, values.size))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return Estimate(float(values.mean()), float(high - low) / 2)


@dataclass(frozen=True)
class EvaluationResult:
    """Means over held-out tasks. Episodes that ended in an error say nothing about the policy: counted, not averaged."""

    reward: Estimate
    metrics: dict[str, Estimate]
    tasks: int
    episodes: int
    errors: int
    pass_at: dict[int, Estimate] = field(default_factory=dict)
    """pass@k by k; only of tasks with at least k usable episodes."""


def summarize_groups(groups: Sequence[Group], *, seed: int = 0, pass_at: Sequence[int] = ()) -> EvaluationResult | None:
    """Estimates of the reward and of every metric that the environment reports; None if the policy acted in no usable episode.

    An episode that was cut before the environment could report a metric counts as 0 in `exact` and not at all in others.
    """
    usable = [[e for e in g.episodes if e.termination.trains] for g in groups]
    usable = [episodes for episodes in usable if episodes]
    if not any(e.turns for episodes in usable for e in episodes):
        return None
    names = sorted({name for episodes in usable for e in episodes for name in e.metrics})
    return EvaluationResult(
        reward=bootstrap([_mean([e.reward for e in episodes]) for episodes in usable], seed=seed),
        metrics={name: bootstrap(_per_task(usable, name), seed=seed) for name in names},
        tasks=len(usable),
        episodes=sum(len(episodes) for episodes in usable),
        errors=sum(len(g.failures) for g in groups),
        pass_at={
            k: bootstrap(per_task, seed=seed)
            for k in pass_at
            if (per_task := [pass_at_k(len(e), sum(map(_solved, e)), k) for e in usable if len(e) >= k])
        },
    )


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is correct, estimated from `samples` of which `correct` are, without bias:
    1 - C(n - c, k) / C(n, k) (Chen et al., 2021, "Evaluating Large Language Models Trained on Code", eq. 1).

    Raises:
        ValueError: there are fewer than k samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {samples}")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def _solved(episode: Episode) -> bool:
    return episode.metrics["exact"] >= 1 if "exact" in episode.metrics else episode.reward >= 1


def metric_of(episode: Episode, name: str) -> float | None:
    """An episode's metric; see `summarize_groups` for the ones that are missing."""
    return episode.metrics.get(name, 0.0 if name == "exact" else None)


def _per_task(usable: Sequence[Sequence[Episode]], name: str) -> list[float]:
    reported = ([v for e in episodes if (v := metric_of(e, name)) is not None] for episodes in usable)
    return [_mean(values) for values in reported if values]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
