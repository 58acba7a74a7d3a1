"""GRPO's advantages against the formula in float64, and where they must be exactly zero."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.algorithms.grpo import group_advantages

rewards = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=16)


@given(rewards)
def test_advantages_are_the_papers_formula(values: list[float]) -> None:
    r = np.array(values, np.float64)
    for normalize in (True, False):
        expected = (r - np.mean(r)) / (np.sqrt(np.mean((r - np.mean(r)) ** 2)) + 1e-6 if normalize else 1.0)
        if len(set(values)) == 1:
            expected = np.zeros(len(r))
        got = group_advantages(values, normalize_std=normalize)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@given(rewards, st.floats(-10, 10))
def test_advantages_do_not_see_a_constant_added_to_all_rewards(values: list[float], shift: float) -> None:
    got = group_advantages(np.array(values) + shift, normalize_std=False)
    np.testing.assert_allclose(got, group_advantages(values, normalize_std=False), atol=1e-4)
    assert abs(float(got.sum())) < 1e-3


@pytest.mark.parametrize("values", [[0.1] * 7, [1.0], [], [0.3, 0.3, 0.3]])
def test_a_group_without_differences_gives_exact_zeros(values: list[float]) -> None:
    assert not group_advantages(values).any()
    assert len(group_advantages(values)) == len(values)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="must be finite"):
        group_advantages([0.0, float("nan")])
