"""Critics and scalar heads in float32 on a tiny model: values are what plain transformers gives, and disturb nobody."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from trainer_tools import assert_same, gradients, make_data, make_trainer, plain_model, weights
from transformers import AutoModelForSequenceClassification

from opentinker.client.messages import AdamParams, Datum, FloatArray, LossConfig, PolicySpec, TokenChunk
from opentinker.errors import CheckpointError, ConflictError, InvalidRequestError
from opentinker.server.trainer.checkpoint import write_checkpoint
from opentinker.server.trainer.trainer import TorchTrainer

PPO = LossConfig(name="ppo")
VALUE = LossConfig(name="value")
CLIPPED = LossConfig(name="value", value_clip=0.8)
ADAM = AdamParams(learning_rate=1e-2)
CRITIC = {"rank": 2, "alpha": 4.0}
KINDS = pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])


def make(model_dir: Path, lora: dict[str, Any] | None, *, pack_tokens: int = 64, **spec: Any) -> TorchTrainer:
    trainer = make_trainer(model_dir, pack_tokens=pack_tokens)
    trainer.create_policy("p", PolicySpec(lora=lora, seed=7, **spec))
    return trainer


def with_returns(data: list[Datum], *, seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    arrays = [{n: rng.normal(size=len(d)).astype(np.float32) * d.weights for n in ("returns", "old_values")} for d in data]
    return [replace(d, arrays={**d.arrays, **new}) for d, new in zip(data, arrays, strict=True)]


DATA = with_returns(make_data())


def values(trainer: TorchTrainer, data: list[Datum] = DATA) -> list[FloatArray]:
    return trainer.forward("p", data, compute=("values",))["values"]


def train_critic(trainer: TorchTrainer, steps: int = 3, loss: LossConfig = VALUE, learning_rate: float = 1e-2) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(trainer.forward_backward("p", DATA, loss, 0.1).loss)
        trainer.optim_step("p", AdamParams(learning_rate=learning_rate), critic=True)
    return losses


def critic_gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    critic = trainer._policies["p"].critic
    assert critic is not None
    return {name: g.clone() for name, g in critic.optimizer.gradients().items()}


def plain_values(model_dir: Path, trainer: TorchTrainer) -> list[FloatArray]:
    """The critic's values by its adapter merged into a plain model, one unpadded sequence at a time."""
    critic = trainer._policies["p"].critic
    assert critic is not None
    model, parameters = plain_model(model_dir), critic.optimizer.parameters
    with torch.no_grad():
        for name, weight in model.named_parameters():
            key = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{key}.lora_A.weight" in parameters:
                weight += parameters[f"{key}.lora_B.weight"] @ parameters[f"{key}.lora_A.weight"] * (4.0 / 2)
        hidden = [model.model(torch.from_numpy(d.tokens.astype(np.int64))[None]).last_hidden_state[0] for d in DATA]
        found = [h @ parameters["score.weight"][0] + parameters["score.bias"] for h in hidden]
    return [v.numpy() * d.weights for v, d in zip(found, DATA, strict=True)]


@KINDS
def test_values_begin_at_zero_and_stay_there_at_learning_rate_zero(tiny_model_dir: Path, lora: dict[str, Any] | None) -> None:
    trainer = make(tiny_model_dir, lora, critic=CRITIC)
    assert not any(v.any() for v in values(trainer))
    assert len(set(train_critic(trainer, learning_rate=0.0))) == 1
    assert not any(v.any() for v in values(trainer))


@KINDS
def test_values_are_those_of_plain_transformers_whatever_the_policy_has_learned(
    tiny_model_dir: Path, lora: dict[str, Any] | None
) -> None:
    trainer = make(tiny_model_dir, lora, critic=CRITIC)
    losses = train_critic(trainer)
    assert losses == sorted(losses, reverse=True)
    before = values(trainer)
    for found, expected, datum in zip(before, plain_values(tiny_model_dir, trainer), DATA, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert found[datum.weights != 0].all()
    trainer.forward_backward("p", DATA, PPO, 0.1)
    trainer.optim_step("p", ADAM)
    assert all(np.array_equal(a, b) for a, b in zip(values(trainer), before, strict=True))


@KINDS
def test_the_policy_is_the_same_bit_for_bit_with_and_without_a_critic(
    tiny_model_dir: Path, lora: dict[str, Any] | None
) -> None:
    alone, judged = make(tiny_model_dir, lora), make(tiny_model_dir, lora, critic=CRITIC)
    for step in range(2):
        data = make_data(seed=step)
        train_critic(judged, 1)
        results = [alone.forward_backward("p", data, PPO, 0.1), judged.forward_backward("p", with_returns(data), PPO, 0.1)]
        judged.forward_backward("p", DATA, CLIPPED, 0.1)
        assert results[0].loss == results[1].loss
        assert_same(gradients(alone), gradients(judged))
        for trainer in (alone, judged):
            trainer.optim_step("p", ADAM)
        assert critic_gradients(judged), "the policy's step is not the critic's"
    assert_same(weights(alone), weights(judged))


@pytest.mark.parametrize("loss", [VALUE, CLIPPED], ids=["plain", "clipped"])
def test_packed_is_one_by_one(tiny_model_dir: Path, loss: LossConfig) -> None:
    packed, apart = (make(tiny_model_dir, {"rank": 4}, pack_tokens=n, critic=CRITIC) for n in (512, 16))
    for trainer in (packed, apart):
        train_critic(trainer, 2)
    one = packed.forward_backward("p", DATA, loss, 0.5)
    parts = [apart.forward_backward("p", [datum], loss, 0.5) for datum in DATA]
    assert one.loss == pytest.approx(sum(p.loss for p in parts), rel=1e-4)
    assert_same(critic_gradients(packed), critic_gradients(apart), relative=1e-4)


@KINDS
@pytest.mark.parametrize("loss", [VALUE, CLIPPED], ids=["plain", "clipped"])
def test_finite_differences_agree_with_the_gradient_of_head_and_adapter(
    tiny_model_dir: Path, lora: dict[str, Any] | None, loss: LossConfig
) -> None:
    trainer = make(tiny_model_dir, lora, critic=CRITIC)
    train_critic(trainer, 3)
    trainer.forward_backward("p", DATA, loss, 1.0)
    gradient, critic = critic_gradients(trainer), trainer._policies["p"].critic
    assert critic is not None
    parameters = critic.optimizer.parameters
    for part in ("lora_A", "lora_B", "score"):
        chosen = {name: p for name, p in parameters.items() if part in name}
        generator = torch.Generator().manual_seed(0)
        # Small steps: the clip is a kink.
        direction = {n: torch.randn(p.shape, generator=generator) * (p.detach().abs().mean() + 1e-3) for n, p in chosen.items()}
        slope = sum(float((gradient[n] * d).sum()) for n, d in direction.items())
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                for name, p in chosen.items():
                    p += sign * 1e-3 * direction[name]
            found.append(trainer.forward_backward("p", DATA, loss, 1.0).loss)
            with torch.no_grad():
                for name, p in chosen.items():
                    p -= sign * 1e-3 * direction[name]
        assert (found[0] - found[1]) / 2e-3 == pytest.approx(slope, rel=0.03, abs=5e-3), part


@KINDS
def test_a_loaded_critic_continues_bit_for_bit(tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None) -> None:
    trainer = make(tiny_model_dir, lora, critic=CRITIC)
    train_critic(trainer)
    write_checkpoint(tmp_path / "c", lambda folder: trainer.save("p", folder))
    resumed = make(tiny_model_dir, lora, critic=CRITIC)
    resumed.forward_backward("p", DATA, VALUE, 1.0)
    resumed.load("p", tmp_path / "c")
    assert critic_gradients(resumed) == {}
    assert train_critic(resumed, 2) == train_critic(trainer, 2)
    assert all(np.array_equal(a, b) for a, b in zip(values(resumed), values(trainer), strict=True))


def test_what_a_run_starts_from_brings_a_critic_of_the_same_form_and_needs_none(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer, bare = make(tiny_model_dir, {"rank": 4}, critic=CRITIC), make(tiny_model_dir, {"rank": 4})
    train_critic(trainer)
    trainer.save("p", tmp_path / "with")
    bare.save("p", tmp_path / "without")
    for folder, other, same in [("with", CRITIC, True), ("with", {"rank": 3}, False), ("without", CRITIC, False)]:
        started = make(tiny_model_dir, {"rank": 4}, critic=other)
        started.load("p", tmp_path / folder, weights_only=True)
        found = values(started)
        assert all(np.array_equal(a, b) for a, b in zip(found, values(trainer), strict=True)) == same
        assert same or not any(v.any() for v in found)
    bare.load("p", tmp_path / "with", weights_only=True)
    with pytest.raises(CheckpointError, match="does not fit: its critic is None"):
        trainer.load("p", tmp_path / "without")


@KINDS
def test_a_deleted_policy_leaves_nothing_of_its_critic(tiny_model_dir: Path, lora: dict[str, Any] | None) -> None:
    trainer = make(tiny_model_dir, lora, critic=CRITIC)
    train_critic(trainer)
    trainer.delete_policy("p")
    trainer.create_policy("p", PolicySpec(lora=lora, critic=CRITIC))
    assert not any(v.any() for v in values(trainer))
    trainer.delete_policy("p")
    trainer.create_policy("p", PolicySpec())
    assert_same(weights(trainer), weights(make(tiny_model_dir, None)))
    with pytest.raises(InvalidRequestError, match=r"no value head.*create it with a critic"):
        values(trainer)


def test_a_loss_of_a_head_that_is_not_there_is_refused(tiny_model_dir: Path) -> None:
    bare, judge = make(tiny_model_dir, {"rank": 4}), make(tiny_model_dir, {"rank": 4}, head="scalar")
    for trainer, loss, message in [(bare, VALUE, "no scalar head for the loss 'value'"), (judge, PPO, "loss of logprobs")]:
        for call in (lambda t, x: t.forward_backward("p", DATA, x, 1.0), lambda t, x: t.check("p", DATA, x)):
            with pytest.raises(InvalidRequestError, match=message):
                call(trainer, loss)
    with pytest.raises(InvalidRequestError, match="has no critic"):
        bare.optim_step("p", ADAM, critic=True)
    with pytest.raises(InvalidRequestError, match="scalar head, so there are no 'logprobs'"):
        judge.forward("p", DATA)
    with pytest.raises(ConflictError, match="cannot be published or sampled"):
        list(judge.full_weights("p"))
    with pytest.raises(InvalidRequestError, match="datum 0 has no 'old_values', which the loss 'value' needs"):
        make(tiny_model_dir, None, critic=CRITIC).check(
            "p", [replace(d, arrays={n: a for n, a in d.arrays.items() if n != "old_values"}) for d in DATA], CLIPPED
        )


def whole(tokens: np.ndarray) -> Datum:
    """A sequence of which the last token's state is scored; its target does not matter."""
    at_end = (np.arange(len(tokens)) == len(tokens) - 1).astype(np.float32)
    return Datum((TokenChunk(tokens),), tokens, {"weights": at_end, "returns": at_end * tokens[0] % 7})


@KINDS
def test_a_reward_model_is_a_sequence_classifier_to_transformers_and_peft(
    tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    trainer = make(tiny_model_dir, lora, head="scalar")
    rng = np.random.default_rng(0)
    data = [whole(rng.integers(3, 512, int(rng.integers(4, 20))).astype(np.int32)) for _ in range(6)]
    losses = []
    for _ in range(8):
        losses.append(trainer.forward_backward("p", data, VALUE, 1 / 6).loss)
        trainer.optim_step("p", AdamParams(learning_rate=1e-2))
    assert losses[-1] < losses[0] / 2
    trainer.save("p", tmp_path / "c")
    folder = tiny_model_dir if lora else tmp_path / "c"
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    if lora:
        model = peft.PeftModel.from_pretrained(model, tmp_path / "c")
    for datum, found in zip(data, values(trainer, data), strict=True):
        with torch.no_grad():
            expected = model.eval()(torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0, 0]
        assert found[-1] == pytest.approx(float(expected), abs=1e-4)
    again = make(tiny_model_dir, lora, head="scalar")
    again.load("p", tmp_path / "c")
    assert all(np.array_equal(a, b) for a, b in zip(values(again, data), values(trainer, data), strict=True))
    with pytest.raises(CheckpointError, match="its head is scalar, not None"):
        make(tiny_model_dir, lora).load("p", tmp_path / "c", weights_only=True)
