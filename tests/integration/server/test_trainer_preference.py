"""Preference losses in float32 on a tiny model: equal however they are packed, and equal to plain transformers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_tools import VOCABULARY, assert_same, gradients, make_trainer, plain_logprobs, plain_model, without_effort

from opentinker.client.messages import AdamParams, Datum, LossConfig, PolicySpec, TokenChunk
from opentinker.errors import CheckpointError, InvalidRequestError
from opentinker.server.trainer.checkpoint import write_checkpoint
from opentinker.server.trainer.trainer import TorchTrainer

DPO = LossConfig(name="dpo", beta=0.5, label_smoothing=0.1)
IPO = LossConfig(name="ipo", beta=0.3)
BRADLEY_TERRY = LossConfig(name="bradley_terry", centring_coefficient=0.05)
LOSSES = pytest.mark.parametrize("loss", [DPO, IPO, BRADLEY_TERRY], ids=lambda loss: loss.name)


def make_pairs(pairs: int = 4, *, seed: int = 0) -> list[Datum]:
    """Answers of 1 to 9 tokens to prompts of 4 to 11, two pairs of which share theirs; references near the tiny model's."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCABULARY, int(rng.integers(4, 12))) for _ in range(pairs - 1)]
    data = []
    for prompt in [*prompts, prompts[0]]:
        for _ in range(2):
            tokens = np.concatenate([prompt, rng.integers(3, VOCABULARY, int(rng.integers(1, 10)))]).astype(np.int32)
            weights = (np.arange(len(tokens) - 1) >= len(prompt) - 1).astype(np.float32)
            reference = weights * rng.uniform(-7, -5.5, len(weights)).astype(np.float32)
            arrays = {"weights": weights, "reference_logprobs": reference, "margins": 0.2 * weights}
            data.append(Datum((TokenChunk(tokens[:-1]),), tokens[1:], arrays))
    return data


DATA = make_pairs()


def make(model_dir: Path, loss: LossConfig, pack_tokens: int = 64, lora: dict[str, Any] | None = None) -> TorchTrainer:
    trainer = make_trainer(model_dir, pack_tokens=pack_tokens)
    head = "scalar" if loss.name == "bradley_terry" else "lm"
    trainer.create_policy("p", PolicySpec(lora=lora, seed=3, head=head))
    if head == "scalar":  # from 0 the model itself would get no gradient
        weight = trainer._policies["p"].head.weight  # type: ignore[union-attr]
        with torch.no_grad():
            weight.copy_(torch.linspace(-0.3, 0.3, weight.numel())[None])
    return trainer


def run(trainer: TorchTrainer, loss: LossConfig, data: Sequence[Datum] = DATA) -> tuple[Any, dict[str, torch.Tensor]]:
    return trainer.forward_backward("p", data, loss, 0.25), gradients(trainer)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@LOSSES
def test_the_token_budget_and_the_order_of_pairs_change_nothing(tiny_model_dir: Path, loss: LossConfig, lora: Any) -> None:
    first, gradient = run(make(tiny_model_dir, loss, lora=lora), loss)
    for pack_tokens in (16, 40, 1024):
        result, other = run(make(tiny_model_dir, loss, pack_tokens, lora), loss)
        assert result.loss == pytest.approx(first.loss, rel=1e-5)
        assert without_effort(result.metrics) == pytest.approx(without_effort(first.metrics), rel=1e-4, abs=1e-5)
        assert_same(other, gradient, relative=1e-5)
    shuffled = [datum for pair in (2, 0, 3, 1) for datum in DATA[2 * pair : 2 * pair + 2]]
    result, other = run(make(tiny_model_dir, loss, lora=lora), loss, shuffled)
    assert result.loss == first.loss
    assert_same(other, gradient)


@LOSSES
def test_a_batch_is_its_pairs_one_by_one(tiny_model_dir: Path, loss: LossConfig) -> None:
    whole, gradient = run(make(tiny_model_dir, loss), loss)
    trainer = make(tiny_model_dir, loss)
    parts = [trainer.forward_backward("p", DATA[start : start + 2], loss, 0.25) for start in range(0, len(DATA), 2)]
    assert whole.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-5)
    assert_same(gradients(trainer), gradient, relative=1e-5)


@pytest.mark.parametrize("loss", [DPO, IPO], ids=lambda loss: loss.name)
def test_loss_and_gradients_are_those_of_plain_autograd(tiny_model_dir: Path, loss: LossConfig) -> None:
    result, gradient = run(make(tiny_model_dir, loss), loss)
    model, total = plain_model(tiny_model_dir), torch.zeros(())
    ratios = []
    for datum in DATA:
        weights, reference = (torch.from_numpy(datum.arrays[name]) for name in ("weights", "reference_logprobs"))
        ratio = (weights * (plain_logprobs(model, datum) - reference)).sum()
        ratios.append(ratio / weights.sum() if loss.name == "ipo" else ratio)
    for chosen, rejected in zip(ratios[0::2], ratios[1::2], strict=True):
        if loss.name == "ipo":
            total = total + (chosen - rejected - 1 / (2 * loss.beta)) ** 2
        else:
            h, e = loss.beta * (chosen - rejected), loss.label_smoothing
            total = total - (1 - e) * torch.log(torch.sigmoid(h)) - e * torch.log(torch.sigmoid(-h))
    (0.25 * total).backward()  # type: ignore[no-untyped-call]
    assert result.loss == pytest.approx(0.25 * float(total.detach()), rel=1e-5)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same(gradient, expected, relative=1e-4)


@LOSSES
def test_finite_differences_agree_with_the_gradient(tiny_model_dir: Path, loss: LossConfig) -> None:
    trainer = make(tiny_model_dir, loss)
    _, gradient = run(trainer, loss)
    parameters = trainer._policies["p"].optimizer.parameters
    generator = torch.Generator().manual_seed(0)
    direction = {n: torch.randn(p.shape, generator=generator) * p.detach().abs().mean() for n, p in parameters.items()}
    slope = sum(float((gradient[n] * d).sum()) for n, d in direction.items() if n in gradient)
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, p in parameters.items():
                p += sign * 1e-4 * direction[name]
        losses.append(trainer.forward_backward("p", DATA, loss, 0.25).loss)
        with torch.no_grad():
            for name, p in parameters.items():
                p -= sign * 1e-4 * direction[name]
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(slope, rel=0.03, abs=1e-3)


@LOSSES
def test_training_tells_the_pairs_apart(tiny_model_dir: Path, loss: LossConfig) -> None:
    trainer, data = make(tiny_model_dir, loss), DATA[:2]
    if loss.name != "bradley_terry":
        now = trainer.forward("p", data)["logprobs"]
        data = [replace(d, arrays={**d.arrays, "reference_logprobs": own}) for d, own in zip(data, now, strict=True)]
    results = []
    for _ in range(6):
        results.append(trainer.forward_backward("p", data, loss, 1.0))
        trainer.optim_step("p", AdamParams(learning_rate=3e-3))
    assert results[-1].loss < results[0].loss
    assert results[-1].metrics["margin_sum"] > results[0].metrics["margin_sum"]
    assert results[-1].metrics["correct_sum"] == 1.0


def test_data_that_are_no_pairs_leave_the_policy_as_it_was(tiny_model_dir: Path) -> None:
    trainer = make(tiny_model_dir, DPO)
    for data in (DATA[:3], [DATA[0], DATA[2], *DATA[4:]]):
        with pytest.raises(InvalidRequestError, match=r"pair"):
            trainer.forward_backward("p", data, DPO, 1.0)
    assert gradients(trainer) == {}


def test_a_loss_of_the_other_head_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(InvalidRequestError, match="scalar head"):
        make(tiny_model_dir, DPO).forward_backward("p", DATA, BRADLEY_TERRY, 1.0)
    with pytest.raises(InvalidRequestError, match="is a loss of logprobs"):
        make(tiny_model_dir, BRADLEY_TERRY).forward_backward("p", DATA, DPO, 1.0)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_a_reward_model_begins_with_what_a_policy_has_learnt_and_a_head_of_zero(
    tiny_model_dir: Path, tmp_path: Path, lora: Any
) -> None:
    taught = make(tiny_model_dir, DPO, lora=lora)
    for _ in range(2):
        taught.forward_backward("p", DATA, DPO, 1.0)
        taught.optim_step("p", AdamParams(learning_rate=1e-2))
    write_checkpoint(tmp_path / "taught@1", lambda empty: taught.save("p", empty))
    judge = make(tiny_model_dir, BRADLEY_TERRY, lora=lora)
    judge.load("p", tmp_path / "taught@1", weights_only=True)
    learnt, began = taught._policies["p"].optimizer.weights(), judge._policies["p"].optimizer.weights()
    head = [name for name in began if name.endswith("score.weight")]
    assert len(head) == 1
    assert not began[head[0]].any()
    for name in began.keys() - head:
        assert torch.equal(began[name], learnt[name]), name
    with pytest.raises(CheckpointError, match="its head is None, not scalar"):
        judge.load("p", tmp_path / "taught@1")
    write_checkpoint(tmp_path / "judge@0", lambda empty: judge.save("p", empty))
    with pytest.raises(CheckpointError, match="its head is scalar, not None"):
        taught.load("p", tmp_path / "judge@0", weights_only=True)
