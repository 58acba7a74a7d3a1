"""Saving and loading: other tools read what was saved, training continues bit for bit, what does not fit is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import assert_same, everything, gradients, make_data, make_trainer, weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.errors import CheckpointError
from opentinker.server.trainer.checkpoint import write_checkpoint
from opentinker.server.trainer.trainer import TorchTrainer

KINDS: list[dict[str, Any] | None] = [None, {"rank": 4}]


def trained(model_dir: Path, lora: dict[str, Any] | None, *, dtype: str = "bfloat16", steps: int = 2) -> TorchTrainer:
    trainer = make_trainer(model_dir, dtype=dtype)
    trainer.create_policy("p", PolicySpec(lora=lora, seed=7))
    for step in range(steps):
        train(trainer, step)
    return trainer


def train(trainer: TorchTrainer, step: int) -> float:
    result = trainer.forward_backward("p", make_data(seed=step), LossConfig(name="ppo"), 0.1)
    trainer.optim_step("p", AdamParams(learning_rate=1e-3, weight_decay=0.01))
    return result.loss


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_a_loaded_policy_continues_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None, dtype: str
) -> None:
    trainer = trained(tiny_model_dir, lora, dtype=dtype)
    write_checkpoint(tmp_path / "c", lambda folder: trainer.save("p", folder))
    loss = train(trainer, 2)
    resumed = trained(tiny_model_dir, lora, dtype=dtype, steps=0)
    resumed.forward_backward("p", make_data(), LossConfig(name="ppo"), 1.0)  # gradients that a load drops
    resumed.load("p", tmp_path / "c")
    assert gradients(resumed) == {}
    assert train(resumed, 2) == loss
    assert_same(weights(resumed), weights(trainer))
    states = [t._policies["p"].optimizer.state() for t in (resumed, trainer)]
    assert_same(*states)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_a_policy_can_start_from_the_weights_alone(
    tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None, dtype: str
) -> None:
    trainer = trained(tiny_model_dir, lora, dtype=dtype)
    trainer.save("p", tmp_path / "c")
    started = trained(tiny_model_dir, lora, dtype=dtype, steps=1)
    started.forward_backward("p", make_data(), LossConfig(name="ppo"), 1.0)
    started.load("p", tmp_path / "c", weights_only=True)
    assert gradients(started) == {}
    assert_same(weights(started), weights(trainer))
    optimizer = started._policies["p"].optimizer
    assert_same(optimizer.masters, trainer._policies["p"].optimizer.masters)
    assert optimizer.step_count == 0
    assert all(not moment.any() for moments in (optimizer.exp_avg, optimizer.exp_avg_sq) for moment in moments.values())


def test_transformers_loads_a_full_checkpoint_with_its_tokenizer(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = trained(tiny_model_dir, None)
    manifest = trainer.save("p", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert_same({n: p.detach() for n, p in model.state_dict().items()}, weights(trainer))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
    files = {path.name for path in tmp_path.iterdir()}
    assert files - set(manifest["files"]) == {"manifest.json"}
    assert {"model.safetensors", "config.json", "optimizer.safetensors", "trainer_state.json"} <= files


def test_a_checkpoint_goes_into_an_empty_folder(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(CheckpointError, match="not empty"):
        trained(tiny_model_dir, None, steps=0).save("p", tmp_path)


def test_what_does_not_fit_is_refused_and_changes_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    folders = {}
    for name, lora in {"full": None, "rank 2": {"rank": 2}, "narrow": {"rank": 4, "target_modules": ["q_proj"]}}.items():
        folders[name] = tmp_path / name
        trained(tiny_model_dir, lora, steps=1).save("p", folders[name])
    folders["float32"] = tmp_path / "float32"
    trained(tiny_model_dir, None, steps=0, dtype="float32").save("p", folders["float32"])
    trainer = trained(tiny_model_dir, {"rank": 4})
    before = everything(trainer)
    for name, message in {"full": "kind is full, not lora", "rank 2": "its lora is", "narrow": "its lora is"}.items():
        with pytest.raises(CheckpointError, match=message):
            trainer.load("p", folders[name])
    shutil.rmtree(folders["full"])
    with pytest.raises(CheckpointError, match="incomplete"):
        trainer.load("p", folders["full"])
    assert_same(everything(trainer), before)
    train(trainer, 3)


def test_a_model_of_other_shapes_is_refused_and_changes_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_model_dir, num_hidden_layers=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "deeper")
    trained(tmp_path / "deeper", None, steps=0).save("p", tmp_path / "c")
    trainer = trained(tiny_model_dir, None)
    before = everything(trainer)
    with pytest.raises(CheckpointError, match="of another architecture"):
        trainer.load("p", tmp_path / "c")
    assert_same(everything(trainer), before)
    train(trainer, 3)


def test_a_corrupt_checkpoint_is_refused_and_changes_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = trained(tiny_model_dir, {"rank": 4})
    trainer.save("p", tmp_path / "c")
    train(trainer, 2)
    before = everything(trainer)
    path = tmp_path / "c" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="corrupt"):
        trainer.load("p", tmp_path / "c")
    assert_same(everything(trainer), before)
    train(trainer, 3)
