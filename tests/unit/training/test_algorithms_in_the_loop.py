"""What an algorithm asks for reaches the server: forward passes before the update, another loss, more tasks."""

from typing import Any

import numpy as np
import pytest

from opentinker.env.environment import StepResult
from opentinker.errors import ConfigError
from opentinker.training.recorder import Recorder
from opentinker.training.rl import RLLoop


async def step(policy: Any, environment: Any, config: Any, recorder: Recorder) -> dict[str, Any]:
    return await (await RLLoop.connect(config, environment, policy, recorder)).step()


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "dr_grpo"},
        {"kind": "rloo"},
        {"kind": "reinforce_pp", "group_size": 8},
        {"kind": "dapo", "group_size": 8},
        {"kind": "gspo"},
        {"kind": "cispo"},
        {"kind": "grpo", "credit": "turn", "aggregation": "sequence_mean"},
    ],
    ids=lambda a: a["kind"],
)
async def test_every_algorithm_learns_which_digit_it_is(
    policy, seven, make_config, recorder, algorithm: dict[str, Any]
) -> None:
    rates = {"dr_grpo": 40.0, "rloo": 8.0}
    training = {"optimizer": {"learning_rate": rates.get(algorithm["kind"], 2.0)}}
    loop = await RLLoop.connect(make_config(algorithm=algorithm, training=training), seven, policy, recorder)
    await loop.run(15)
    assert np.argmax(policy.logits) == 7
    assert np.exp(policy.logprobs()[7]) > 0.6


async def test_a_reversed_reward_makes_the_score_fall(policy, seven, make_config, recorder) -> None:
    class Anything(seven):
        def step(self, action: Any) -> StepResult:
            result = super().step(action)
            return StepResult(reward=-result.reward, done=True, metrics=result.metrics)

    loop = await RLLoop.connect(make_config(), Anything, policy, recorder)
    await loop.run(15)
    assert np.exp(policy.logprobs()[7]) < 0.02
    scores = [row["exact"] for row in recorder.rows if row["kind"] == "step"]
    assert np.mean(scores[-5:]) < np.mean(scores[:5]) / 2


async def test_no_forward_pass_is_made_that_no_algorithm_asked_for(policy, seven, make_config, recorder) -> None:
    await step(policy, seven, make_config(), recorder)
    assert not any(call.startswith("forward") for call in policy.calls)


async def test_a_kl_term_brings_the_reference_and_its_loss(policy, seven, make_config, recorder) -> None:
    config = make_config(algorithm={"group_size": 8, "kl": {"coefficient": 0.1, "estimator": "k2"}})
    await step(policy, seven, config, recorder)
    assert "forward reference_logprobs" in policy.calls
    assert all("reference_logprobs" in datum.arrays for datum in policy.batches[0][0])
    assert (policy.losses[0].kl_coefficient, policy.losses[0].kl_estimator) == (0.1, "k2")


async def test_a_kl_price_in_the_reward_needs_no_term_in_the_loss(policy, seven, make_config, recorder) -> None:
    policy.logits[7] = 3.0
    config = make_config(algorithm={"group_size": 8, "kl": {"coefficient": 5.0, "estimator": "k1", "place": "reward"}})
    await step(policy, seven, config, recorder)
    assert policy.losses[0].kl_coefficient == 0.0
    said_seven = [d for d in policy.batches[0][0] if policy.digits[7] in d.targets]
    assert all(d.arrays["advantages"].max() <= 0 for d in said_seven), "the right digit costs more than it earns"


async def test_the_trainers_own_logprobs_are_computed_only_where_a_batch_is_trained_on_twice(
    policy, seven, make_config, recorder
) -> None:
    once = make_config(algorithm={"group_size": 8, "mismatch": {"truncate": 2.0}})
    await step(policy, seven, once, recorder)
    assert policy.losses[0].anchor == "current"
    assert not any(call.startswith("forward") for call in policy.calls)
    twice = make_config(algorithm={"group_size": 8, "epochs": 2, "mismatch": {"truncate": 2.0}})
    loop = await RLLoop.connect(twice, seven, policy, recorder)
    await loop.step()
    assert policy.losses[1].anchor == "proximal"
    assert "forward logprobs" in policy.calls
    assert all("proximal_logprobs" in datum.arrays for datum in policy.batches[1][0])


async def test_the_trainers_own_logprobs_are_computed_in_the_passes_that_train(policy, seven, make_config, recorder) -> None:
    asked: list[list[Any]] = []
    forward = policy.forward

    async def listening(data: Any, **kwargs: Any) -> Any:
        asked.append([datum.targets.tolist() for datum in data])
        return await forward(data, **kwargs)

    policy.forward = listening
    config = make_config(algorithm={"group_size": 8, "minibatches": 2, "epochs": 2, "mismatch": {"truncate": 2.0}})
    await step(policy, seven, config, recorder)
    data, minibatches = policy.batches[0]
    assert len(minibatches) == 4
    assert asked == [[data[i].targets.tolist() for i in minibatch.indices] for minibatch in minibatches[:2]]


async def test_groups_that_teach_nothing_are_drawn_anew_and_a_resumed_run_goes_on_behind_them(
    policy, seven, make_config, recorder, tmp_path
) -> None:
    class Half(seven):
        """Every other task gives everybody the same."""

        def reset(self, task: Any) -> str:
            self.flat = task["seed"] % 2
            return super().reset(task)

        def step(self, action: Any) -> StepResult:
            return StepResult(0.5, done=True) if self.flat else super().step(action)

    config = make_config(algorithm={"kind": "dapo", "group_size": 8, "max_resamples": 20})
    loop = await RLLoop.connect(config, Half, policy, recorder)
    row = await loop.step()
    assert row["groups"] > 8
    assert row["task_position"] == row["groups"]
    assert row["groups"] - row["zero_variance_groups"] >= 8
    second = await loop.step()
    assert second["task_position"] == row["groups"] + second["groups"]

    policy.saved["step-000002"] = policy.logits.copy()
    resumed = Recorder(recorder.folder, config.model_dump(mode="json"), resume_at=2)
    again = await RLLoop.connect(config, Half, policy, resumed)
    await again.resume(2)
    assert (await again.step())["task_position"] > second["task_position"]


async def test_a_group_that_differs_in_length_alone_teaches_where_length_has_a_price(
    policy, seven, make_config, recorder
) -> None:
    class Flat(seven):
        def step(self, action: Any) -> StepResult:
            return StepResult(0.5, done=True)

    overlong = {"limit_tokens": 2, "buffer_tokens": 1}
    algorithm = {"kind": "dapo", "group_size": 4, "max_resamples": 2, "overlong": overlong, "credit": "turn"}
    row = await step(policy, Flat, make_config(algorithm=algorithm), recorder)
    assert row["groups"] == 24, "every answer has the same length here, so nothing teaches"


async def test_a_run_that_stopped_early_stays_stopped_when_it_is_resumed(policy, seven, make_config, recorder) -> None:
    config = make_config(
        evaluation={"every": 1, "metric": "reward"}, training={"stop": {"plateau": 1}, "optimizer": {"learning_rate": 0.0}}
    )
    loop = await RLLoop.connect(config, seven, policy, recorder)
    await loop.run(9)
    done = loop.steps_done
    assert loop.stopped
    policy.saved[f"step-{done:06d}"] = policy.logits.copy()
    resumed = Recorder(recorder.folder, config.model_dump(mode="json"), resume_at=done)
    again = await RLLoop.connect(config, seven, policy, resumed)
    await again.resume(done)
    await again.run(9 - done)
    assert again.steps_done == done


async def test_an_evaluation_that_a_crash_cut_off_is_made_up_for(policy, seven, make_config, recorder) -> None:
    config = make_config(evaluation={"every": 2, "at_start": False, "at_end": False})
    loop = await RLLoop.connect(config, seven, policy, recorder)
    await loop.step()
    await loop.step()  # the process dies before the evaluation
    policy.saved["step-000002"] = policy.logits.copy()
    resumed = Recorder(recorder.folder, config.model_dump(mode="json"), resume_at=2)
    again = await RLLoop.connect(config, seven, policy, resumed)
    await again.resume(2)
    await again.run(2)
    assert [r["step"] for r in resumed.rows if r["kind"] == "evaluation"] == [2, 4]


async def test_resampling_ends(policy, seven, make_config, recorder) -> None:
    class Flat(seven):
        def step(self, action: Any) -> StepResult:
            return StepResult(0.5, done=True)

    config = make_config(algorithm={"kind": "dapo", "group_size": 2, "max_resamples": 2})
    row = await step(policy, Flat, config, recorder)
    assert (row["groups"], row["tokens_trained"]) == (24, 0)


async def test_advantages_can_be_a_function_in_python(policy, seven, make_config, recorder) -> None:
    given = []

    def mine(groups: Any) -> Any:
        given.append([len(g) for g in groups])
        return [[np.ones_like(e) for e in g] for g in groups]

    loop = await RLLoop.connect(make_config(), seven, policy, recorder, advantages=mine)
    await loop.step()
    assert given == [[8] * 8]
    assert all(d.arrays["advantages"].max() == 1 for d in policy.batches[0][0])


def test_configs_that_cannot_work_are_refused(make_config) -> None:
    from opentinker.config.job import parse_job

    base = make_config().model_dump(mode="json")
    for algorithm, says in [
        ({"kind": "dpoo"}, "algorithm.kind: there is no 'dpoo'.*did you mean 'dapo'"),
        ({"kind": "rloo", "group_size": 1}, "algorithm.group_size: .*greater than or equal to 2"),
        ({"kind": "gspo", "loss": "ppo"}, "algorithm.loss"),
        ({"kl": {"coefficient": 1, "estimator": "k1"}}, "k1 in the loss has no gradient on average"),
        ({"kl": {"coeficient": 1}}, "unknown key 'algorithm.kl.coeficient'.*did you mean 'coefficient'"),
        ({"kind": "reinforce_pp", "max_resamples": 1}, "group_size must be 2 or more"),
        ({"kind": "reinforce_pp", "max_resamples": 1, "group_size": 4}, "which teach here: the baseline is the batch's"),
        ({"mismatch": {"mask_sequences": [2, 1]}}, "low < high"),
        ({"overlong": {"limit_tokens": 10, "buffer_tokens": 20}}, "longer than limit_tokens"),
    ]:
        with pytest.raises(ConfigError, match=says):
            parse_job({**base, "algorithm": algorithm})
