"""The loss of values, for critics and for heads that are regressed on anything."""

from collections.abc import Mapping

import torch

from opentinker.client.messages import LossConfig


def value_loss(
    loss: LossConfig, values_N: torch.Tensor, arrays_N: Mapping[str, torch.Tensor], metrics: dict[str, float]
) -> torch.Tensor:
    """Half the squared error of each token's value, [N]; adds to the metrics `value_error_sum` (of the squared error, without
    the clip) and with a clip `value_clipped_sum` (tokens).

    With `value_clip` c it is the larger of that and of the same for the value kept within c of `old_values`: a value that has
    moved further in one update gets no gradient for it (PPO2's; Huang et al., 2022, "The 37 Implementation Details of Proximal
    Policy Optimization", detail 9).
    """
    returns_N = arrays_N["returns"]
    error_N = (values_N - returns_N).square()
    chosen_N = error_N
    if loss.value_clip is not None:
        old_N = arrays_N["old_values"]
        kept_N = old_N + (values_N - old_N).clamp(-loss.value_clip, loss.value_clip)
        kept_error_N = (kept_N - returns_N).square()
        chosen_N = torch.maximum(error_N, kept_error_N)
        metrics["value_clipped_sum"] = float((kept_error_N > error_N).sum())
    metrics["value_error_sum"] = float(error_N.detach().sum())
    return chosen_N / 2
