"""What a step draws and what it trains on: tasks from a seed, groups of episodes turned into data and minibatches."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from opentinker.client.messages import Datum, FloatArray, Minibatch
from opentinker.env.environment import Environment
from opentinker.env.threads import UserThreads
from opentinker.errors import EnvironmentLoadError
from opentinker.rollout.types import Group

AdvantageFn = Callable[[FloatArray], FloatArray]
"""Rewards of one group's episodes, float32[G] -> their advantages, float32[G]."""


async def draw_tasks(environment: type[Environment], *, seed: int, step: int, count: int, timeout_s: float) -> list[Any]:
    """`count` training tasks, determined by (seed, step).

    Raises:
        EnvironmentLoadError: the environment's `make_task` raised, or all of it took longer than `timeout_s`.
    """
    seeds = np.random.SeedSequence([seed, step]).generate_state(count)
    return await _tasks(environment, "make_task", lambda: [environment.make_task(int(s)) for s in seeds], timeout_s)


async def held_out_tasks(environment: type[Environment], limit: int, timeout_s: float) -> list[Any]:
    """The first `limit` held-out tasks.

    Raises:
        EnvironmentLoadError: the environment's `held_out_tasks` raised, or took longer than `timeout_s`.
    """
    return await _tasks(environment, "held_out_tasks", lambda: list(islice(environment.held_out_tasks(), limit)), timeout_s)


async def _tasks(environment: type[Environment], method: str, make: Callable[[], list[Any]], timeout_s: float) -> list[Any]:
    """What user code makes, in a thread: one that never returns is left behind."""
    what = f"{environment.__name__}.{method}"
    with UserThreads() as threads:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await threads.call(make)
        except Exception as error:
            if limit.expired():
                raise EnvironmentLoadError(
                    f"{what} did not return within {timeout_s:g} s", hint="rollout.reset_timeout_s sets this deadline"
                ) from error
            raise EnvironmentLoadError(f"{what} raised {type(error).__name__}: {error}") from error


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
