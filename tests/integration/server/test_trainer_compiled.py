"""Compiled layers compute what plain ones do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from trainer_tools import assert_same, gradients, make_data, make_trainer

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.config.server import TrainerConfig
from opentinker.errors import ConfigError

LOSS = LossConfig(name="ppo", entropy_coefficient=0.1)


@pytest.mark.parametrize(("lora", "again"), [(None, False), ({"rank": 4}, True)])
def test_loss_and_gradients_are_those_of_plain_layers_and_packs_of_any_length_use_the_same_kernels(
    tiny_model_dir: Path, lora: dict[str, int] | None, again: bool
) -> None:
    plain, fused = make_trainer(tiny_model_dir), make_trainer(tiny_model_dir, compile=True, activation_checkpointing=again)
    for trainer in (plain, fused):
        trainer.create_policy("p", PolicySpec(lora=lora, seed=3))
    plain.forward_backward("p", make_data(seed=1), LOSS, 0.1)
    plain.optim_step("p", AdamParams(learning_rate=1e-3))
    fused._policies["p"].optimizer.start_from(plain._policies["p"].optimizer.weights())
    compiled = 0
    for groups, size, seed in ((2, 4, 2), (5, 3, 3), (1, 1, 4)):
        data = make_data(groups, size, seed=seed)
        expected, found = (trainer.forward_backward("p", data, LOSS, 0.1) for trainer in (plain, fused))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
        for a, b in zip(expected.logprobs, found.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        compiled = compiled or counters["stats"]["unique_graphs"]
    assert_same(gradients(plain), gradients(fused), relative=1e-5)
    assert counters["stats"]["unique_graphs"] == compiled > 0


def test_without_a_compiler_the_error_says_what_is_missing(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler") as caught:
        make_trainer(tiny_model_dir, compile=True)
    assert "install g++" in caught.value.hint


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="compile is for one rank, and ranks is 2"):
        TrainerConfig(compile=True, ranks=2)
