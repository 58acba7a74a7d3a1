"""Activation checkpointing changes what a pass keeps, and no bit of what it computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_tools import assert_same, gradients, make_data, make_trainer

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.errors import ConfigError
from opentinker.server.trainer.recompute import recompute_layers
from opentinker.server.trainer.trainer import TorchTrainer

LOSS = LossConfig(name="ppo", entropy_coefficient=0.1)


def trained(model_dir: Path, spec: PolicySpec, *, dtype: str, again: bool) -> TorchTrainer:
    """After one step, with the gradients of a second one."""
    trainer = make_trainer(model_dir, dtype=dtype, activation_checkpointing=again)
    trainer.create_policy("other", PolicySpec(lora={"rank": 2}, seed=9)) if spec.lora else None
    trainer.create_policy("p", spec)
    trainer.forward_backward("p", make_data(seed=1), LOSS, 0.1)
    trainer.optim_step("p", AdamParams(learning_rate=1e-2))
    trainer.forward_backward("p", make_data(seed=2), LOSS, 0.1)
    return trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_the_gradients_are_the_same_bit_for_bit(tiny_model_dir: Path, dtype: str, lora: dict[str, int] | None) -> None:
    spec = PolicySpec(lora=lora, seed=3)
    one, other = (gradients(trained(tiny_model_dir, spec, dtype=dtype, again=again)) for again in (False, True))
    assert any(gradient.any() for gradient in one.values())
    assert_same(one, other)


def saved_bytes(trainer: TorchTrainer) -> int:
    """What autograd keeps in one pass for the backward one, without parameters."""
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.forward_backward("p", make_data(4, 8), LOSS, 0.1)
    return sum(seen.values())


def test_far_less_is_kept_for_the_backward_pass(tiny_model_dir: Path) -> None:
    kept = {}
    for again in (False, True):
        trainer = make_trainer(tiny_model_dir, pack_tokens=4096, activation_checkpointing=again)
        trainer.create_policy("p", PolicySpec())
        kept[again] = saved_bytes(trainer)
    assert kept[True] < kept[False] / 3


def test_a_model_without_known_layers_is_named() -> None:
    def around() -> Any:
        raise AssertionError("nothing runs")

    with pytest.raises(ConfigError, match="Linear has no layers"):
        recompute_layers(nn.Linear(2, 2), around)
