"""A server without a trainer: it samples from the base model or from a checkpoint, and says why it does nothing else."""

from pathlib import Path

import numpy as np
import pytest
from server_tools import FAST, LORA, PROMPT, REWARDED, Server, datum, serving

from opentinker.client.messages import LossConfig, Minibatch, SamplingParams
from opentinker.config.server import LoraConfig
from opentinker.errors import CheckpointError, ConflictError


async def train(server: Server) -> None:
    for _ in range(3):
        await server.client.train_step(
            [datum()], [Minibatch(indices=(0,))], LossConfig(name="importance_sampling"), FAST, publish=True
        )


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("kind", ["transformers", "vllm"])
async def test_it_samples_from_a_checkpoint_as_the_engine_that_it_was_saved_beside(
    tiny_model_dir: Path, tmp_path: Path, kind: str, lora: LoraConfig | None
) -> None:
    async with serving(tiny_model_dir, tmp_path, kind=kind, lora=lora) as trained:
        untrained = await trained.engine_logprobs()
        await train(trained)
        expected = await trained.engine_logprobs()
        saved = await trained.client.save("mine")
    async with serving(tiny_model_dir, tmp_path, kind=kind, trains=False, checkpoint=saved["path"]) as server:
        found = await server.engine_logprobs()
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.abs(found - untrained).max() > 0.1
        assert (await server.client.state())["version"] == 0
        sample = (await server.client.sample(PROMPT, SamplingParams(max_tokens=4))).samples[0]
        assert sample.versions == ((0, len(sample.tokens)),)


async def test_everything_but_sampling_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_dir, tmp_path, trains=False) as server:
        assert (await server.engine_logprobs()).shape == (len(REWARDED),)
        for refused in (
            server.client.forward([datum()]),
            server.client.publish("abort"),
            server.client.save("a"),
            train(server),
        ):
            with pytest.raises(ConflictError, match="no trainer"):
                await refused
        assert (await server.client.sample(PROMPT, SamplingParams(max_tokens=2))).samples
        assert await server.client.command("delete", {}) == {}


async def test_a_checkpoint_that_is_not_there_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        async with serving(tiny_model_dir, tmp_path, trains=False, checkpoint=str(tmp_path / "nowhere")):
            raise AssertionError
