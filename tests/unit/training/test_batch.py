"""Groups become data: who is trained on, with which advantages, weights and factors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.algorithms.select import advantage_function
from opentinker.client.messages import Sample
from opentinker.config.algorithms import GRPOConfig, KLConfig, OverlongConfig, PolicyGradient
from opentinker.rollout.trajectory import RunKind, Trajectory
from opentinker.rollout.types import Episode, Group, Termination
from opentinker.training.batch import Batch, Member, build_batch, members_of, turn_rewards


def episode(*rewards: float, tokens: int = 3, termination: Termination = Termination.DONE) -> Episode:
    """One action of `tokens` tokens per reward."""
    trajectory = Trajectory()
    trajectory.append_rendered(RunKind.PROMPT, [1, 2])
    for turn in range(len(rewards)):
        if tokens:
            ids = np.arange(tokens, dtype=np.int32)
            trajectory.append_sample(Sample(ids, np.full(tokens, -0.5, np.float32), "stop", ((0, tokens),)))
        if turn + 1 < len(rewards):
            trajectory.append_rendered(RunKind.OBSERVATION, [7])
    return Episode("task", 0, termination, [trajectory], rewards=list(rewards))


def batch_of(groups: list[Group], config: PolicyGradient | None = None, longest: int = 1) -> Batch:
    config = config or GRPOConfig()
    return build_batch(members_of(groups), advantage_function(config), config, longest_tokens=longest)  # type: ignore[arg-type]


def test_every_action_token_has_the_same_weight_in_a_minibatch() -> None:
    batch = batch_of([Group("a", 0, [episode(0.0, tokens=2), episode(1.0, tokens=8)])])
    [minibatch] = batch.minibatches
    assert minibatch.factor == pytest.approx(1 / 10)
    assert batch.action_tokens == 10


def test_advantages_belong_to_the_episode_and_only_to_its_actions() -> None:
    batch = batch_of([Group("a", 0, [episode(0.0), episode(1.0)])])
    low, high = (d.arrays["advantages"] for d in batch.data)
    np.testing.assert_allclose(low, [0, -1, -1, -1], atol=1e-5)
    np.testing.assert_allclose(high, -low)


def test_credit_by_turn_gives_each_action_what_it_and_later_ones_earned() -> None:
    config = GRPOConfig(credit="turn", discount=0.5, normalize_std=False)
    batch = batch_of([Group("a", 0, [episode(0.0, 1.0, tokens=2), episode(0.0, 0.0, tokens=2)])], config)
    # Returns 0.5, 1 and 0, 0; their mean is 0.375.
    np.testing.assert_allclose(batch.data[0].arrays["advantages"], [0, 0.125, 0.125, 0, 0.625, 0.625], atol=1e-6)
    np.testing.assert_allclose(batch.data[1].arrays["advantages"], [0, -0.375, -0.375, 0, -0.375, -0.375], atol=1e-6)


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
    batch = batch_of([group])
    assert len(batch.data) == 2
    np.testing.assert_allclose(batch.data[1].arrays["advantages"], [0, 1, 1, 1], atol=1e-5)


def test_groups_are_dealt_over_the_minibatches_and_epochs_repeat_them() -> None:
    groups = [Group(i, i, [episode(0.0), episode(1.0)]) for i in range(5)]
    batch = batch_of(groups, GRPOConfig(minibatches=2, epochs=3))
    assert [m.indices for m in batch.minibatches] == [(0, 1, 4, 5, 8, 9), (2, 3, 6, 7)] * 3


def test_fewer_groups_than_minibatches_leave_no_empty_minibatch() -> None:
    batch = batch_of([Group("a", 0, [episode(0.0), episode(1.0)])], GRPOConfig(minibatches=4))
    assert len(batch.minibatches) == 1


FLAT = [Group("a", 0, [episode(1.0), episode(1.0)]), Group("b", 1, [episode(0.5)]), Group("c", 2, [])]


def test_groups_without_variance_are_left_out_and_counted() -> None:
    batch = batch_of(FLAT)
    assert (batch.data, batch.minibatches, batch.zero_variance_groups) == ([], [], 2)


@pytest.mark.parametrize("config", [GRPOConfig(entropy_coefficient=0.1), GRPOConfig(kl=KLConfig(coefficient=0.1))])
def test_they_stay_where_another_term_has_a_gradient_for_them(config: GRPOConfig) -> None:
    batch = batch_of(FLAT, config)
    assert (len(batch.data), batch.zero_variance_groups) == (3, 2)


@given(lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5), parts=st.integers(1, 3))
def test_aggregations_are_what_they_are_called(lengths: list[tuple[int, int]], parts: int) -> None:
    groups = [Group(i, i, [episode(0.0, tokens=a), episode(1.0, tokens=b)]) for i, (a, b) in enumerate(lengths)]

    def totals(config: GRPOConfig) -> list[list[float]]:
        """The coefficient of each datum's summed token losses, times its tokens."""
        batch = batch_of(groups, config.model_copy(update={"minibatches": parts}), longest=10)
        return [[float(m.factor * batch.data[i].weights.sum()) for i in m.indices] for m in batch.minibatches]

    for shares in totals(GRPOConfig(aggregation="token_mean")):
        assert sum(shares) == pytest.approx(1)
    for shares in totals(GRPOConfig(aggregation="sequence_mean")):
        assert shares == pytest.approx([1 / len(shares)] * len(shares))
    for number, shares in enumerate(totals(GRPOConfig(aggregation="constant"))):
        tokens = [n for pair in lengths[number::parts] for n in pair]
        assert shares == pytest.approx([n / (10 * len(tokens)) for n in tokens])
    assert totals(GRPOConfig(aggregation="constant", constant_tokens=5))[0][0] == pytest.approx(
        2 * totals(GRPOConfig(aggregation="constant"))[0][0]
    )


def member(*rewards: float, reference: float = -0.5) -> Member:
    [[found]] = members_of([Group("a", 0, [episode(*rewards)])])
    arrays = {**found.data[0].arrays, "reference_logprobs": np.full(len(found.data[0]), reference, np.float32)}
    return Member(found.episode, (type(found.data[0])(found.data[0].chunks, found.data[0].targets, arrays),))


def test_length_is_paid_for_by_the_last_turn() -> None:
    config = GRPOConfig(overlong=OverlongConfig(limit_tokens=8, buffer_tokens=4, penalty=2.0))
    np.testing.assert_allclose(turn_rewards(member(1.0, 1.0), config), [1.0, 1.0 - 2.0 * 2 / 4])


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.25), ("k2", 0.03125), ("k3", np.exp(-0.25) - 1 + 0.25)])
def test_distance_from_the_reference_is_paid_for_by_its_turn(estimator: str, expected: float) -> None:
    config = GRPOConfig(kl=KLConfig(coefficient=2.0, estimator=estimator, place="reward"))  # type: ignore[arg-type]
    paid = turn_rewards(member(1.0, 0.0, reference=-0.75), config)
    np.testing.assert_allclose(paid, np.array([1.0, 0.0]) - 2.0 * 3 * expected, rtol=1e-6)
