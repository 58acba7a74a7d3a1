"""The losses, as sums over weighted tokens. Each is a function of flat arrays, one entry per weighted token.

With l = current logprob, o = the anchor's, b = the engine's (behaviour), A = advantage, w = weight, r = exp(l - o):

- `cross_entropy`: sum w * -l. Needs only weights.
- `importance_sampling`: sum w * -(r * A).
- `ppo`: sum w * -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) (Schulman et al., 2017, eq. 7, with the two clips
  apart).
- `gspo`: `ppo` with r = exp(mean of l - o over the token's sequence) (Zheng et al., 2025, eq. 5 and 7).
- `cispo`: sum w * -(c * A * l), c = clip(r, 1 - clip_low, 1 + clip_high) as a constant (MiniMax-M1, 2025, eq. 4 and 5).
- `value`: of a scalar head's values instead of logprobs, see `value_loss`.
- `dpo`, `ipo`, `bradley_terry`: of pairs of sequences; see `pair_losses`.

All others but `cross_entropy` need advantages and behaviour_logprobs. Around them: weights of truncated importance
sampling min(exp(o - b), truncate), sequences masked by their mean of o - b, a KL term and an entropy bonus; see `LossConfig`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from opentinker.client.messages import PAIR_LOSSES, SCALAR_LOSSES, Datum, LossConfig
from opentinker.errors import InvalidRequestError
from opentinker.server.trainer.pair_losses import check_pairs, pair_loss
from opentinker.server.trainer.value_loss import value_loss

_POLICY_GRADIENT = ("advantages", "behaviour_logprobs")
_WITHOUT_RATIO = ("cross_entropy", *SCALAR_LOSSES, *PAIR_LOSSES)


def required_arrays(loss: LossConfig) -> tuple[str, ...]:
    """The arrays that a loss needs besides `weights`."""
    if loss.name in PAIR_LOSSES:
        return () if loss.name == "bradley_terry" else ("reference_logprobs",)
    if loss.name == "value":
        return ("returns",) if loss.value_clip is None else ("returns", "old_values")
    needed = () if loss.name in _WITHOUT_RATIO else _POLICY_GRADIENT
    proximal = ("proximal_logprobs",) if needed and loss.anchor == "proximal" else ()
    reference = ("reference_logprobs",) if loss.kl_coefficient else ()
    return (*needed, *proximal, *reference)


def check_arrays(data: Sequence[Datum], loss: LossConfig) -> None:
    """Are the data complete for the loss?

    Raises:
        InvalidRequestError: names the datum and what is wrong with it.
    """
    needed = required_arrays(loss)
    if loss.name in PAIR_LOSSES:
        check_pairs(data, loss)
    for index, datum in enumerate(data):
        for name in needed:
            if name not in datum.arrays:
                raise InvalidRequestError(
                    f"datum {index} has no '{name}', which the loss '{loss.name}' needs",
                    hint=f"it needs {', '.join(('weights', *needed))}",
                )
        if loss.name not in _WITHOUT_RATIO and loss.anchor != "proximal" and "proximal_logprobs" in datum.arrays:
            raise InvalidRequestError(
                f"datum {index} has 'proximal_logprobs', which the loss '{loss.name}' does not use",
                hint=f"its ratio is against the anchor '{loss.anchor}'; set anchor to 'proximal'",
            )
        for name in needed:
            if name.endswith("_logprobs") and (datum.arrays[name][datum.weights != 0] > 0).any():
                raise InvalidRequestError(
                    f"datum {index} has positive {name}: they are not logprobs",
                    hint="a logprob is the log of a probability, 0 or less; send what `sample` or `forward` gave",
                )


def token_loss(
    loss: LossConfig,
    logprobs_N: torch.Tensor,
    arrays_N: Mapping[str, torch.Tensor],
    sequence_N: torch.Tensor | None = None,
    entropies_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(sum of the loss, differentiable in `logprobs_N` and `entropies_N`; its metrics). For the losses of scalars `logprobs_N`
    are the scalars.

    `sequence_N` (int64) says which sequence a token belongs to; None: all to one. `entropies_N` are needed for an entropy
    bonus.

    Metrics: `tokens`, `loss_sum`; for the losses with a ratio also `mismatch_kl_sum` (the estimator k3 of
    KL(behaviour || current): (q - 1) - log q with q = exp(l - b); Schulman, 2020), `abs_logprob_diff_sum` (|l - b|),
    `ratio_max` and `clipped_sum` (tokens whose gradient the clip cut off, or for `cispo` bounded); with a KL term
    `reference_kl_sum`, with an entropy bonus `entropy_sum`, with a correction `truncated_sum` and `masked_sum` (tokens).
    Metrics are over weighted tokens, unweighted. Those of a loss of pairs are in `pair_loss`.
    """
    if loss.name in PAIR_LOSSES:
        assert sequence_N is not None
        return pair_loss(loss, logprobs_N, arrays_N, sequence_N)
    weights_N = arrays_N["weights"]
    metrics = {"tokens": float(len(logprobs_N))}
    if loss.name == "cross_entropy":
        loss_N = -logprobs_N
    elif loss.name == "value":
        loss_N = value_loss(loss, logprobs_N, arrays_N, metrics)
    else:
        loss_N, weights_N = _policy_gradient(loss, logprobs_N, arrays_N, weights_N, sequence_N, metrics)
    if loss.kl_coefficient:
        kl_N = kl_estimate(loss.kl_estimator, logprobs_N, arrays_N["reference_logprobs"])
        loss_N = loss_N + loss.kl_coefficient * kl_N
        metrics["reference_kl_sum"] = float(kl_N.detach().sum())
    if entropies_N is not None:
        loss_N = loss_N - loss.entropy_coefficient * entropies_N
        metrics["entropy_sum"] = float(entropies_N.detach().sum())
    total = (weights_N * loss_N).sum()
    metrics["loss_sum"] = float(total.detach())
    return total, metrics


def kl_estimate(estimator: str, logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """k1, k2 or k3 of KL(policy || reference) at each token (Schulman, 2020, "Approximating KL Divergence")."""
    difference_N = logprobs_N - reference_N
    match estimator:
        case "k1":
            return difference_N
        case "k2":
            return difference_N.square() / 2
    return torch.expm1(-difference_N) + difference_N


def _policy_gradient(
    loss: LossConfig,
    logprobs_N: torch.Tensor,
    arrays_N: Mapping[str, torch.Tensor],
    weights_N: torch.Tensor,
    sequence_N: torch.Tensor | None,
    metrics: dict[str, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the loss of each token, the weights with corrections)."""
    advantages_N, behaviour_N = arrays_N["advantages"], arrays_N["behaviour_logprobs"]
    anchor_N = {
        "behaviour": lambda: behaviour_N,
        "proximal": lambda: arrays_N["proximal_logprobs"],
        "current": logprobs_N.detach,
    }[loss.anchor]()
    if loss.anchor != "behaviour":
        weights_N = weights_N * _correction(loss, anchor_N - behaviour_N, sequence_N, metrics)
    log_ratio_N = logprobs_N - anchor_N
    if loss.name == "gspo":
        log_ratio_N = _sequence_means(log_ratio_N, sequence_N)
    ratio_N = log_ratio_N.exp()
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    clipped = torch.zeros((), device=ratio_N.device)
    if loss.name == "cispo":
        bounded_N = ratio_N.detach().clamp(low, high)
        clipped = (bounded_N != ratio_N).sum()
        gain_N = bounded_N * advantages_N * logprobs_N
    else:
        gain_N = ratio_N * advantages_N
        if loss.name != "importance_sampling":
            bounded_N = ratio_N.clamp(low, high) * advantages_N
            clipped = (bounded_N < gain_N).sum()
            gain_N = torch.minimum(gain_N, bounded_N)
    with torch.no_grad():
        drift_N = logprobs_N - behaviour_N
        metrics |= {
            "ratio_max": float(ratio_N.max()) if len(ratio_N) else 0.0,
            "abs_logprob_diff_sum": float(drift_N.abs().sum()),
            "mismatch_kl_sum": float((drift_N.exp() - 1 - drift_N).sum()),
            "clipped_sum": float(clipped),
        }
    return -gain_N, weights_N


def _correction(
    loss: LossConfig, difference_N: torch.Tensor, sequence_N: torch.Tensor | None, metrics: dict[str, float]
) -> torch.Tensor:
    """Weights for the difference between trainer and engine, without a gradient."""
    factor_N = torch.ones_like(difference_N)
    if loss.truncate is not None:
        ratio_N = difference_N.exp()
        factor_N = ratio_N.clamp(max=loss.truncate)
        metrics["truncated_sum"] = float((ratio_N > loss.truncate).sum())
    if loss.mask_sequences is not None:
        low, high = loss.mask_sequences
        mean_N = _sequence_means(difference_N, sequence_N)
        kept_N = (mean_N >= np.log(low)) & (mean_N <= np.log(high))
        factor_N = factor_N * kept_N
        metrics["masked_sum"] = float((~kept_N).sum())
    return factor_N.detach()


def _sequence_means(values_N: torch.Tensor, sequence_N: torch.Tensor | None) -> torch.Tensor:
    """At each token the mean over its sequence's tokens."""
    if sequence_N is None:
        sequence_N = torch.zeros(len(values_N), dtype=torch.int64, device=values_N.device)
    _, index_N = torch.unique(sequence_N, return_inverse=True)
    count = int(index_N.max()) + 1 if len(index_N) else 0
    sums = values_N.new_zeros(count).index_add(0, index_N, values_N)
    sizes = values_N.new_zeros(count).index_add(0, index_N, torch.ones_like(values_N))
    return (sums / sizes)[index_N]


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
