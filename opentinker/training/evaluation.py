"""Evaluation: episodes of held-out tasks through the training's own runner, without a loss."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def summarize_groups(groups: Sequence[Group], *, seed: int = 0) -> EvaluationResult | None:
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
    )


def metric_of(episode: Episode, name: str) -> float | None:
    """An episode's metric; see `summarize_groups` for the ones that are missing."""
    return episode.metrics.get(name, 0.0 if name == "exact" else None)


def _per_task(usable: Sequence[Sequence[Episode]], name: str) -> list[float]:
    reported = ([v for e in episodes if (v := metric_of(e, name)) is not None] for episodes in usable)
    return [_mean(values) for values in reported if values]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
