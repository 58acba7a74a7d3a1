"""Rows of metrics.jsonl: what a step and an evaluation report, and the summary of a run."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from opentinker.client.messages import Datum
from opentinker.config.algorithms import KLConfig
from opentinker.rollout.types import Episode, Group
from opentinker.training.batch import Batch, token_divergences
from opentinker.training.evaluation import EvaluationResult, metric_of
from opentinker.training.ppo import critic_metrics

Row = dict[str, Any]
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_OPTIONAL_MEANS = {
    "entropy_mean": "entropy_sum",
    "reference_kl_mean": "reference_kl_sum",
    "truncated_fraction": "truncated_sum",
    "masked_fraction": "masked_sum",
}
"""Means over trained tokens of what the server sums up where the loss needs it, by their names in a row."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a step's phases."""

    rollout_s: float
    train_s: float
    publish_s: float
    step_s: float


def step_row(
    step: int,
    groups: Sequence[Group],
    batch: Batch,
    trained: Mapping[str, Any] | None,
    timing: Timing,
    *,
    learning_rate: float,
    task_position: int,
) -> Row:
    """The row of one training step. `trained` is the server's answer to `train_step`; None when there was nothing to train.
    `task_position` is where the next step draws its tasks."""
    episodes = [e for g in groups for e in g.episodes]
    usable = [e for e in episodes if e.termination.trains]
    failures = [e for g in groups for e in g.failures]
    rewards = [e.reward for e in usable]
    sampled = sum(e.action_tokens for e in [*episodes, *failures])
    row: Row = {
        "kind": "step",
        "step": step,
        "reward_mean": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
        "reward_quantiles": [float(q) for q in np.quantile(rewards, QUANTILES)] if rewards else None,
        "exact": None,
        "env": _environment_means(usable),
        "reward_components": _component_means(usable),
        "groups": len(groups),
        "episodes": len(episodes),
        "zero_variance_groups": batch.zero_variance_groups,
        "task_position": task_position,
        "terminations": dict(Counter(str(e.termination) for e in [*episodes, *failures])),
        "errors": len(failures),
        "dropped": sum(g.dropped for g in groups),
        "replaced": sum(g.replaced for g in groups),
        "truncated": sum(str(e.termination).startswith("truncated") for e in episodes),
        "actions_cut": _cut_fraction(usable),
        "turns_mean": _mean([e.turns for e in usable]),
        "action_tokens_mean": _mean([e.action_tokens for e in usable]),
        "action_tokens_max": max((e.action_tokens for e in usable), default=0),
        "entropy_estimate": entropy_estimate(usable),
        "context_tokens_mean": _mean([max(len(t) for t in e.trajectories) for e in usable if e.trajectories]),
        "prefix_breaks": sum(e.prefix_breaks for e in episodes),
        "tokens_sampled": sampled,
        "tokens_trained": batch.action_tokens,
        "tokens_per_s": sampled / timing.rollout_s if timing.rollout_s > 0 else None,
        "tokens_trained_per_s": _trained_tokens(trained) / timing.train_s if timing.train_s > 0 else None,
        "learning_rate": learning_rate,
        "rollout_s": timing.rollout_s,
        "train_s": timing.train_s,
        "publish_s": timing.publish_s,
        "step_s": timing.step_s,
        **_training_metrics(trained),
        **pass_metrics(trained),
        **critic_metrics(batch.data, trained),
    }
    row["exact"] = row["env"].get("exact")
    if row["reference_kl_mean"] is None:
        row["reference_kl_mean"] = reference_kl(batch.data)
    checked: Row = finite(row)
    return checked


def evaluation_row(step: int, result: EvaluationResult, groups: Sequence[Group], *, seconds: float) -> Row:
    """The row of one evaluation after `step` training steps."""
    exact = result.metrics.get("exact")
    row = {
        "kind": "evaluation",
        "step": step,
        "reward_mean": result.reward.mean,
        "reward_ci": result.reward.half_width,
        "exact": None if exact is None else exact.mean,
        "exact_ci": None if exact is None else exact.half_width,
        "env": {name: estimate.mean for name, estimate in result.metrics.items()},
        "reward_components": _component_means([e for g in groups for e in g.episodes if e.termination.trains]),
        "pass_at": {str(k): estimate.mean for k, estimate in result.pass_at.items()},
        "pass_at_ci": {str(k): estimate.half_width for k, estimate in result.pass_at.items()},
        "tasks": result.tasks,
        "episodes": result.episodes,
        "errors": result.errors,
        "tokens_sampled": sum(e.action_tokens for g in groups for e in [*g.episodes, *g.failures]),
        "evaluation_s": seconds,
    }
    checked: Row = finite(row)
    return checked


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """A run's headline numbers. `*_before` and `*_after` are the first and last evaluation's; without any evaluation, rewards
    are the first and last step's."""
    steps = [r for r in rows if r["kind"] == "step"]
    evaluations = [r for r in rows if r["kind"] == "evaluation"]
    before = next((r for r in evaluations if r["step"] == 0), None)
    after = evaluations[-1] if evaluations and evaluations[-1]["step"] > 0 else None
    rewarded = [r for r in steps if r["reward_mean"] is not None] if not evaluations else []
    mismatch = [r["mismatch_kl_mean"] for r in steps if r["mismatch_kl_mean"] is not None]
    return {
        "exact_before": before and before["exact"],
        "exact_after": after and after["exact"],
        "exact_ci": after and after["exact_ci"],
        "reward_before": before["reward_mean"] if before else rewarded[0]["reward_mean"] if rewarded else None,
        "reward_after": after["reward_mean"] if after else rewarded[-1]["reward_mean"] if rewarded else None,
        "steps": len(steps),
        "stopped": why_stopped(rows),
        "tokens_sampled": sum(r["tokens_sampled"] for r in [*steps, *evaluations]),
        "mismatch_kl_mean": _mean(mismatch),
    }


def why_stopped(rows: Sequence[Row]) -> str | None:
    """Why a run ended early, if it did."""
    return next((row["reason"] for row in rows if row["kind"] == "stopping" and row["action"] == "stopped"), None)


def commonest_failure(groups: Sequence[Group]) -> str:
    """Why episodes could not be trained on, in the words of most of them."""
    fruitless = [e for g in groups for e in (*g.failures, *g.episodes) if not e.trains]
    failures = Counter(f"{e.termination}: {e.error}" for e in fruitless)
    if not failures:
        return "no episode ended"
    (text, count), *_ = failures.most_common(1)
    return f"{text} ({count} of {failures.total()} failures)"


def finite(value: Any) -> Any:
    """`value` with NaN and infinities replaced by None: JSON has no word for them."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def entropy_estimate(episodes: Sequence[Episode]) -> float | None:
    """Minus the mean logprob of the tokens that were sampled, in nats: an estimate without bias of the mean entropy of the
    distributions that they came from, temperature and truncation included. It costs nothing."""
    logprobs = [r.sample.logprobs for e in episodes for t in e.trajectories for r in t.runs if r.sample is not None]
    mean = _mean(np.concatenate(logprobs)) if logprobs else None
    return None if mean is None else -mean


def reference_kl(data: Sequence[Datum]) -> float | None:
    """The mean over trained tokens of k3 of KL(policy || reference) (Schulman, 2020), under the logprobs that sampled; None
    where the data have no reference."""
    k3 = KLConfig(estimator="k3")
    found = [token_divergences(d, k3)[d.weights != 0] for d in data if "reference_logprobs" in d.arrays]
    return _mean(np.concatenate(found)) if found else None


def _mean(values: Sequence[float] | npt.NDArray[np.floating[Any]]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _environment_means(episodes: Sequence[Episode]) -> dict[str, float]:
    names = sorted({name for e in episodes for name in e.metrics})
    return {name: float(np.mean([v for e in episodes if (v := metric_of(e, name)) is not None])) for name in names}


def _component_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """A component that an episode did not have earned it nothing."""
    names = sorted({name for e in episodes for name in e.components})
    return {name: float(np.mean([e.components.get(name, 0.0) for e in episodes])) for name in names}


def _cut_fraction(episodes: Sequence[Episode]) -> float | None:
    """Share of actions that ended at the token limit."""
    ends = [r.sample.finish_reason for e in episodes for t in e.trajectories for r in t.runs if r.sample is not None]
    return _mean([float(end == "length") for end in ends])


def pass_metrics(trained: Mapping[str, Any] | None) -> Row:
    """What the passes of a `train_step` took: tokens of its sequences, how many were computed, passes, and the longest one's;
    and the memory that the server needed at most. Empty where the server does not say."""
    parts = [part["metrics"] for part in (trained["minibatches"] if trained else []) if "passes" in part.get("metrics", {})]
    if not parts:
        return {}
    return {
        "tokens_in_passes": int(sum(m["sequence_tokens"] for m in parts)),
        "tokens_computed": int(sum(m["computed_tokens"] for m in parts)),
        "passes": int(sum(m["passes"] for m in parts)),
        "pass_tokens_max": int(max(m["pass_tokens_max"] for m in parts)),
        **({"memory_bytes": trained["memory_bytes"]} if trained and "memory_bytes" in trained else {}),
    }


def _trained_tokens(trained: Mapping[str, Any] | None) -> float:
    """Tokens that the loss was over, in all minibatches of all epochs."""
    return float(sum(part["metrics"]["tokens"] for part in (trained["minibatches"] if trained else []) if "metrics" in part))


def _training_metrics(trained: Mapping[str, Any] | None) -> Row:
    """What the server measured. The mismatch between engine and trainer is the first optimizer step's: later ones also see
    the policy move."""
    parts = [part for part in trained["minibatches"] if "metrics" in part] if trained else []
    if trained is None or not parts:
        names = ("version", "loss", "grad_norm", "mismatch_kl_mean", "ratio_max", "clip_fraction", *_OPTIONAL_MEANS)
        return dict.fromkeys(names) | ({"version": trained["version"]} if trained else {})
    metrics = [part["metrics"] for part in parts]
    tokens = sum(m["tokens"] for m in metrics)
    return {
        "version": trained["version"],
        "loss": _mean([part["loss"] for part in parts]),
        "grad_norm": _mean([part["grad_norm"] for part in parts]),
        "mismatch_kl_mean": metrics[0]["mismatch_kl_sum"] / metrics[0]["tokens"],
        "ratio_max": max(m["ratio_max"] for m in metrics),
        "clip_fraction": sum(m.get("clipped_sum", 0.0) for m in metrics) / tokens,
        **{name: parts[-1][name] for name in ("loss_scale", "steps_skipped") if name in parts[-1]},  # of float16 only
        **{
            name: sum(m[total] for m in metrics) / tokens if total in metrics[0] else None
            for name, total in _OPTIONAL_MEANS.items()
        },
    }
