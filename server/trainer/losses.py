"""The losses, as sums over weighted tokens. Each is a function of flat arrays, one entry per weighted token.

With l = current logprob, b = behaviour logprob, A = advantage, w = weight, r = exp(l - b):

- `cross_entropy`: sum w * -l. Needs only weights.
- `importance_sampling`: sum w * -(r * A). Needs advantages and behaviour_logprobs.
- `ppo`: sum w * -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) (Schulman et al., 2017, eq. 7, with the two clips
  apart). Needs advantages and behaviour_logprobs.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from opentinker.client.messages import Datum, LossConfig
from opentinker.errors import InvalidRequestError

REQUIRED_ARRAYS = {
    "cross_entropy": (),
    "importance_sampling": ("advantages", "behaviour_logprobs"),
    "ppo": ("advantages", "behaviour_logprobs"),
}
"""The arrays that each loss needs besides `weights`."""


def check_arrays(data: Sequence[Datum], loss: LossConfig) -> None:
    """Are the data complete for the loss?

    Raises:
        InvalidRequestError: names the datum and what is wrong with it.
    """
    for index, datum in enumerate(data):
        for name in REQUIRED_ARRAYS[loss.name]:
            if name not in datum.arrays:
                raise InvalidRequestError(f"datum {index} has no '{name}', which the loss '{loss.name}' needs")
        if loss.name != "cross_entropy":
            if "proximal_logprobs" in datum.arrays:
                raise InvalidRequestError(
                    f"datum {index} has 'proximal_logprobs', which the loss '{loss.name}' does not use",
                    hint="its ratio is against 'behaviour_logprobs'",
                )
            if (datum.arrays["behaviour_logprobs"][datum.weights != 0] > 0).any():
                raise InvalidRequestError(f"datum {index} has positive behaviour_logprobs: they are not logprobs")


def token_loss(
    loss: LossConfig, logprobs_N: torch.Tensor, arrays_N: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """(sum of the loss, differentiable in `logprobs_N`; its metrics).

    Metrics: `tokens`, `loss_sum`; for the ratio losses also `ratio_max`, `abs_logprob_diff_sum`, `mismatch_kl_sum` (the
    estimator k3 of KL(behaviour || current): (r - 1) - log r; Schulman, 2020) and `clipped_sum` (tokens whose gradient the
    clip cut off). Metrics are over weighted tokens, unweighted.
    """
    weights_N = arrays_N["weights"]
    metrics = {"tokens": float(len(logprobs_N))}
    if loss.name == "cross_entropy":
        total = -(weights_N * logprobs_N).sum()
    else:
        advantages_N = arrays_N["advantages"]
        log_ratio_N = logprobs_N - arrays_N["behaviour_logprobs"]
        ratio_N = log_ratio_N.exp()
        gain_N = ratio_N * advantages_N
        clipped = torch.zeros((), device=ratio_N.device)
        if loss.name == "ppo":
            bounded_N = ratio_N.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantages_N
            clipped = (bounded_N < gain_N).sum()
            gain_N = torch.minimum(gain_N, bounded_N)
        total = -(weights_N * gain_N).sum()
        with torch.no_grad():
            metrics |= {
                "ratio_max": float(ratio_N.max()) if len(ratio_N) else 0.0,
                "abs_logprob_diff_sum": float(log_ratio_N.abs().sum()),
                "mismatch_kl_sum": float((ratio_N - 1 - log_ratio_N).sum()),
                "clipped_sum": float(clipped),
            }
    metrics["loss_sum"] = float(total.detach())
    return total, metrics


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a whole from those of its parts: maxima for keys that end in `_max`, sums for all others."""
    merged: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            if key.endswith("_max"):
                merged[key] = max(merged.get(key, -np.inf), value)
            else:
                merged[key] = merged.get(key, 0.0) + value
    return merged
