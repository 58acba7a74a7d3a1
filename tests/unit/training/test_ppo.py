"""A step of PPO: rewards fall on tokens, values and returns reach the server, the critic is trained beside the policy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opentinker.algorithms.gae import gae
from opentinker.client.messages import AdamParams, Sample
from opentinker.config.algorithms import CriticConfig, KLConfig, OverlongConfig, PPOConfig
from opentinker.config.job import parse_job
from opentinker.config.server import LoraConfig
from opentinker.errors import ConfigError
from opentinker.rollout.trajectory import RunKind, Trajectory
from opentinker.rollout.types import Episode, Group, Termination
from opentinker.training.batch import Member, build_batch, members_of
from opentinker.training.ppo import critic_metrics, critic_step, token_advantages, token_rewards
from opentinker.training.rl import RLLoop

PLAIN = PPOConfig(whiten=False)


def member(
    *turns: tuple[float, int],
    termination: Termination = Termination.DONE,
    split: bool = False,
    values: list[float] | None = None,
) -> Member:
    """An episode of (reward, tokens) per turn, with an observation of two tokens between turns; with `split` each turn is a
    datum of its own. `values` are those of its sampled tokens."""
    trajectories = [Trajectory()]
    trajectories[0].append_rendered(RunKind.PROMPT, [1, 2])
    for number, (_, tokens) in enumerate(turns):
        if number and split:
            trajectories.append(Trajectory())
            trajectories[-1].append_rendered(RunKind.PROMPT, [1, 2, 7, 7])
        elif number:
            trajectories[-1].append_rendered(RunKind.OBSERVATION, [7, 7])
        ids = np.arange(10, 10 + tokens, dtype=np.int32)
        trajectories[-1].append_sample(Sample(ids, np.full(tokens, -0.5, np.float32), "stop", ((0, tokens),)))
    episode = Episode("task", 0, termination, trajectories, rewards=[reward for reward, _ in turns])
    [[found]] = members_of([Group("task", 0, [episode])])
    said = iter(values or np.linspace(0.1, 0.9, found.tokens))
    data = []
    for datum in found.data:
        old = np.array([next(said) if w else 99.0 for w in datum.weights], np.float32)  # what is not sampled must not count
        data.append(replace(datum, arrays={**datum.arrays, "old_values": old}))
    return Member(found.episode, tuple(data))


def array(found: Member, name: str) -> np.ndarray:
    """Of the sampled tokens."""
    return np.concatenate([datum.arrays[name][datum.weights != 0] for datum in found.data])


@pytest.mark.parametrize("split", [False, True])
def test_a_turns_reward_falls_on_its_last_token_and_observations_are_not_there(split: bool) -> None:
    found = member((0.5, 2), (1.0, 3), split=split)
    assert token_rewards(found, PLAIN).tolist() == [0, 0.5, 0, 0, 1.0]
    config = PPOConfig(whiten=False, discount=0.9, gae_lambda=0.8)
    [[judged]] = token_advantages([[found]], config)
    advantages, returns = gae([0, 0.5, 0, 0, 1.0], array(found, "old_values"), discount=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(array(judged, "advantages"), advantages, rtol=1e-6)
    np.testing.assert_allclose(array(judged, "returns"), returns, rtol=1e-6)
    for datum in judged.data:
        assert not any(datum.arrays[name][datum.weights == 0].any() for name in ("advantages", "returns"))


@pytest.mark.parametrize("termination", [Termination.DONE, Termination.TRUNCATED_TURNS, Termination.TRUNCATED_CONTEXT])
def test_an_episode_that_was_cut_off_earns_what_it_had_earned_and_no_more(termination: Termination) -> None:
    [[judged]] = token_advantages([[member((0.5, 2), (0.0, 1), termination=termination)]], PLAIN)
    np.testing.assert_allclose(array(judged, "returns"), [0.5, 0.5, 0.0], atol=1e-6)


def test_a_turn_that_the_environment_never_answered_earned_nothing() -> None:
    found = member((0.5, 2), (1.0, 2))
    found.episode.rewards.pop()
    assert token_rewards(found, PLAIN).tolist() == [0, 0.5, 0, 0]


def test_prices_fall_on_the_tokens_that_caused_them() -> None:
    found = member((1.0, 2), (0.0, 2))
    assert token_rewards(found, PPOConfig(overlong=OverlongConfig(limit_tokens=4, buffer_tokens=4))).tolist() == [0, 1, 0, -1]
    reference = [d.weights * np.linspace(-1, -2, len(d)).astype(np.float32) for d in found.data]
    data = tuple(replace(d, arrays={**d.arrays, "reference_logprobs": r}) for d, r in zip(found.data, reference, strict=True))
    priced = token_rewards(replace(found, data=data), PPOConfig(kl=KLConfig(coefficient=2.0, estimator="k1", place="reward")))
    expected = np.array([0, 1, 0, 0]) - 2.0 * (-0.5 - array(replace(found, data=data), "reference_logprobs"))
    np.testing.assert_allclose(priced, expected, rtol=1e-6)


def test_advantages_are_whitened_over_the_tokens_of_the_batch_and_returns_are_not() -> None:
    groups = [[member((1.0, 2))], [member((0.0, 3)), member((2.0, 1))]]
    plain, white = token_advantages(groups, PLAIN), token_advantages(groups, PPOConfig())
    assert [len(group) for group in white] == [1, 2]
    every = np.concatenate([array(m, "advantages") for group in white for m in group])
    assert (every.mean(), every.std(ddof=1)) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-4))
    for one, other in zip(plain, white, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(array(a, "returns"), array(b, "returns"))


def test_every_episode_is_trained_on_also_where_nothing_surprised_the_critic() -> None:
    groups = token_advantages([[member((1.0, 2), values=[1.0, 1.0])], [member((0.0, 1))]], PLAIN)
    batch = build_batch(groups, None, PPOConfig(minibatches=2, epochs=2, aggregation="sequence_mean"))
    assert (len(batch.data), batch.zero_variance_groups, batch.action_tokens) == (2, 0, 3)
    assert [m.indices for m in batch.minibatches] == [(0,), (1,)] * 2
    assert not batch.data[0].arrays["advantages"].any()
    np.testing.assert_allclose(batch.data[0].arrays["returns"], [0, 1, 1])
    np.testing.assert_allclose(batch.data[0].weights, [0, 0.5, 0.5])


def test_the_critic_learns_at_its_own_rate_and_alone_at_first() -> None:
    config = PPOConfig(critic=CriticConfig(learning_rate=3e-4, value_clip=None, warmup_steps=2))
    optimizer = AdamParams(learning_rate=1e-6, weight_decay=0.1)
    steps = [critic_step(config, optimizer, number, 3) for number in (1, 2, 3)]
    assert [s.alone for s in steps if s] == [True, True, False]
    assert steps[0] is not None
    assert (steps[0].optimizer, steps[0].value_clip) == (AdamParams(learning_rate=3e-4, weight_decay=0.1), None)


def test_the_critics_rate_may_fall_to_0_over_the_job_and_stays_there() -> None:
    config = PPOConfig(critic=CriticConfig(learning_rate=4e-4, decay="linear"))
    steps = [critic_step(config, AdamParams(learning_rate=1e-6), number, 4) for number in range(1, 7)]
    assert [s.optimizer.learning_rate for s in steps if s] == pytest.approx([4e-4, 3e-4, 2e-4, 1e-4, 0.0, 0.0])


def test_the_critics_numbers_are_of_the_values_before_the_update() -> None:
    [[judged]] = token_advantages([[member((1.0, 2), (1.0, 2), values=[2.0, 2.0, 0.5, 0.5])]], PLAIN)
    report = {"loss": 0.2, "grad_norm": 3.0, "metrics": {"tokens": 4.0, "value_clipped_sum": 1.0}}
    row = critic_metrics(judged.data, {"minibatches": [{"critic": report}, {"critic": {**report, "loss": 0.4}}]})
    # Returns 2, 2, 1, 1: the critic is wrong by 0.5 on half of them.
    assert row == {
        "value_loss": pytest.approx(0.3),
        "explained_variance": pytest.approx(0.75),
        "value_clip_fraction": 0.25,
        "critic_grad_norm": 3.0,
    }
    assert set(critic_metrics(judged.data, {"minibatches": [{"loss": 1.0}]}).values()) == {None}
    assert set(critic_metrics([], None).values()) == {None}


async def test_ppo_learns_which_digit_it_is(policy, seven, make_config, recorder) -> None:
    config = make_config(
        algorithm={"kind": "ppo", "group_size": 8, "critic": {"warmup_steps": 2}},
        training={"optimizer": {"learning_rate": 2.0}},
    )
    loop = await RLLoop.connect(config, seven, policy, recorder)
    await loop.run(20)
    assert np.argmax(policy.logits) == 7
    assert np.exp(policy.logprobs()[7]) > 0.6
    assert [critic.alone for critic in policy.critics[:3]] == [True, True, False]
    rows = [row for row in recorder.rows if row["kind"] == "step"]
    assert [row["version"] for row in rows[:3]] == [0, 0, 1], "a step of the critic alone publishes nothing"
    assert (rows[0]["mismatch_kl_mean"], rows[0]["loss"], rows[0]["publish_s"]) == (None, None, 0.0)
    assert rows[2]["mismatch_kl_mean"] is not None
    assert all(row["value_loss"] is not None for row in rows)
    assert policy.value == pytest.approx(np.exp(policy.logprobs()[7]), abs=0.3), "it expects what is earned"


async def test_values_are_asked_for_with_the_references_and_the_trainers_own_logprobs_by_minibatch(
    policy, seven, make_config, recorder
) -> None:
    algorithm = {"kind": "ppo", "kl": {"coefficient": 0.1, "place": "reward"}, "epochs": 2, "mismatch": {"truncate": 2.0}}
    await (await RLLoop.connect(make_config(algorithm=algorithm), seven, policy, recorder)).step()
    calls = [call for call in policy.calls if call.startswith("forward")]
    assert calls == ["forward reference_logprobs values", "forward logprobs"]
    for datum in policy.batches[0][0]:
        assert {"returns", "old_values", "advantages", "proximal_logprobs"} <= datum.arrays.keys()


async def test_advantages_of_ones_own_are_refused_beside_a_critic(policy, seven, make_config, recorder) -> None:
    with pytest.raises(ConfigError, match="takes its advantages from a critic"):
        await RLLoop.connect(make_config(algorithm={"kind": "ppo"}), seven, policy, recorder, advantages=lambda groups: [])


def test_a_job_says_what_critic_its_policy_needs(make_config) -> None:
    base: dict[str, Any] = make_config().model_dump(mode="json")
    job = parse_job({**base, "algorithm": {"kind": "ppo", "critic": {"rank": 4, "alpha": 8}}})
    assert job.policy_critic == LoraConfig(rank=4, alpha=8)
    assert parse_job(base).policy_critic is None
    for algorithm, says in [
        ({"kind": "ppo", "max_resamples": 2}, "algorithm.max_resamples"),
        ({"kind": "ppo", "credit": "episode"}, "algorithm.credit"),
        ({"kind": "ppo", "gae_lambda": 1.5}, "algorithm.gae_lambda"),
        ({"kind": "ppo", "critic": {"learning_rte": 1}}, "did you mean 'learning_rate'"),
        ({"kind": "grpo", "gae_lambda": 0.9}, "unknown key 'algorithm.gae_lambda'"),
    ]:
        with pytest.raises(ConfigError, match=says):
            parse_job({**base, "algorithm": algorithm})
