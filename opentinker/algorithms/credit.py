"""Which of an episode's rewards a turn is judged by."""

import numpy as np
import numpy.typing as npt

Returns = npt.NDArray[np.float64]


def returns_to_go(rewards: npt.ArrayLike, discount: float = 1.0) -> Returns:
    """What each turn and those after it earned, float64[turns]: G_t = r_t + discount * G_{t+1} (Sutton & Barto, 2018, eq.
    3.9)."""
    returns = np.asarray(rewards, np.float64).copy()
    for turn in range(len(returns) - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns


def episode_return(rewards: npt.ArrayLike) -> Returns:
    """The whole episode's reward, at each of its turns, float64[turns]."""
    values = np.asarray(rewards, np.float64)
    return np.full(values.shape, values.sum())
