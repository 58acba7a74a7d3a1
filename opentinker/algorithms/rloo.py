"""REINFORCE leave-one-out: the baseline of an episode is the mean of the group's others."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from opentinker.client.messages import FloatArray


def leave_one_out_turns(returns: Sequence[npt.NDArray[np.float64]]) -> list[FloatArray]:
    """Advantages per turn of a group's episodes, float32[turns] each: the return of a turn less the mean over all turns of the
    *other* episodes, because those of its own depend on its action. A group of one gives 0."""
    if len(returns) < 2 or np.ptp(np.concatenate(returns)) == 0.0:
        return [np.zeros(r.shape, np.float32) for r in returns]
    total, count = sum(float(r.sum()) for r in returns), sum(len(r) for r in returns)
    return [(r - (total - r.sum()) / (count - len(r))).astype(np.float32) for r in returns]


def leave_one_out(rewards_G: npt.ArrayLike) -> FloatArray:
    """Advantages float32[G]: r_i - mean of r_j, j != i (Ahmadian et al., 2024, "Back to Basics", section 2.2). A group of one
    has no baseline and gives 0.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards = np.asarray(rewards_G, np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite: {rewards.tolist()}")
    if len(rewards) < 2 or np.ptp(rewards) == 0.0:
        return np.zeros(rewards.shape, np.float32)
    advantages: FloatArray = ((rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)).astype(np.float32)
    return advantages
