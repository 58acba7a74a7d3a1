"""What an algorithm is given and gives back. It knows rewards only: no tokens, no model.

Axes: a batch is a list of groups, a group a list of episodes, an episode float32[turns].
"""

from collections.abc import Callable, Sequence

import numpy as np

from opentinker.client.messages import FloatArray

EpisodeRewards = FloatArray
"""Rewards per turn, float32[turns]."""
Batch = Sequence[Sequence[EpisodeRewards]]
"""Rewards of the episodes of each group."""
AdvantageFn = Callable[[Batch], list[list[FloatArray]]]
"""Advantages per turn, in the shape of the rewards."""


class ShapeError(ValueError):
    """Advantages that do not fit the rewards."""


def checked(advantages: object, rewards: Batch, what: str) -> list[list[FloatArray]]:
    """The advantages as float32 in the shape of the rewards.

    Raises:
        ShapeError: they have another shape, or one is not finite.
    """
    groups = _listed(advantages, len(rewards), f"{what} gave", "groups")
    result = []
    for g, (group, earned) in enumerate(zip(groups, rewards, strict=True)):
        episodes = _listed(group, len(earned), f"{what}: group {g} has", "episodes")
        arrays = [np.asarray(episode, np.float32) for episode in episodes]
        for e, (array, turns) in enumerate(zip(arrays, earned, strict=True)):
            if array.shape != np.shape(turns):
                raise ShapeError(f"{what}: episode {e} of group {g} has shape {array.shape}, its rewards {np.shape(turns)}")
            if not np.isfinite(array).all():
                raise ShapeError(f"{what}: episode {e} of group {g} has an advantage that is not finite")
        result.append(arrays)
    return result


def _listed(value: object, count: int, what: str, noun: str) -> Sequence[object]:
    if not isinstance(value, Sequence) or len(value) != count:
        found = len(value) if isinstance(value, Sequence) else type(value).__name__
        raise ShapeError(f"{what} {found} {noun}, expected {count}")
    return value
