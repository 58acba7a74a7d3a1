"""What a step draws and what it trains on: tasks from a seed, groups of episodes turned into data and minibatches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opentinker.client.messages import Datum, FloatArray, Minibatch
from opentinker.env.environment import Environment
from opentinker.errors import EnvironmentLoadError
from opentinker.rollout.types import Group

AdvantageFn = Callable[[FloatArray], FloatArray]
"""Rewards of one group's episodes, float32[G] -> their advantages, float32[G]."""


def draw_tasks(environment: type[Environment], *, seed: int, step: int, count: int) -> list[Any]:
    """`count` training tasks, determined by (seed, step).

    Raises:
        EnvironmentLoadError: the environment's `make_task` raised.
    """
    seeds = np.random.SeedSequence([seed, step]).generate_state(count)
    try:
        return [environment.make_task(int(s)) for s in seeds]
    except Exception as error:
        raise EnvironmentLoadError(f"{environment.__name__}.make_task raised {type(error).__name__}: {error}") from error


def held_out_tasks(environment: type[Environment], limit: int) -> list[Any]:
    """The first `limit` held-out tasks.

    Raises:
        EnvironmentLoadError: the environment's `held_out_tasks` raised.
    """
    try:
        return list(environment.held_out_tasks())[:limit]
    except Exception as error:
        raise EnvironmentLoadError(f"{environment.__name__}.held_out_tasks raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Batch:
    """What one training step sends to the server."""

    data: list[Datum] = field(default_factory=list)
    minibatches: list[Minibatch] = field(default_factory=list)
    action_tokens: int = 0
    zero_variance_groups: int = 0
    """Groups whose advantages are all zero: they give no gradient and are left out."""


def build_batch(groups: Sequence[Group], advantages: AdvantageFn, *, minibatches: int = 1, epochs: int = 1) -> Batch:
    """Data of every episode that trains, its group's advantages attached.

    Groups are dealt over `minibatches` optimizer steps, whose losses are means over their action tokens; the whole is
    repeated `epochs` times. A minibatch that got no group is left out.
    """
    data: list[Datum] = []
    dealt: list[list[int]] = [[] for _ in range(minibatches)]
    zero_variance = hand = 0
    for group in groups:
        episodes = [e for e in group.episodes if e.trains]
        if not episodes:
            continue
        values = advantages(np.array([e.reward for e in episodes], np.float32))
        if not values.any():
            zero_variance += 1
            continue
        for episode, advantage in zip(episodes, values, strict=True):
            for trajectory in episode.trajectories:
                dealt[hand].append(len(data))
                data.append(trajectory.to_datum(float(advantage)))
        hand = (hand + 1) % minibatches
    tokens = [float(d.weights.sum()) for d in data]
    once = [Minibatch(indices=tuple(part), factor=1.0 / sum(tokens[i] for i in part)) for part in dealt if part]
    return Batch(data, once * epochs, int(sum(tokens)), zero_variance)
