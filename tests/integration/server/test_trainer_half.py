"""Training in float16 with a loss scale."""

from pathlib import Path

import pytest
from trainer_tools import assert_same, gradients, make_data, make_trainer, weights

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.server.trainer.loss_scale import INITIAL
from opentinker.server.trainer.trainer import TorchTrainer

PPO, STEP = LossConfig(name="ppo"), AdamParams(learning_rate=1e-3)


def half(model_dir: Path, lora: dict[str, int] | None) -> TorchTrainer:
    trainer = make_trainer(model_dir, dtype="float16")
    trainer.create_policy("p", PolicySpec(lora=lora, seed=3))
    return trainer


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_scaled_gradients_are_those_of_float32(tiny_model_dir: Path, lora: dict[str, int] | None) -> None:
    one, other = half(tiny_model_dir, lora), make_trainer(tiny_model_dir)
    other.create_policy("p", PolicySpec(lora=lora, seed=3))
    for trainer in (one, other):
        trainer.forward_backward("p", make_data(), PPO, 1e-4)
    scale = one._policies["p"].optimizer.loss_scale
    assert scale is not None
    found = {name: gradient / scale.value for name, gradient in gradients(one).items()}
    assert_same(found, gradients(other), relative=0.03)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_it_resumes_bit_for_bit_with_its_scale(tiny_model_dir: Path, tmp_path: Path, lora: dict[str, int] | None) -> None:
    trainer = half(tiny_model_dir, lora)
    reports = []
    for step in range(6):
        if step == 4:
            trainer.save("p", tmp_path / "saved")
        trainer.forward_backward("p", make_data(seed=step), PPO, 1e6 if step < 2 else 1e-4)
        reports.append(trainer.optim_step("p", STEP))
    assert [report["grad_norm"] > 0 for report in reports] == [False, False, True, True, True, True]
    assert (reports[-1]["steps_skipped"], reports[-1]["loss_scale"]) == (2, INITIAL / 4)
    again = half(tiny_model_dir, lora)
    again.load("p", tmp_path / "saved")
    for step in (4, 5):
        again.forward_backward("p", make_data(seed=step), PPO, 1e-4)
        assert again.optim_step("p", STEP) == reports[step]
    assert_same(weights(again), weights(trainer))
