"""Generalized advantage estimation (Schulman et al., 2016): what a critic's values say each token was worth.

Axes: T = the sampled tokens of one episode, in order. What was not sampled is not there: the state after a turn's last token is
the one in which the next turn's first token is sampled.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def gae(rewards_T: npt.ArrayLike, values_T: npt.ArrayLike, *, discount: float, gae_lambda: float) -> tuple[Floats, Floats]:
    """(advantages, returns) of each token, float64[T]: A_t = d_t + discount * lambda * A_{t+1} with d_t = r_t + discount *
    V_{t+1} - V_t (eq. 16), and R_t = A_t + V_t, what the value is trained towards.

    Nothing comes after the last token, also where the episode was cut off: its limits are part of the task, in training as in
    evaluation, so that what lies behind them is worth nothing (Pardo et al., 2018, "Time Limits in Reinforcement Learning",
    section 2). And the state there, after an action and before an observation, is one at which no value is ever trained.

    Raises:
        ValueError: the shapes differ, or a number is not finite.
    """
    rewards, values = np.asarray(rewards_T, np.float64), np.asarray(values_T, np.float64)
    if rewards.shape != values.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {rewards.shape} and values {values.shape} must have one entry for each token")
    if not (np.isfinite(rewards).all() and np.isfinite(values).all()):
        raise ValueError("rewards and values must be finite")
    advantages = np.zeros_like(rewards)
    following = value_after = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = rewards[t] + discount * value_after - values[t] + discount * gae_lambda * following
        advantages[t], value_after = following, values[t]
    return advantages, advantages + values


def whitened(advantages: Sequence[Floats]) -> list[Floats]:
    """The advantages of a batch's episodes with mean 0 and variance 1 over all their tokens: (A - mean) / sqrt(var + 1e-8), the
    variance unbiased, as TRL and verl do. A single token gives 0."""
    every = np.concatenate(advantages) if advantages else np.zeros(0)
    if len(every) < 2:
        return [np.zeros_like(a) for a in advantages]
    mean, scale = every.mean(), np.sqrt(every.var(ddof=1) + 1e-8)
    return [(a - mean) / scale for a in advantages]


def explained_variance(returns: npt.ArrayLike, values: npt.ArrayLike) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that is no better than a constant, and below 0 one
    that is worse. None where the returns do not differ."""
    found, said = np.asarray(returns, np.float64), np.asarray(values, np.float64)
    if found.size < 2 or np.ptp(found) == 0.0:
        return None
    return float(1.0 - np.var(found - said) / np.var(found))
