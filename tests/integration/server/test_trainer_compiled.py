"""Compiled layers compute what plain ones do."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from trainer_tools import assert_same, gradients, make_data, make_trainer

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.config.server import TrainerConfig
from opentinker.errors import ConfigError
from opentinker.server.trainer.lead_trainer import LeadTrainer

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


def test_without_a_compiler_the_error_says_what_is_missing(tiny_model_dir: Path) -> None:
    # pytest's monkeypatch would leave the setting deleted for whatever compiles next.
    missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(ConfigError, match=r"needs a C\+\+ compiler") as caught:
        make_trainer(tiny_model_dir, compile=True)
    assert "install g++" in caught.value.hint


@pytest.mark.parametrize(
    ("lora", "more"),
    [(None, {}), ({"rank": 4}, {"shard_base": True, "activation_checkpointing": True})],
    ids=["full", "lora on a shared-out base"],
)
def test_layers_that_ranks_share_out_compute_what_plain_ones_do_on_one_rank(
    tiny_model_dir: Path, lora: dict[str, int] | None, more: dict[str, bool]
) -> None:
    config = TrainerConfig.model_validate({"dtype": "float32", "pack_tokens": 64, "ranks": 2, "compile": True, **more})
    one, two = make_trainer(tiny_model_dir), LeadTrainer(tiny_model_dir, config, device="cpu", timeout_s=120.0)
    with closing(two):
        for trainer in (one, two):
            trainer.create_policy("p", PolicySpec(lora=lora, seed=3))
        assert any(isinstance(p, DTensor) for p in two._model.names.values()), "the layers are shared out"
        for groups, size, seed in ((2, 4, 0), (1, 1, 2), (3, 3, 1)):  # the second has data for one rank only
            data = make_data(groups, size, seed=seed)
            expected, found = (trainer.forward_backward("p", data, LOSS, 0.1) for trainer in (one, two))
            assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
            for a, b in zip(expected.logprobs, found.logprobs, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
        norms = [trainer.optim_step("p", AdamParams(learning_rate=1e-3))["grad_norm"] for trainer in (one, two)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        # After one step these are the gradients, scaled, and their squares.
        moments = [
            {key: tensor.clone() for key, tensor in trainer._policies["p"].optimizer.state().items() if "master" not in key}
            for trainer in (one, two)
        ]
        assert moments[0]
        assert_same(*moments, relative=1e-5)
        scores = [trainer.forward("p", data)["logprobs"] for trainer in (one, two)]
        for a, b in zip(*scores, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)  # the step has scaled the noise of small gradients up
    assert counters["stats"]["unique_graphs"] > 0
