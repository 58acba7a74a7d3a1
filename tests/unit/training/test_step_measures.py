"""What a step's row says of the policy whatever the loss asks for: its entropy, its distance from the reference, its speed."""

from typing import Any

import numpy as np
import pytest

from opentinker.training.rl import RLLoop


async def rows_of(policy: Any, environment: Any, config: Any, recorder: Any, steps: int) -> list[dict[str, Any]]:
    loop = await RLLoop.connect(config, environment, policy, recorder)
    return [await loop.step() for _ in range(steps)]


async def test_the_entropy_of_what_was_sampled_is_in_every_row_and_falls_as_the_policy_makes_up_its_mind(
    policy, seven, make_config, recorder
) -> None:
    first, *_, last = await rows_of(policy, seven, make_config(), recorder, 12)
    # Any of ten digits, and the certain end of the turn.
    assert first["entropy_estimate"] == pytest.approx(np.log(10) / 2)
    assert first["entropy_mean"] is None, "the whole distribution's is computed where it has a bonus"
    assert 0 <= last["entropy_estimate"] < first["entropy_estimate"] / 2
    logprobs = policy.logprobs()
    entropy = -float(np.exp(logprobs) @ logprobs) / 2
    assert last["entropy_estimate"] == pytest.approx(entropy, abs=0.35), "of 64 samples"


@pytest.mark.parametrize(
    "kl", [{"measure": True}, {"coefficient": 1e-6, "place": "reward", "estimator": "k1"}], ids=["measured", "in the reward"]
)
async def test_the_distance_from_the_reference_is_measured_without_a_term_in_the_loss(
    policy, seven, make_config, recorder, kl: dict[str, Any]
) -> None:
    config = make_config(algorithm={"group_size": 8, "kl": kl})
    first, second = await rows_of(policy, seven, config, recorder, 2)
    assert all(loss.kl_coefficient == 0.0 for loss in policy.losses)
    assert first["reference_kl_mean"] == pytest.approx(0.0, abs=1e-6), "it is the reference"
    data = policy.batches[1][0]
    moved = [d.arrays["behaviour_logprobs"] - d.arrays["reference_logprobs"] for d in data]
    estimates = np.concatenate([(np.exp(-m) - 1 + m)[d.weights != 0] for m, d in zip(moved, data, strict=True)])
    assert second["reference_kl_mean"] == pytest.approx(float(estimates.mean()), rel=1e-4)
    assert second["reference_kl_mean"] > 0


async def test_without_being_asked_nothing_is_computed_by_the_reference(policy, seven, make_config, recorder) -> None:
    [row] = await rows_of(policy, seven, make_config(), recorder, 1)
    assert row["reference_kl_mean"] is None
    assert not any(call.startswith("forward") for call in policy.calls)


async def test_a_measured_distance_can_end_the_run(policy, seven, make_config, recorder) -> None:
    config = make_config(
        algorithm={"group_size": 8, "kl": {"measure": True}},
        training={"stop": {"max_reference_kl": 0.05}, "optimizer": {"learning_rate": 2.0}},
    )
    loop = await RLLoop.connect(config, seven, policy, recorder)
    await loop.run(20)
    assert "reference_kl_mean is" in loop.stopped
    assert loop.steps_done < 20


async def test_tokens_are_counted_as_often_as_they_are_trained_on(policy, seven, make_config, recorder) -> None:
    config = make_config(algorithm={"group_size": 8, "epochs": 3, "minibatches": 2})
    [row] = await rows_of(policy, seven, config, recorder, 1)
    assert row["tokens_trained_per_s"] * row["train_s"] == pytest.approx(3 * row["tokens_trained"])
    assert row["tokens_per_s"] * row["rollout_s"] == pytest.approx(row["tokens_sampled"])
