import asyncio
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opentinker.algorithms.grpo import group_advantages
from opentinker.client.messages import Sample
from opentinker.config.job import EnvironmentConfig, TasksConfig
from opentinker.env.environment import Environment
from opentinker.env.tasks import ListTasks
from opentinker.errors import ConfigError, EnvironmentLoadError
from opentinker.rollout.trajectory import RunKind, Trajectory
from opentinker.rollout.types import Episode, Group, Termination
from opentinker.training.data import JobTasks, build_batch


def episode(reward: float, tokens: int = 3, termination: Termination = Termination.DONE) -> Episode:
    trajectory = Trajectory()
    trajectory.append_rendered(RunKind.PROMPT, [1, 2])
    if tokens:
        ids = np.arange(tokens, dtype=np.int32)
        trajectory.append_sample(Sample(ids, np.full(tokens, -0.5, np.float32), "stop", ((0, tokens),)))
    return Episode("task", 0, termination, [trajectory], rewards=[reward])


def test_every_action_token_has_the_same_weight_in_a_minibatch() -> None:
    batch = build_batch([Group("a", 0, [episode(0.0, 2), episode(1.0, 8)])], group_advantages)
    [minibatch] = batch.minibatches
    assert minibatch.factor == pytest.approx(1 / 10)
    assert batch.action_tokens == 10


def test_advantages_belong_to_the_episode_and_only_to_its_actions() -> None:
    batch = build_batch([Group("a", 0, [episode(0.0), episode(1.0)])], group_advantages)
    low, high = (d.arrays["advantages"] for d in batch.data)
    np.testing.assert_allclose(low, [0, -1, -1, -1], atol=1e-5)
    np.testing.assert_allclose(high, -low)


def test_truncated_episodes_train_and_failed_or_empty_ones_do_not() -> None:
    group = Group(
        "a",
        0,
        [
            episode(0.0),
            episode(1.0, termination=Termination.TRUNCATED_TURNS),
            episode(5.0, tokens=0, termination=Termination.TRUNCATED_CONTEXT),
        ],
        failures=[episode(9.0, termination=Termination.ERROR_ENV)],
    )
    batch = build_batch([group], group_advantages)
    assert len(batch.data) == 2
    np.testing.assert_allclose(batch.data[1].arrays["advantages"], [0, 1, 1, 1], atol=1e-5)


def test_groups_are_dealt_over_the_minibatches_and_epochs_repeat_them() -> None:
    groups = [Group(i, i, [episode(0.0), episode(1.0)]) for i in range(5)]
    batch = build_batch(groups, group_advantages, minibatches=2, epochs=3)
    assert [m.indices for m in batch.minibatches] == [(0, 1, 4, 5, 8, 9), (2, 3, 6, 7)] * 3


def test_fewer_groups_than_minibatches_leave_no_empty_minibatch() -> None:
    batch = build_batch([Group("a", 0, [episode(0.0), episode(1.0)])], group_advantages, minibatches=4)
    assert len(batch.minibatches) == 1


def test_groups_without_variance_are_left_out_and_counted() -> None:
    groups = [Group("a", 0, [episode(1.0), episode(1.0)]), Group("b", 1, [episode(0.5)]), Group("c", 2, [])]
    batch = build_batch(groups, group_advantages)
    assert (batch.data, batch.minibatches, batch.zero_variance_groups) == ([], [], 2)


def tasks_of(environment: type[Environment], timeout_s: float = 10.0, **config: Any) -> JobTasks:
    return JobTasks(environment, EnvironmentConfig(name="x", **config), timeout_s=timeout_s)


async def test_tasks_depend_on_seed_and_place_alone() -> None:
    async def drawn(seed: int, start: int, count: int = 50) -> list[int]:
        return [t["seed"] for t in await tasks_of(Environment).draw(seed, start, count)]

    assert await drawn(0, 0) == await drawn(0, 0)
    assert len({*await drawn(0, 0), *await drawn(0, 50), *await drawn(1, 0)}) == 150
    assert await drawn(0, 0, 20) + await drawn(0, 20, 30) == await drawn(0, 0)


async def test_a_file_that_the_config_names_replaces_the_environments_own_tasks(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    config = EnvironmentConfig(name="x", train_tasks=TasksConfig(name="t.jsonl", columns={"question": "q"}))
    tasks = JobTasks(Environment, config, timeout_s=10.0, base_dir=tmp_path)
    assert sorted(t["question"] for t in await tasks.draw(0, 0, 4)) == ["a", "a", "b", "b"]
    assert await tasks.held_out(5) == []
    missing = JobTasks(Environment, EnvironmentConfig(name="x", held_out_tasks=TasksConfig(name="no.csv")), timeout_s=10.0)
    with pytest.raises(ConfigError, match=r"no.csv does not exist"):
        await missing.held_out(5)


async def test_sources_given_in_python_come_before_everything() -> None:
    tasks = JobTasks(
        Environment,
        EnvironmentConfig(name="x"),
        timeout_s=10.0,
        sources={"train": ListTasks([7]), "held_out": ListTasks([8, 9])},
    )
    assert (await tasks.draw(0, 3, 2), await tasks.held_out(1)) == ([7, 7], [8])


async def test_an_environment_that_cannot_make_tasks_is_named() -> None:
    class Broken(Environment):
        @classmethod
        def make_task(cls, seed: int) -> None:
            raise KeyError("words.txt")

        @classmethod
        def held_out_tasks(cls) -> list[int]:
            raise KeyError("words.txt")

    with pytest.raises(EnvironmentLoadError, match=r"Broken.make_task raised KeyError: 'words.txt'"):
        await tasks_of(Broken).draw(0, 0, 1)
    with pytest.raises(EnvironmentLoadError, match=r"Broken.held_out_tasks raised KeyError"):
        await tasks_of(Broken).held_out(3)


async def test_an_environment_that_makes_tasks_for_ever_is_named_and_stalls_nobody() -> None:
    class Endless(Environment):
        @classmethod
        def make_task(cls, seed: int) -> None:
            time.sleep(60.0)

        @classmethod
        def held_out_tasks(cls) -> Iterator[int]:  # type: ignore[override]
            return count()

    drawing = asyncio.create_task(tasks_of(Endless, 0.2).draw(0, 0, 1))
    ticks = 0
    while not drawing.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks > 5
    with pytest.raises(EnvironmentLoadError, match=r"Endless.make_task did not return within 0.2 s"):
        drawing.result()
    assert await tasks_of(Endless).held_out(3) == [0, 1, 2]
