from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.rollout.types import Episode, Group, Termination
from opentinker.training.evaluation import bootstrap, pass_at_k, summarize_groups


def episode(reward: float, termination: Termination = Termination.DONE, **metrics: float) -> Episode:
    return Episode("task", 0, termination, rewards=[reward], metrics=metrics)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_the_interval_lies_within_the_range_of_the_values(values: list[float]) -> None:
    estimate = bootstrap(values, resamples=200)
    assert estimate.mean == pytest.approx(np.mean(values))
    assert 0 <= estimate.half_width <= (max(values) - min(values)) / 2 + 1e-12


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for i in range(300):
        estimate = bootstrap(rng.normal(0.5, 0.2, 40), seed=i, resamples=400)
        covered += abs(estimate.mean - 0.5) <= estimate.half_width
    assert 0.90 <= covered / 300 <= 0.98


def test_the_interval_is_close_to_the_normal_one_for_many_tasks() -> None:
    values = np.random.default_rng(1).normal(0.0, 1.0, 400)
    assert bootstrap(values).half_width == pytest.approx(1.96 * values.std() / 20, rel=0.05)


def test_the_interval_repeats_from_its_seed() -> None:
    values = [0.0, 1.0, 0.5, 0.25]
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)


def test_tasks_are_the_unit_so_that_more_samples_of_a_task_do_not_narrow_the_interval() -> None:
    few = [Group("a", 0, [episode(0.0)]), Group("b", 1, [episode(1.0)])]
    many = [Group("a", 0, [episode(0.0)] * 50), Group("b", 1, [episode(1.0)] * 50)]
    a, b = summarize_groups(few), summarize_groups(many)
    assert a is not None
    assert b is not None
    assert a.reward == b.reward


def test_failed_episodes_are_counted_and_not_averaged() -> None:
    failure = episode(0.0, Termination.ERROR_ENV)
    result = summarize_groups([Group("a", 0, [episode(1.0, exact=1.0)], failures=[failure]), Group("b", 1, failures=[failure])])
    assert result is not None
    assert (result.reward.mean, result.tasks, result.episodes, result.errors) == (1.0, 1, 1, 2)


def test_an_episode_cut_before_its_answer_is_not_exact() -> None:
    cut = episode(0.0, Termination.TRUNCATED_TURNS)
    result = summarize_groups([Group("a", 0, [episode(1.0, exact=1.0, guesses=4.0), cut])])
    assert result is not None
    assert result.metrics["exact"].mean == 0.5
    assert result.metrics["guesses"].mean == 4.0


def test_nothing_usable_gives_no_estimate() -> None:
    assert summarize_groups([Group("a", 0, failures=[episode(0.0, Termination.ERROR_ENV)])]) is None
    with pytest.raises(ValueError, match="at least one task"):
        bootstrap([])


@given(samples=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_correct_one(samples: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    choices = list(combinations([i < correct for i in range(samples)], k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_counts_tasks_with_enough_samples_and_needs_whole_success() -> None:
    groups = [
        Group("a", 0, [episode(0.0, exact=1.0), episode(0.0, exact=0.0)]),
        Group("b", 1, [episode(1.0), episode(0.99)]),
        Group("c", 2, [episode(0.5)]),
    ]
    result = summarize_groups(groups, pass_at=(1, 2, 3))
    assert result is not None
    assert {k: e.mean for k, e in result.pass_at.items()} == {1: pytest.approx(1 / 3), 2: 1.0}
    with pytest.raises(ValueError, match="at least 3 samples"):
        pass_at_k(2, 1, 3)
