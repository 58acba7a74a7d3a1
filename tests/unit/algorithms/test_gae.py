"""Advantages and returns from values: their definition, numbers of verl's and TRL's code, and the ends of episodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.algorithms.gae import explained_variance, gae, whitened

NUMBERS = st.floats(-10, 10, allow_nan=False, width=32)
EPISODES = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12)
SHARES = st.floats(0, 1, width=32)


def from_the_sum(rewards: np.ndarray, values: np.ndarray, discount: float, lam: float) -> np.ndarray:
    """Schulman et al. (2016), eq. 16, term by term: sum over l of (discount * lambda)^l * delta_{t+l}."""
    after = np.append(values[1:], 0.0)
    deltas = rewards + discount * after - values
    return np.array([sum((discount * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))])


@given(episode=EPISODES, discount=SHARES, lam=SHARES)
def test_an_advantage_is_its_sum_of_temporal_differences(
    episode: list[tuple[float, float]], discount: float, lam: float
) -> None:
    rewards, values = np.array(episode).T
    advantages, returns = gae(rewards, values, discount=discount, gae_lambda=lam)
    np.testing.assert_allclose(advantages, from_the_sum(rewards, values, discount, lam), atol=1e-9)
    np.testing.assert_allclose(returns, advantages + values, atol=1e-12)


@given(episode=EPISODES, discount=SHARES)
def test_with_lambda_one_no_value_bends_the_returns_and_with_lambda_zero_only_the_next_counts(
    episode: list[tuple[float, float]], discount: float
) -> None:
    rewards, values = np.array(episode).T
    _, returns = gae(rewards, values, discount=discount, gae_lambda=1.0)
    earned = [sum(discount ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
    np.testing.assert_allclose(returns, earned, atol=1e-9)
    _, one_step = gae(rewards, values, discount=discount, gae_lambda=0.0)
    np.testing.assert_allclose(one_step, rewards + discount * np.append(values[1:], 0.0), atol=1e-9)


@pytest.mark.parametrize(
    ("discount", "lam", "advantages", "white"),
    [
        (
            0.9,
            0.8,
            [0.18367716, 0.79677384, 0.46774144, -0.489248, 0.1816, -0.22, 1.5],
            [-0.245277, 0.682327, 0.184507, -1.2634, -0.248419, -0.856033, 1.746294],
        ),
        (
            1.0,
            0.95,
            [0.75666107, 1.21753797, 0.75530312, -0.1523125, 0.47125, 0.075, 1.5],
            [0.163628, 0.94779, 0.161318, -1.382949, -0.321986, -0.996187, 1.428386],
        ),
    ],
)
def test_the_numbers_are_verls(discount: float, lam: float, advantages: list[float], white: list[float]) -> None:
    # By the steps of its `compute_gae_advantage_return` and `masked_whiten` on an episode of two turns, of which the fourth and
    # fifth of nine tokens are an observation with values of 9; TRL's are the same without one.
    rewards, values = [0, 0, 0.5, 0, 0, -0.25, 1.0], [0.3, -0.1, 0.4, 0.8, 0.2, 0.6, -0.5]
    found, _ = gae(rewards, values, discount=discount, gae_lambda=lam)
    np.testing.assert_allclose(found, advantages, atol=1e-8)
    np.testing.assert_allclose(whitened([found])[0], white, atol=1e-6)


def test_a_perfect_critic_leaves_no_advantage() -> None:
    rewards = np.array([0.0, 0.5, 0.0, 1.0])
    advantages, returns = gae(rewards, [1.5, 1.5, 1.0, 1.0], discount=1.0, gae_lambda=0.95)
    np.testing.assert_allclose(advantages, np.zeros(4), atol=1e-12)
    np.testing.assert_allclose(returns, [1.5, 1.5, 1.0, 1.0])


@pytest.mark.parametrize("end", ["the episode is over", "the episode was cut off"])
def test_nothing_comes_after_the_last_token_however_the_episode_ended(end: str) -> None:
    [advantage], [ret] = gae([0.25], [3.0], discount=0.9, gae_lambda=0.9)
    assert (advantage, ret) == (-2.75, 0.25), end


@pytest.mark.parametrize(
    ("rewards", "values", "message"),
    [([1.0], [1.0, 2.0], "one entry for each token"), ([np.nan], [1.0], "finite"), ([1.0], [np.inf], "finite")],
)
def test_malformed_numbers_are_refused(rewards: list[float], values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gae(rewards, values, discount=1.0, gae_lambda=1.0)


def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_batch() -> None:
    rng = np.random.default_rng(0)
    batch = [rng.normal(3.0, 2.0, n) for n in (1, 5, 9)]
    every = np.concatenate(whitened(batch))
    assert [len(a) for a in whitened(batch)] == [1, 5, 9]
    assert every.mean() == pytest.approx(0.0, abs=1e-12)
    assert every.var(ddof=1) == pytest.approx(1.0, abs=1e-6)
    assert [a.tolist() for a in whitened([np.array([7.0])])] == [[0.0]]
    assert whitened([]) == []
    assert not np.concatenate(whitened([np.full(3, 2.0), np.full(2, 2.0)])).any()


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    returns = np.array([0.0, 1.0, 1.0, 0.5])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, returns + 3.0) == pytest.approx(1.0)
    assert explained_variance(returns, np.full(4, 0.7)) == pytest.approx(0.0)
    assert explained_variance(returns, -returns) == pytest.approx(-3.0)
    assert explained_variance(np.ones(4), returns) is None
    assert explained_variance([1.0], [0.0]) is None
