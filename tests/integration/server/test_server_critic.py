"""A policy with a critic and a reward model behind a real front: what clients can ask of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from server_tools import FAST, LORA, PROMPT, REWARDED, datum, serving
from trainer_tools import without_effort

from opentinker.client.messages import AdamParams, CriticStep, LossConfig, Minibatch, SamplingParams
from opentinker.errors import ConflictError, InvalidRequestError

PPO = LossConfig(name="ppo")
ONE = [Minibatch(indices=(0,), factor=0.25)]
CRITIC = CriticStep(value_clip=10.0, optimizer=FAST)
TAUGHT = replace(
    datum(), arrays={**datum().arrays, "returns": datum().weights, "old_values": np.zeros(len(datum()), np.float32)}
)


async def test_a_train_step_trains_the_critic_beside_the_policy_or_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_dir, tmp_path, lora=LORA, policy={"critic": {"rank": 4}}) as server:
        client = server.client

        async def values() -> np.ndarray:
            return (await client.forward([datum()], compute=("values",)))["values"][0]

        assert not (await values()).any()
        before = await server.logprobs()
        answer = await client.train_step([TAUGHT], ONE * 5, PPO, FAST, critic=replace_alone(CRITIC), publish=False)
        assert [set(part) for part in answer["minibatches"]] == [{"critic"}] * 5
        assert answer["version"] == 0
        losses = [part["critic"]["loss"] for part in answer["minibatches"]]
        assert losses[0] == pytest.approx(0.5)
        assert losses == sorted(losses, reverse=True)
        np.testing.assert_array_equal(await server.logprobs(), before)
        learnt = await values()
        assert (learnt[-len(REWARDED) :] > 0).all()
        assert not learnt[: -len(REWARDED)].any()

        answer = await client.train_step([TAUGHT], ONE, PPO, FAST, critic=CRITIC)
        [part] = answer["minibatches"]
        assert {"loss", "metrics", "grad_norm", "critic"} == set(part)
        assert without_effort(part["critic"]["metrics"]).keys() == {
            "tokens",
            "loss_sum",
            "value_error_sum",
            "value_clipped_sum",
        }
        assert answer["version"] == 1
        assert (await server.logprobs() > before).all()

        saved, at_save = await client.save("judged"), await values()
        assert "critic.safetensors" in saved["manifest"]["files"]
        passed = await client.forward_backward([TAUGHT], LossConfig(name="value"))
        np.testing.assert_array_equal(passed["values"][0], at_save)
        assert (await client.optim_step(AdamParams(learning_rate=1e-2), critic=True))["grad_norm"] > 0
        assert not np.array_equal(await values(), at_save)
        await client.load("judged")
        np.testing.assert_array_equal(await values(), at_save)

        spoiled = [replace(TAUGHT, arrays={n: a for n, a in TAUGHT.arrays.items() if n != "returns"})]
        unfit = [replace(TAUGHT, arrays={**TAUGHT.arrays, "returns": np.full(len(TAUGHT), np.nan, np.float32)})]
        for data, message in [(spoiled, "no 'returns'"), (unfit, "returns holds NaN")]:
            with pytest.raises(InvalidRequestError, match=message):
                await client.train_step(data, ONE, PPO, FAST, critic=CRITIC)
        np.testing.assert_array_equal(await values(), at_save)


def replace_alone(step: CriticStep) -> CriticStep:
    return step.model_copy(update={"alone": True})


async def test_without_a_critic_nothing_is_trained_that_wants_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_dir, tmp_path) as server:
        before = await server.logprobs()
        with pytest.raises(InvalidRequestError, match="no scalar head for the loss 'value'"):
            await server.client.train_step([TAUGHT], ONE, PPO, FAST, critic=CRITIC)
        np.testing.assert_array_equal(await server.logprobs(), before)


async def test_a_reward_model_learns_and_scores_and_is_never_sampled(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_dir, tmp_path, lora=LORA, policy={"head": "scalar"}) as server:
        client, loss = server.client, LossConfig(name="value")
        sampled = (client.sample(PROMPT, SamplingParams(max_tokens=2)), client.publish())
        for call in (*sampled, client.train_step([TAUGHT], ONE, loss, FAST)):
            with pytest.raises(ConflictError, match="it scores, and cannot be published or sampled"):
                await call
        with pytest.raises(InvalidRequestError, match="no 'logprobs'"):
            await client.forward([datum()])
        answer = await client.train_step([TAUGHT], ONE * 5, loss, FAST, publish=False)
        assert answer["minibatches"][-1]["loss"] < answer["minibatches"][0]["loss"]
        scores = (await client.forward([datum()], compute=("values",)))["values"][0]
        await client.save("judge")
        await client.train_step([TAUGHT], ONE, loss, FAST, publish=False)
        assert (await client.load("judge"))["version"] == 0
        np.testing.assert_array_equal((await client.forward([datum()], compute=("values",)))["values"][0], scores)
