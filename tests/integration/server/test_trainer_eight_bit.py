"""A policy trained with 8-bit moments."""

from pathlib import Path

from trainer_tools import assert_same, make_data, make_trainer, weights

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.server.trainer.eight_bit import EightBitOptimizer
from opentinker.server.trainer.trainer import TorchTrainer

LOSS, STEP = LossConfig(name="cross_entropy"), AdamParams(learning_rate=3e-3)


def trainer_of(model_dir: Path) -> TorchTrainer:
    trainer = make_trainer(model_dir, optimizer="adamw_8bit")
    trainer.create_policy("p", PolicySpec())
    return trainer


def test_it_learns_and_resumes_bit_for_bit(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer, data = trainer_of(tiny_model_dir), make_data()
    assert isinstance(trainer._policies["p"].optimizer, EightBitOptimizer)
    losses = []
    for step in range(5):
        if step == 3:
            trainer.save("p", tmp_path / "saved")
        losses.append(trainer.forward_backward("p", data, LOSS, 0.01).loss)
        trainer.optim_step("p", STEP)
    assert losses == sorted(losses, reverse=True)
    again = trainer_of(tiny_model_dir)
    again.load("p", tmp_path / "saved")
    for step in (3, 4):
        assert again.forward_backward("p", data, LOSS, 0.01).loss == losses[step]
        again.optim_step("p", STEP)
    assert_same(weights(again), weights(trainer))
