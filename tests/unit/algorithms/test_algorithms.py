"""Every algorithm against float64 numpy written from its formula, and what holds for all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.algorithms.credit import returns_to_go
from opentinker.algorithms.overlong import overlong_penalty
from opentinker.algorithms.rloo import leave_one_out
from opentinker.algorithms.select import advantage_function, user_advantages
from opentinker.config.algorithms import (
    CISPOConfig,
    CustomConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    OverlongConfig,
    PolicyGradient,
    ReinforcePPConfig,
    RLOOConfig,
)
from opentinker.errors import ConfigError, EnvironmentLoadError

Rewards = list[list[list[float]]]
rewards = st.lists(
    st.lists(st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=4), min_size=1, max_size=5), min_size=1, max_size=4
)
ALL: list[PolicyGradient] = [
    GRPOConfig(),
    GRPOConfig(normalize_std=False),
    DrGRPOConfig(),
    RLOOConfig(),
    ReinforcePPConfig(),
    ReinforcePPConfig(group_size=4, group_baseline=True),
    DAPOConfig(),
    GSPOConfig(),
    CISPOConfig(),
]


def arrays(values: Rewards) -> list[list[Any]]:
    return [[np.array(episode, np.float32) for episode in group] for group in values]


def run(config: Any, values: Rewards) -> list[list[np.ndarray]]:
    return advantage_function(config)(arrays(values))


@pytest.mark.parametrize("config", ALL, ids=lambda c: f"{c.kind}-{c.credit}")
@given(values=rewards)
def test_advantages_have_the_shape_of_the_rewards_and_one_value_per_episode(config: Any, values: Rewards) -> None:
    for group, scores in zip(values, run(config, values), strict=True):
        assert [len(s) for s in scores] == [len(e) for e in group]
        assert all(np.ptp(s) == 0 and s.dtype == np.float32 for s in scores)


@pytest.mark.parametrize("config", [c.model_copy(update={"credit": "turn"}) for c in ALL], ids=lambda c: c.kind)
@given(values=rewards)
def test_credit_by_turn_is_credit_by_episode_where_episodes_have_one_turn(config: Any, values: Rewards) -> None:
    single = [[[sum(episode)] for episode in group] for group in values]
    whole = run(config.model_copy(update={"credit": "episode"}), single)
    for a, b in zip(run(config, single), whole, strict=True):
        np.testing.assert_array_equal(np.concatenate(a), np.concatenate(b))


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.kind)
@given(values=rewards, shift=st.integers(-50, 50))
def test_a_constant_added_to_every_reward_changes_nothing(config: Any, values: Rewards, shift: int) -> None:
    single = [[[sum(episode)] for episode in group] for group in values]
    moved = [[[r + shift for r in episode] for episode in group] for group in single]
    for a, b in zip(run(config, single), run(config, moved), strict=True):
        np.testing.assert_allclose(np.concatenate(a), np.concatenate(b), atol=1e-4)


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.kind)
def test_equal_rewards_say_nothing(config: Any) -> None:
    assert not any(s.any() for g in run(config, [[[0.3]] * 4, [[0.3]] * 3]) for s in g)


@given(values=rewards)
def test_formulas(values: Rewards) -> None:
    totals = [np.array([sum(e) for e in group]) for group in values]
    for total, grpo, dr, rloo in zip(
        totals, run(GRPOConfig(), values), run(DrGRPOConfig(), values), run(RLOOConfig(), values), strict=True
    ):
        centred = total - total.mean()
        np.testing.assert_allclose([s[0] for s in dr], centred, atol=1e-6)
        np.testing.assert_allclose([s[0] for s in grpo], centred / (total.std() + 1e-6), atol=1e-5)
        others = [(total.sum() - r) / (len(total) - 1) if len(total) > 1 else r for r in total]
        np.testing.assert_allclose([s[0] for s in rloo], total - others, atol=1e-5)


@given(values=rewards)
def test_a_turn_of_rloo_is_compared_with_other_episodes_only(values: Rewards) -> None:
    config = RLOOConfig(credit="turn")
    for group, scores in zip(values, run(config, values), strict=True):
        returns = [np.asarray(returns_to_go(e)) for e in group]
        for i, score in enumerate(scores):
            others = [g for j, r in enumerate(returns) if j != i for g in r]
            flat = len(group) < 2 or np.ptp(np.concatenate(returns)) == 0
            expected = np.zeros(len(score)) if flat else returns[i] - np.mean(others)
            np.testing.assert_allclose(score, expected, atol=1e-5)


@given(values=rewards)
def test_reinforce_pp_is_normalised_over_the_batch(values: Rewards) -> None:
    single = [[[sum(episode)] for episode in group] for group in values]
    flat = np.array([e[0] for g in single for e in g])
    got = np.concatenate([np.concatenate(g) for g in run(ReinforcePPConfig(), single)])
    np.testing.assert_allclose(got, (flat - flat.mean()) / (flat.std() + 1e-6), atol=1e-4)
    centred = np.concatenate([np.array([e[0] for e in g]) - np.mean([e[0] for e in g]) for g in single])
    got = np.concatenate([np.concatenate(g) for g in run(ReinforcePPConfig(group_size=2, group_baseline=True), single)])
    np.testing.assert_allclose(got, (centred - centred.mean()) / (centred.std() + 1e-6), atol=1e-4)


@given(st.lists(st.floats(-10, 10), max_size=6), st.floats(0.1, 1.0))
def test_returns_are_discounted_sums_of_what_follows(earned: list[float], discount: float) -> None:
    expected = [sum(r * discount**k for k, r in enumerate(earned[t:])) for t in range(len(earned))]
    np.testing.assert_allclose(returns_to_go(earned, discount), expected, atol=1e-9)


def test_the_price_of_length_falls_over_the_buffer() -> None:
    config = OverlongConfig(limit_tokens=100, buffer_tokens=20, penalty=0.5)
    assert [overlong_penalty(n, config) for n in (0, 80, 90, 100, 500)] == [0, 0, -0.25, -0.5, -0.5]


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        leave_one_out([1.0, float("nan")])


def test_a_function_of_the_users_own_gives_the_advantages(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def best(groups):\n    return [[e * 2 for e in g] for g in groups]\n")
    config = CustomConfig(function="mine.py:best")
    [[first, second]] = advantage_function(config, tmp_path)(arrays([[[1.0, 2.0], [3.0]]]))
    assert (first.tolist(), second.tolist()) == ([2.0, 4.0], [6.0])
    with pytest.raises(EnvironmentLoadError, match="has no function 'worst'"):
        advantage_function(CustomConfig(function="mine.py:worst"), tmp_path)
    with pytest.raises(EnvironmentLoadError, match="names no function"):
        advantage_function(CustomConfig(function="mine"), tmp_path)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda groups: groups[:1], "gave 1 groups, expected 2"),
        (lambda groups: [g[:1] for g in groups], "group 0 has 1 episodes, expected 2"),
        (lambda groups: [[e[:1] for e in g] for g in groups], r"episode 0 of group 0 has shape \(1,\), its rewards \(2,\)"),
        (lambda groups: [[e * np.nan for e in g] for g in groups], "not finite"),
        (lambda groups: None, "gave NoneType groups"),
        (lambda groups: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_malformed_answer_of_such_a_function_is_explained(answer: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        user_advantages(answer, "mine.py:f")(arrays([[[1.0, 2.0], [3.0]], [[1.0]]]))
