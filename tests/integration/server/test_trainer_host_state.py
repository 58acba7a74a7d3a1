"""A trainer whose optimizer state is in the host's memory gives what one gives with it on the device, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import assert_same, everything, make_data, make_trainer, weights

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.config.server import TrainerConfig
from opentinker.errors import TooLargeError, TrainerError
from opentinker.server.trainer import state_stream
from opentinker.server.trainer.base import Trainer
from opentinker.server.trainer.host_memory import HostMemory
from opentinker.server.trainer.lead_trainer import LeadTrainer
from opentinker.server.trainer.lora import LoraLinear
from opentinker.server.trainer.optimizer import TornError
from opentinker.server.trainer.rank_process import RanksLostError
from opentinker.server.trainer.state_plan import GRAIN, state_plan
from opentinker.server.trainer.trainer import TorchTrainer

PPO, STEP = LossConfig(name="ppo"), AdamParams(learning_rate=1e-3, weight_decay=0.01)
BATCHES = [make_data(2, 4, seed=seed) for seed in range(3)]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several even for a tiny model; no larger than one of its tensors."""
    monkeypatch.setattr(state_stream, "state_plan", lambda sizes, uncut: state_plan(sizes, uncut, GRAIN))


def pair(model_dir: Path, lora: dict[str, Any] | None, **fields: object) -> list[TorchTrainer]:
    """One with its state in the host's memory, and one without."""
    trainers = [make_trainer(model_dir, optimizer_state=where, **fields) for where in ("host", "device")]
    for trainer in trainers:
        trainer.create_policy("p", PolicySpec(lora=lora, seed=3, critic={"rank": 2}))
    return trainers


def train(trainer: Trainer, batch: int) -> tuple[float, dict[str, float]]:
    result = trainer.forward_backward("p", BATCHES[batch], PPO, 0.1)
    return result.loss, trainer.optim_step("p", STEP)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_steps_and_checkpoints_are_the_same_and_fit_the_other(
    small_buckets: None, tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None, optimizer: str, dtype: str
) -> None:
    host, device = pair(tiny_model_dir, lora, optimizer=optimizer, dtype=dtype)
    assert train(host, 0) == train(device, 0)
    assert_same(everything(host), everything(device))
    for number, trainer in enumerate((host, device)):
        trainer.save("p", tmp_path / str(number))
    assert files(tmp_path / "0") == files(tmp_path / "1")
    assert train(host, 1) == train(device, 1)
    for number, trainer in enumerate((device, host)):
        trainer.load("p", tmp_path / str(number))
    assert train(host, 2) == train(device, 2)
    assert_same(everything(host), everything(device))
    for number, trainer in enumerate((device, host)):
        trainer.load("p", tmp_path / str(number), weights_only=True)
        train(trainer, 1)
    assert_same(everything(host), everything(device))


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_a_policy_whose_step_failed_amid_takes_nothing_but_a_checkpoint(
    tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device = pair(tiny_model_dir, lora, dtype="bfloat16")
    for trainer in (host, device):
        train(trainer, 0)
    host.save("p", tmp_path / "saved")
    host.forward_backward("p", BATCHES[1], PPO, 0.1)
    optimizer = host._policies["p"].optimizer
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_exchange", lambda: [][0])
        with pytest.raises(TornError, match="the step failed amid the parameters: list index out of range"):
            host.optim_step("p", STEP)
    for refused in (
        lambda: host.optim_step("p", STEP),
        lambda: host.forward_backward("p", BATCHES[1], PPO, 0.1),
        lambda: host.check("p", BATCHES[1], PPO),
        lambda: host.forward("p", BATCHES[1]),
        lambda: host.full_weights("p"),
        lambda: host.save("p", tmp_path / "torn"),
        *([lambda: host.adapter("p")] if lora else []),
    ):
        with pytest.raises(TornError, match="load a checkpoint"):
            refused()
    assert not (tmp_path / "torn").exists()
    host.load("p", tmp_path / "saved")
    assert train(host, 1) == train(device, 1)
    assert_same(everything(host), everything(device))
    host.delete_policy("p")
    host.create_policy("p", PolicySpec(lora=lora))


def test_a_policy_whose_step_failed_amid_can_be_deleted(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = pair(tiny_model_dir, {"rank": 4})
    monkeypatch.setattr(host._critic("p").optimizer, "_exchange", lambda: [][0])
    with pytest.raises(TornError):
        host.optim_step("p", STEP, critic=True)
    with pytest.raises(TornError):
        host.forward("p", BATCHES[0])
    host.delete_policy("p")
    host.create_policy("p", PolicySpec())
    train(host, 0)


def test_memory_that_runs_out_before_a_step_begins_changes_nothing(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device = pair(tiny_model_dir, None, dtype="bfloat16")
    for trainer in (host, device):
        trainer.forward_backward("p", BATCHES[0], PPO, 0.1)
    before = everything(host)

    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(host._policies["p"].optimizer, "_adamw", exhausted)
        with pytest.raises(TrainerError, match=r"not enough memory.*nothing was trained"):
            host.optim_step("p", STEP)
    assert_same(everything(host), before)
    assert host.optim_step("p", STEP) == device.optim_step("p", STEP)
    assert_same(everything(host), everything(device))


def test_a_full_policy_whose_state_has_no_room_is_refused(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tiny_model_dir, optimizer_state="host", dtype="bfloat16")
    monkeypatch.setattr(trainer._budget, "other_free", lambda device: 1e5)
    with pytest.raises(TooLargeError, match=r"the optimizer state of all parameters takes .* in the host's memory"):
        trainer.create_policy("p", PolicySpec())
    trainer.create_policy("p", PolicySpec(lora={"rank": 2}))
    train(trainer, 0)


@pytest.mark.parametrize("left", [0, 20])
def test_a_policy_that_the_host_has_no_memory_for_leaves_nothing(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    trainer = make_trainer(tiny_model_dir, optimizer_state="host")
    asked = iter(range(1000))
    zeros = HostMemory.zeros

    def some(memory: HostMemory, *about: Any) -> torch.Tensor:
        if next(asked) >= left:
            raise TooLargeError("the host has no bytes for optimizer state")
        return zeros(memory, *about)

    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "zeros", some)
        with pytest.raises(TooLargeError, match="the host has no bytes"):
            trainer.create_policy("p", PolicySpec(lora={"rank": 2, "target_modules": ["q_proj"]}, critic={"rank": 2}))
    assert not any(layer.adapters for layer in trainer._model.model.modules() if isinstance(layer, LoraLinear))
    trainer.create_policy("p", PolicySpec())
    train(trainer, 0)


@pytest.fixture(params=[("adamw", "float32"), ("adamw_8bit", "bfloat16")], ids=["adamw", "adamw_8bit"])
def two_each(tiny_model_dir: Path, request: pytest.FixtureRequest) -> Iterator[list[LeadTrainer]]:
    optimizer, dtype = request.param
    trainers = []
    try:
        for where in ("host", "device"):
            fields = {"dtype": dtype, "pack_tokens": 64, "ranks": 2, "optimizer": optimizer, "optimizer_state": where}
            trainers.append(LeadTrainer(tiny_model_dir, TrainerConfig.model_validate(fields), device="cpu", timeout_s=60.0))
        yield trainers
    finally:
        for trainer in trainers:
            trainer.close()


def test_two_ranks_step_and_save_the_same(two_each: list[LeadTrainer], tmp_path: Path) -> None:
    host, device = two_each
    for lora in (None, {"rank": 4}):
        folder = tmp_path / ("full" if lora is None else "lora")
        for trainer in two_each:
            trainer.create_policy("p", PolicySpec(lora=lora, seed=3))
        for batch in range(2):
            assert train(host, batch) == train(device, batch)
        assert_same(state(host), state(device))
        for number, trainer in enumerate((host, device)):
            trainer.save("p", folder / str(number))
        assert files(folder / "0") == files(folder / "1")
        host.forward_backward("p", BATCHES[0], LossConfig(name="cross_entropy"), 1e38)
        host.forward_backward("p", BATCHES[0], LossConfig(name="cross_entropy"), 1e38)
        with pytest.raises(TrainerError, match="the gradient norm is"):
            host.optim_step("p", STEP)
        assert_same(state(host), state(device))
        train(host, 2)
        host.load("p", folder / "1")
        device.load("p", folder / "0")
        assert train(host, 2) == train(device, 2)
        assert_same(state(host), state(device))
        assert_same(weights(host), weights(device))
        for trainer in two_each:
            trainer.delete_policy("p")


def test_a_full_policy_that_the_host_has_no_memory_for_leaves_the_base_whole_on_all_ranks(
    two_each: list[LeadTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device = two_each

    def none(*_: Any) -> torch.Tensor:
        raise TooLargeError("the host has no bytes for optimizer state")

    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "zeros", none)
        with pytest.raises(TooLargeError, match="the host has no bytes"):
            host.create_policy("p", PolicySpec())
    for trainer in two_each:
        trainer.create_policy("p", PolicySpec(lora={"rank": 4}, seed=3))
    assert train(host, 0) == train(device, 0)


def test_ranks_of_which_one_fails_amid_a_step_are_lost(two_each: list[LeadTrainer], monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = two_each
    host.create_policy("p", PolicySpec(lora={"rank": 4}))
    monkeypatch.setattr(host._optimizers["p"], "_exchange", lambda: [][0])
    with pytest.raises(RanksLostError, match=r"rank 0 of 2 of the trainer failed in step_share.*amid the parameters"):
        train(host, 0)


def state(trainer: LeadTrainer) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in trainer._policies["p"].optimizer.state().items()}
