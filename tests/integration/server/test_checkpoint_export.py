"""Exports load in plain transformers, peft and vLLM's format with the trainer's own logprobs; every damage is named."""

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_tools import assert_same, everything, make_data, make_trainer, plain_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.errors import CheckpointError, ConfigError
from opentinker.export import export_checkpoint
from opentinker.server.merging import write_merged
from opentinker.server.trainer.checkpoint import open_checkpoint, write_checkpoint
from opentinker.server.trainer.trainer import TorchTrainer
from opentinker.server.weights import checkpoint_weights

LORA = {"rank": 4}


def saved(model_dir: Path, folder: Path, lora: dict[str, Any] | None) -> TorchTrainer:
    """A trained policy and its checkpoint."""
    trainer = make_trainer(model_dir)
    trainer.create_policy("p", PolicySpec(lora=lora, seed=7))
    for step in range(3):
        train(trainer, step)
    write_checkpoint(folder, lambda empty: trainer.save("p", empty, {"name": "c"}, {"driver_state.json": "{}"}))
    return trainer


def train(trainer: TorchTrainer, step: int) -> None:
    trainer.forward_backward("p", make_data(seed=step), LossConfig(name="ppo"), 0.1)
    assert trainer.optim_step("p", AdamParams(learning_rate=1e-2))["grad_norm"] > 0


@pytest.fixture(scope="module")
def other_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_model_dir, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    model.save_pretrained(folder)
    return folder


def assert_same_logprobs(model: torch.nn.Module, trainer: TorchTrainer) -> None:
    data = make_data(seed=9)
    ours = trainer.forward("p", data)["logprobs"]
    with torch.no_grad():
        for datum, expected in zip(data, ours, strict=True):
            theirs = plain_logprobs(model.eval(), datum).numpy() * datum.weights
            np.testing.assert_allclose(theirs, expected, atol=1e-4)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_merged_export_is_a_plain_model_with_the_trainers_logprobs(
    tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    trainer = saved(tiny_model_dir, tmp_path / "c", lora)
    written = export_checkpoint(tmp_path / "c", tmp_path / "out", merge=partial(write_merged, base_model=None, dtype="float32"))
    assert written["kind"] == ("full" if lora is None else "merged")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(written["files"])
    assert not {"optimizer.safetensors", "trainer_state.json", "manifest.json", "driver_state.json"} & set(written["files"])
    assert not list(tmp_path.glob(".out*"))
    assert_same_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), trainer)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_an_adapters_export_loads_in_plain_peft(tiny_model_dir: Path, tmp_path: Path) -> None:
    import peft

    trainer = saved(tiny_model_dir, tmp_path / "c", LORA)
    written = export_checkpoint(tmp_path / "c", tmp_path / "out")
    assert written["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    assert_same_logprobs(peft.PeftModel.from_pretrained(base, tmp_path / "out"), trainer)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tiny_model_dir: Path, other_dir: Path, tmp_path: Path) -> None:
    saved(tiny_model_dir, tmp_path / "c", LORA)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for base_model, dtype, target, error, message in [
        (other_dir, None, "out", CheckpointError, "of another base model"),
        (tmp_path / "nowhere", None, "out", ConfigError, "the base model is not at"),
        (None, "int8", "out", ConfigError, "dtype 'int8'"),
        (None, None, "full", ConfigError, "is not empty"),
    ]:
        merge = partial(write_merged, base_model=base_model, dtype=dtype)
        with pytest.raises(error, match=message):
            export_checkpoint(tmp_path / "c", tmp_path / target, merge=merge)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "full"]


def test_an_adapter_of_the_same_architecture_with_other_weights_is_refused(
    tiny_model_dir: Path, other_dir: Path, tmp_path: Path
) -> None:
    saved(tiny_model_dir, tmp_path / "c", LORA)
    trainer = make_trainer(other_dir)
    trainer.create_policy("p", PolicySpec(lora=LORA, seed=7))
    train(trainer, 0)
    before = everything(trainer)
    for weights_only in (False, True):
        with pytest.raises(CheckpointError, match=r"of another base model.*load it beside the model that it was trained on"):
            trainer.load("p", tmp_path / "c", weights_only=weights_only)
        assert_same(everything(trainer), before)
    train(trainer, 1)
    with pytest.raises(CheckpointError, match="of another base model"):
        checkpoint_weights(other_dir, tmp_path / "c")
    rounded = make_trainer(tiny_model_dir, dtype="bfloat16")  # the same model
    rounded.create_policy("p", PolicySpec(lora=LORA, seed=7))
    rounded.load("p", tmp_path / "c")


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_every_part_that_is_missing_cut_or_changed_is_named(
    tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    saved(tiny_model_dir, tmp_path / "c", lora)
    rng, whole = random.Random(0), tmp_path / "c"
    names = sorted(path.name for path in whole.iterdir())
    assert len(names) >= 6
    for name in names:
        content = (whole / name).read_bytes()
        place = rng.randrange(len(content))
        changed = content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
        for damage in (None, b"", content[: rng.randrange(len(content))], content + b" ", changed):
            spoilt = tmp_path / "spoilt"
            shutil.copytree(whole, spoilt)
            (spoilt / name).unlink()
            if damage is not None:
                (spoilt / name).write_bytes(damage)
            with pytest.raises(CheckpointError) as error:
                open_checkpoint(spoilt)
            # A manifest that was changed accuses the file that it speaks of.
            assert name in error.value.detail or name == "manifest.json", (name, damage and len(damage))
            with pytest.raises(CheckpointError):
                export_checkpoint(spoilt, tmp_path / "out")
            shutil.rmtree(spoilt)
    assert open_checkpoint(whole)["step"] == 3
