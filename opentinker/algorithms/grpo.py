"""Group relative policy optimization: the episodes of one task are each other's baseline."""

import numpy as np
import numpy.typing as npt

from opentinker.client.messages import FloatArray


def group_advantages(
    rewards_G: npt.ArrayLike,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> FloatArray:
    """Advantages of one group's episodes, float32[G]: (r - mean(r)) / (std(r) + eps), computed in float64.

    `normalize_std` is eq. 3 of Shao et al. (2024, "DeepSeekMath"); without it only the mean is subtracted (Liu et al., 2025,
    "Understanding R1-Zero-Like Training": Dr. GRPO). Equal rewards, and a group of one, give exact zeros: they say nothing.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards = np.asarray(rewards_G, np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite: {rewards.tolist()}")
    if not rewards.size or np.ptp(rewards) == 0.0:
        return np.zeros(rewards.shape, np.float32)
    centred = rewards - rewards.mean()
    scaled: FloatArray = (centred / (rewards.std() + eps) if normalize_std else centred).astype(np.float32)
    return scaled
