"""What was sampled is what is trained on: the engine's logprobs are the trainer's at every temperature, and a first minibatch
has a ratio of exactly 1. And what must not learn does not."""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_tools import LORA, Server, datum, serving
from trainer_tools import assert_same

from opentinker.client.messages import AdamParams, Datum, LossConfig, Minibatch, SamplingParams, TokenChunk
from opentinker.training.batch import Batch
from opentinker.training.proximal import with_proximal_logprobs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import algorithm_curves

KINDS = [
    pytest.param({"kind": "transformers"}, id="transformers, full"),
    pytest.param({"kind": "vllm", "lora": LORA, "lora_serving": "adapter"}, id="vllm, adapter served"),
]


@pytest.fixture(params=KINDS)
async def trained(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[Server]:
    """A server whose policy is not the base model any more."""
    async with serving(tiny_model_dir, tmp_path, **request.param) as server:
        for _ in range(2):
            await server.client.train_step(
                [datum()], [Minibatch(indices=(0,))], LossConfig(name="importance_sampling"), AdamParams(learning_rate=1e-2)
            )
        yield server


async def sampled(server: Server, temperature: float) -> list[Datum]:
    """Twelve answers to six prompts, as data."""
    rng, data = np.random.default_rng(0), []
    for number in range(6):
        prompt = rng.integers(3, 400, 4 + number).astype(np.int32)
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=number)
        for sample in (await server.client.sample(prompt, params, n=2)).samples:
            tokens = np.concatenate([prompt, sample.tokens])
            mask = (np.arange(len(tokens) - 1) >= len(prompt) - 1).astype(np.float32)
            behaviour = np.zeros(len(mask), np.float32)
            behaviour[len(prompt) - 1 :] = sample.logprobs
            arrays = {"weights": mask, "behaviour_logprobs": behaviour, "advantages": mask * np.float32(rng.normal())}
            data.append(Datum((TokenChunk(tokens[:-1]),), tokens[1:], arrays))
    return data


def mean_apart(data: list[Datum], logprobs: list[np.ndarray]) -> float:
    where = [d.weights != 0 for d in data]
    return float(
        np.mean(
            np.abs(
                np.concatenate([(d.arrays["behaviour_logprobs"] - p)[w] for d, p, w in zip(data, logprobs, where, strict=True)])
            )
        )
    )


async def test_the_engines_logprobs_are_the_trainers_at_the_temperature_that_sampled(trained: Server) -> None:
    for temperature in (0.6, 1.0, 1.7):
        data = await sampled(trained, temperature)
        own = (await trained.client.forward(data, temperature=temperature))["logprobs"]
        other = (await trained.client.forward(data, temperature=temperature + 0.3))["logprobs"]
        print(f"temperature {temperature}: mean |dlogprob| {mean_apart(data, own):.1e}")
        assert mean_apart(data, own) < 1e-4
        assert mean_apart(data, other) > 1e-2, "another temperature is another distribution"

        # The first minibatch of a step is on policy; the second comes after an update.
        halves = [Minibatch(indices=tuple(range(start, 12, 2)), factor=0.01) for start in (0, 1)]
        anchored = (await with_proximal_logprobs(trained.client, Batch(data, halves), temperature)).data
        loss = LossConfig(name="ppo", anchor="proximal", temperature=temperature)
        result = await trained.client.train_step(anchored, halves, loss, AdamParams(learning_rate=1e-2))
        first, second = (part["metrics"] for part in result["minibatches"])
        assert (first["ratio_max"], first["clipped_sum"]) == (1.0, 0.0)
        assert second["ratio_max"] != 1.0


async def drive_still(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The rows of a run on the task of the algorithms' curves, at learning rate 0."""
    config = algorithm_curves.config_of("control", algorithm_curves.prepare(folder), steps)
    config["rollout"]["groups_per_step"] = 2
    config["evaluation"] = {"at_start": False, "at_end": False}
    config["algorithm"]["group_size"] = 4
    await algorithm_curves.train(config, folder, folder / "run")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]


async def test_with_learning_rate_0_nothing_moves_in_20_steps_and_the_mismatch_stays_where_it_was(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    rows = await drive_still(tmp_path, 20)
    [final] = (tmp_path / "run" / "checkpoints").glob("final@*")
    before, after = load_file(tmp_path / "model" / "model.safetensors"), load_file(final / "model.safetensors")
    assert_same({name: after[name] for name in before}, before)
    trained = [row for row in rows if row["grad_norm"] is not None]  # in the others all episodes of a group earned the same
    mismatch = [abs(row["mismatch_kl_mean"]) for row in trained]
    print(f"mismatch: first {mismatch[0]:.1e}, largest {max(mismatch):.1e}")
    assert len(rows) == 20
    assert len(trained) >= 5
    assert max(mismatch) < 1e-6
    assert all(row["grad_norm"] > 0 for row in trained), "there was something to learn"
