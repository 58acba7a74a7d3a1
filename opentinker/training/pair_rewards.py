"""The rewards of pairs and their losses, outside the trainer: what held-out pairs are measured with.

The formulas are those of `server/trainer/pair_losses.py`, in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from opentinker.client.messages import Datum, FloatArray
from opentinker.config.preference import BradleyTerryConfig, DPOConfig, IPOConfig

Floats = npt.NDArray[np.float64]
Loss = DPOConfig | IPOConfig | BradleyTerryConfig


@dataclass(frozen=True)
class PairScores:
    """By pair, float64[P]."""

    chosen: Floats
    rejected: Floats
    loss: Floats

    @property
    def margins(self) -> Floats:
        return self.chosen - self.rejected

    @property
    def correct(self) -> Floats:
        """1 where the chosen reward is larger, 1/2 where both are equal."""
        correct: Floats = (np.sign(self.margins) + 1) / 2
        return correct


def score_pairs(loss: Loss, data: Sequence[Datum], outputs: Sequence[FloatArray]) -> PairScores:
    """Rewards and losses of pairs of data, from the policy's logprobs or, of a reward model, its values."""
    if isinstance(loss, BradleyTerryConfig):
        last = [int(np.flatnonzero(datum.weights)[-1]) for datum in data]
        values = np.array([float(output[at]) for output, at in zip(outputs, last, strict=True)])
        margin = np.array([float(datum.arrays["margins"][at]) for datum, at in zip(data, last, strict=True)])[0::2]
        chosen, rejected = values[0::2], values[1::2]
        losses = _softplus(margin - chosen + rejected) + loss.centring_coefficient * (chosen + rejected) ** 2
        return PairScores(chosen, rejected, losses)
    ratios = np.array([_log_ratio(datum, output, loss) for datum, output in zip(data, outputs, strict=True)])
    chosen, rejected = ratios[0::2], ratios[1::2]
    difference = chosen - rejected
    if isinstance(loss, IPOConfig):
        losses = (difference - 1 / (2 * loss.beta)) ** 2
    else:
        logit = loss.beta * difference
        losses = (1 - loss.label_smoothing) * _softplus(-logit) + loss.label_smoothing * _softplus(logit)
    return PairScores(loss.beta * chosen, loss.beta * rejected, losses)


def _log_ratio(datum: Datum, logprobs: FloatArray, loss: DPOConfig | IPOConfig) -> float:
    weights = datum.weights.astype(np.float64)
    total = float(np.sum(weights * (logprobs.astype(np.float64) - datum.arrays["reference_logprobs"])))
    return total / float(weights.sum()) if isinstance(loss, IPOConfig) else total


def _softplus(values: Floats) -> Floats:
    """-log sigmoid(-x)."""
    softplus: Floats = np.logaddexp(0.0, values)
    return softplus
