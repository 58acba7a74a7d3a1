"""What a job server saves, and what it starts from and loads."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_tools import FAST, LORA, Server, datum, serving, wait_until

from opentinker.checkpoints import checkpoints
from opentinker.client.messages import LossConfig, Minibatch
from opentinker.config.server import LoraConfig
from opentinker.errors import CheckpointError, InvalidRequestError, TrainerError
from opentinker.server.protocol import CommandWork
from opentinker.server.state import Parts
from opentinker.server.trainer.trainer import TorchTrainer
from opentinker.storage import Storage


async def test_save_and_load_restore_the_policy_and_publish_it(server: Server) -> None:
    client = server.client
    saved = await client.save("first")
    assert saved["path"].endswith("/first@0")
    assert (saved["name"], saved["version"]) == ("first", 0)
    assert saved["manifest"]["files"]
    before = await server.logprobs()
    await client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
    assert not np.array_equal(await server.logprobs(), before)
    trained = await server.logprobs()
    assert (await client.save("first"))["version"] == 1
    assert (await client.load("first@0"))["version"] == 2
    np.testing.assert_array_equal(await server.logprobs(), before)
    np.testing.assert_allclose(await server.engine_logprobs(), before, atol=0.01)
    await client.load("first")  # the one saved last
    np.testing.assert_array_equal(await server.logprobs(), trained)
    with pytest.raises(CheckpointError, match="no checkpoint 'first@7'") as error:
        await client.load("first@7")
    assert "first@1, first@0" in error.value.hint


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
async def test_a_policy_whose_step_failed_amid_publishes_nothing_and_a_checkpoint_mends_it(
    tiny_model_dir: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model_dir, tmp_path, kind=kind) as server:
        client, trainer = server.client, server.parts.training
        await client.save("first")
        assert isinstance(trainer, TorchTrainer)
        with monkeypatch.context() as patch:
            patch.setattr(trainer._policies["p"].optimizer, "_exchange", lambda: [][0])
            with pytest.raises(TrainerError, match="the step failed amid the parameters"):
                await client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        for _ in range(2):
            with pytest.raises(TrainerError, match="load a checkpoint"):
                await client.publish()
        loaded = await client.load("first")
        np.testing.assert_allclose(await server.engine_logprobs(), await server.logprobs(), atol=0.01)
        trained = await client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        assert trained["version"] == loaded["version"] + 1


async def test_a_save_is_copied_to_the_storage_and_loaded_from_there_when_this_node_has_it_not(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    remote, root = tmp_path / "remote", tmp_path / "runs"
    storage = Storage(f"file://{remote}", root)

    def stored(parts: Parts) -> Parts:
        return replace(parts, storage=storage)

    async with serving(tiny_model_dir, root / "ann/job-1/checkpoints", change=stored) as server:
        saved, before = await server.client.save("first"), await server.logprobs()
        assert [c.name for c in storage.checkpoints(root / "ann/job-1/checkpoints")] == ["first"]
        await server.client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        shutil.rmtree(saved["path"])
        await server.client.load("first")
        np.testing.assert_array_equal(await server.logprobs(), before)
        shutil.rmtree(remote)
        remote.touch()  # the storage is away
        with pytest.raises(CheckpointError, match="is whole on this node, but was not copied") as error:
            await server.client.save("second")
        assert "save it again" in error.value.hint
        await server.client.load("second")
        remote.unlink()
        await server.client.save("second")
        assert [c.name for c in storage.checkpoints(root / "ann/job-1/checkpoints")] == ["second"]


@pytest.mark.parametrize(
    ("kind", "lora", "lora_serving"),
    [("transformers", None, "merge"), ("transformers", LORA, "merge"), ("vllm", LORA, "adapter")],
)
async def test_a_policy_starts_from_a_checkpoints_weights_as_version_0_with_a_new_optimizer(
    tiny_model_dir: Path, tmp_path: Path, kind: str, lora: LoraConfig | None, lora_serving: str
) -> None:
    async with serving(tiny_model_dir, tmp_path / "a", lora=lora) as server:
        for _ in range(2):
            await server.client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        saved, trained = await server.client.save("final"), await server.logprobs()
    started = serving(tiny_model_dir, tmp_path / "b", kind=kind, lora=lora, lora_serving=lora_serving, create=False)
    async with started as server:
        spec = {"lora": None if lora is None else lora.model_dump(), "checkpoint": saved["path"]}
        with pytest.raises(InvalidRequestError, match="start checkpoint cannot be named here"):
            await server.client.command("create", spec)
        server.worker.submit([CommandWork("p:c:create", "p", "create", spec)])  # as the scheduler does
        await asyncio.to_thread(wait_until, lambda: server.worker._state.policies)
        assert server.worker._state.policies["p"].version == 0
        np.testing.assert_array_equal(await server.logprobs(), trained)
        np.testing.assert_allclose(await server.engine_logprobs(), trained, atol=0.01)
        await server.client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        assert (await server.client.save("first"))["version"] == 1
        assert [c.step for c in checkpoints(tmp_path / "b")] == [1]


async def test_another_jobs_checkpoint_is_loaded_with_its_optimizer_driver_and_version(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async def step(server: Server) -> None:
        await server.client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)

    async with serving(tiny_model_dir, tmp_path / "a", lora=LORA) as server:
        for _ in range(3):
            await step(server)
        saved = await server.client.save("step-000003", driver={"step": 3})
        await step(server)
        whole = await server.logprobs()
    starts = {"ann/job-0a/step-000003@3": saved["path"]}
    async with serving(tiny_model_dir, tmp_path / "b", lora=LORA, seed=9, starts=starts) as server:
        loaded = await server.client.load("job-0a/step-000003")
        assert (loaded["version"], loaded["driver"]) == (3, {"step": 3})
        await step(server)
        np.testing.assert_array_equal(await server.logprobs(), whole, err_msg="the moments came along")
        np.testing.assert_allclose(await server.engine_logprobs(), whole, atol=0.01)
        (Path(saved["path"]) / "optimizer.safetensors").write_bytes(b"broken")
        with pytest.raises(CheckpointError, match="corrupt"):
            await server.client.load("job-0a/step-000003")
        np.testing.assert_array_equal(await server.logprobs(), whole)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 101, 7])
async def test_a_checkpoint_name_is_one_safe_path_component(server: Server, name: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a checkpoint name"):
        await server.client.command("save", {"name": name})
