"""Several adapters on one real server: each is what it would be alone, whatever the others do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from server_tools import FAST, LORA, PROMPT, Server, datum, serving, wait_until

from opentinker.checkpoints import checkpoints
from opentinker.client.messages import AdamParams, Datum, FloatArray, LossConfig, Minibatch, SamplingParams, TokenChunk
from opentinker.client.policy import PolicyClient
from opentinker.config.server import LoraConfig
from opentinker.errors import AuthenticationError, CheckpointError, ConfigError, ConflictError, VersionNotServedError

OTHER = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj"))
"""Of another rank and on other layers than the job's own."""
LOSS = LossConfig(name="importance_sampling")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def other_datum() -> Datum:
    tokens = np.asarray([21, 22, 23, 31, 32, 33], np.int32)
    weights = np.asarray([0, 0, 1, 1, 1], np.float32)
    arrays = {"weights": weights, "advantages": weights, "behaviour_logprobs": -6 * weights}
    return Datum((TokenChunk(tokens[:-1]),), tokens[1:], arrays)


async def train(client: PolicyClient, data: Datum, adam: AdamParams = FAST) -> None:
    await client.train_step([data], [Minibatch(indices=(0,))], LOSS, adam)


async def trainer_scores(client: PolicyClient, data: Datum) -> FloatArray:
    return (await client.forward([data]))["logprobs"][0]


async def engine_scores(client: PolicyClient, data: Datum, version: int | None = None) -> FloatArray:
    """The engine's logprobs of the datum's targets."""
    tokens = [*data.tokens.tolist(), int(data.targets[-1])]
    result = await client.sample(tokens, SamplingParams(max_tokens=1), prompt_logprobs=True, version=version)
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs[1:] * data.weights


@asynccontextmanager
async def two(
    model_dir: Path, root: Path, kind: str, first: LoraConfig = LORA, second: LoraConfig = OTHER
) -> AsyncIterator[tuple[Server, PolicyClient]]:
    async with serving(model_dir, root, kind=kind, lora=first, lora_serving="adapter", max_adapters=2) as server:
        yield server, await server.client.create_policy(second, name="other", seed=1)


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
async def test_two_policies_on_one_server_are_what_each_is_alone(tiny_model_dir: Path, tmp_path: Path, kind: str) -> None:
    alone = {}
    for name, lora, data, seed in (("p", LORA, datum(), 0), ("other", OTHER, other_datum(), 1)):
        async with serving(tiny_model_dir, tmp_path / name, lora=lora, kind=kind, lora_serving="adapter", seed=seed) as server:
            for _ in range(3):
                await train(server.client, data)
            sampled = (await server.client.sample(PROMPT, GREEDY)).samples[0]
            alone[name] = (await trainer_scores(server.client, data), await engine_scores(server.client, data), sampled)
    async with two(tiny_model_dir, tmp_path / "both", kind) as (server, other):
        both = {"p": (server.client, datum()), "other": (other, other_datum())}
        for _ in range(3):
            for client, data in both.values():
                await train(client, data)
        # All at once, so that they share the engine's batches.
        samples = await asyncio.gather(*(client.sample(PROMPT, GREEDY) for client, _ in both.values() for _ in range(3)))
        for number, (name, (client, data)) in enumerate(both.items()):
            trained, scored, sampled = alone[name]
            np.testing.assert_array_equal(await trainer_scores(client, data), trained)
            np.testing.assert_allclose(await engine_scores(client, data), scored, atol=1e-4)
            np.testing.assert_allclose(await engine_scores(client, data), trained, atol=1e-3)
            for result in samples[3 * number : 3 * number + 3]:
                np.testing.assert_array_equal(result.samples[0].tokens, sampled.tokens)
                np.testing.assert_allclose(result.samples[0].logprobs, sampled.logprobs, atol=1e-4)
                assert result.samples[0].versions == ((3, len(sampled.tokens)),)


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
async def test_a_policy_does_not_hear_of_the_others_and_its_last_versions_stay(
    tiny_model_dir: Path, tmp_path: Path, kind: str
) -> None:
    async with two(tiny_model_dir, tmp_path, kind) as (server, other):
        own, data = server.client, other_datum()
        await train(other, data)
        trained, scored = await trainer_scores(other, data), await engine_scores(other, data)
        # Running requests of both go on while one of them is published.
        long = SamplingParams(max_tokens=120, stop_token_ids=(), seed=3)
        running = [asyncio.create_task(client.sample(PROMPT, long)) for client in (own, other) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: len(server.worker._running) == 4)
        await train(own, datum())
        versions = [[v for v, _ in result.samples[0].versions] for result in await asyncio.gather(*running)]
        assert versions == [[0], [0], [1], [1]]
        found: dict[int, FloatArray] = {}
        for version in (2, 3):
            await train(own, datum())
            found[version] = await engine_scores(own, datum())
        np.testing.assert_array_equal(await trainer_scores(other, data), trained)
        np.testing.assert_allclose(await engine_scores(other, data), scored, atol=1e-4)
        # A learning rate of 0 moves nothing.
        before = await engine_scores(other, data)
        for _ in range(2):
            await train(other, data, AdamParams(learning_rate=0.0))
        np.testing.assert_array_equal(await trainer_scores(other, data), trained)
        np.testing.assert_allclose(await engine_scores(other, data), before, atol=1e-4)
        # Later publishes of the own policy and of the other have left both versions as they were.
        assert np.abs(found[2] - found[3]).max() > 1e-2
        for version, scores in found.items():
            np.testing.assert_allclose(await engine_scores(own, datum(), version), scores, atol=1e-5)
        sample = (await own.sample(PROMPT, GREEDY, version=2)).samples[0]
        assert sample.versions == ((2, len(sample.tokens)),)
        with pytest.raises(VersionNotServedError, match="keeps the newest 2: 2, 3"):
            await engine_scores(own, datum(), 1)


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
async def test_policies_come_and_go(tiny_model_dir: Path, tmp_path: Path, kind: str) -> None:
    async with two(tiny_model_dir, tmp_path, kind) as (server, other):
        own = server.client
        with pytest.raises(ConflictError, match="room for 2 policies") as full:
            await own.create_policy(OTHER)
        assert "engine.max_adapters=3" in full.value.hint
        untrained = await engine_scores(other, other_datum())
        await train(other, other_datum())
        await train(own, datum())
        kept = await engine_scores(own, datum())
        await other.save("mine")
        await own.save("mine")
        assert [c.name for c in checkpoints(tmp_path)] == ["mine"]
        assert [c.version for c in checkpoints(tmp_path / "policies" / "other")] == [1]
        with pytest.raises(CheckpointError, match="no checkpoint 'yours'"):
            await other.load("yours")
        trained = await engine_scores(other, other_datum())
        await own.delete_policy("other")
        stranger = PolicyClient(server.endpoint, "otp-made-up", "other")
        with pytest.raises(AuthenticationError):
            await stranger.state()
        await stranger.close()
        with pytest.raises(ConfigError, match="no_such"):
            await own.create_policy(LoraConfig(target_modules=("no_such",)))
        if kind == "vllm":
            with pytest.raises(ConfigError, match="rank 32 is larger"):
                await own.create_policy(LoraConfig(rank=32))
        again = await own.create_policy(OTHER, name="other", seed=1)
        np.testing.assert_allclose(await engine_scores(again, other_datum()), untrained, atol=1e-5)
        await again.load("mine")
        np.testing.assert_allclose(await engine_scores(again, other_datum()), trained, atol=1e-4)
        np.testing.assert_allclose(await engine_scores(own, datum()), kept, atol=1e-4)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "merged"])
async def test_a_policy_that_has_the_base_weights_is_not_joined_and_gives_them_back(
    tiny_model_dir: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    async with serving(tiny_model_dir, tmp_path, lora=lora) as server:
        untrained = await server.engine_logprobs()
        with pytest.raises(ConflictError, match="to itself" if lora is None else "room for 1 policy"):
            await server.client.create_policy(LORA)
        await train(server.client, datum())
        assert np.abs(await server.engine_logprobs() - untrained).max() > 0.01
        await server.client.command("delete", {})
        await server.client.command("create", {"lora": None if lora is None else lora.model_dump()})
        np.testing.assert_allclose(await server.engine_logprobs(), untrained, atol=1e-5)
