"""What `forward` computes besides logprobs: entropies and the reference's logprobs, against plain transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_tools import assert_same, gradients, make_data, make_trainer, plain_model, weights
from transformers import AutoModelForCausalLM, Gemma2Config

from opentinker.client.messages import AdamParams, Datum, FloatArray, LossConfig, PolicySpec, TokenScore
from opentinker.errors import InvalidRequestError
from opentinker.server.trainer.trainer import TorchTrainer

PPO = LossConfig(name="ppo")
KINDS = pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])


def make(model_dir: Path, lora: dict[str, Any] | None, *policies: str, dtype: str = "float32") -> TorchTrainer:
    trainer = make_trainer(model_dir, dtype=dtype)
    for seed, policy in enumerate(policies or ("p",)):
        trainer.create_policy(policy, PolicySpec(lora=lora, seed=seed))
    return trainer


def train(trainer: TorchTrainer, policy: str = "p", steps: int = 2) -> None:
    for step in range(steps):
        trainer.forward_backward(policy, make_data(seed=step), PPO, 0.1)
        trainer.optim_step(policy, AdamParams(learning_rate=1e-2))


def scores(trainer: TorchTrainer, *compute: TokenScore, policy: str = "p", temperature: float = 1.0) -> list[list[FloatArray]]:
    found = trainer.forward(policy, make_data(), compute=compute, temperature=temperature)
    assert set(found) == set(compute)
    return [found[name] for name in compute]


def assert_equal(one: list[FloatArray], other: list[FloatArray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def plain_entropy(model: torch.nn.Module, datum: Datum, temperature: float) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
    logprobs = torch.log_softmax(logits.double() / temperature, -1)
    return -(logprobs.exp() * logprobs).sum(-1).numpy() * datum.weights


@KINDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_stays_the_model_before_any_training_bit_for_bit(
    tiny_model_dir: Path, lora: dict[str, Any] | None, dtype: str
) -> None:
    trainer = make(tiny_model_dir, lora, dtype=dtype)
    (before,) = scores(trainer, "logprobs", temperature=0.8)
    (fresh,) = scores(make(tiny_model_dir, None, dtype=dtype), "logprobs", temperature=0.8)
    train(trainer)
    logprobs, reference = scores(trainer, "logprobs", "reference_logprobs", temperature=0.8)
    assert_equal(reference, before)
    assert_equal(reference, fresh)
    assert max(np.abs(a - b).max() for a, b in zip(logprobs, reference, strict=True)) > 0.01
    train(trainer)
    assert_equal(scores(trainer, "reference_logprobs", temperature=0.8)[0], before)


def test_the_reference_of_an_adapter_has_no_adapter_on_and_costs_no_memory(tiny_model_dir: Path) -> None:
    trainer = make(tiny_model_dir, {"rank": 4}, "p", "q")
    (before,) = scores(trainer, "logprobs")
    train(trainer, "p")
    train(trainer, "q")
    for policy in ("p", "q"):
        assert_equal(scores(trainer, "reference_logprobs", policy=policy)[0], before)
    assert trainer._reference is None


def test_the_reference_of_a_full_policy_is_loaded_once_and_goes_with_the_policy(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, loads = make(tiny_model_dir, None), []
    load = trainer._load_base
    monkeypatch.setattr(trainer, "_load_base", lambda: loads.append(1) or load())
    before = weights(trainer)
    train(trainer)
    scores(trainer, "logprobs", "entropy")
    assert trainer.forward("p", [], compute=("reference_logprobs",)) == {"reference_logprobs": []}
    assert loads == []
    for _ in range(2):
        scores(trainer, "reference_logprobs")
    assert loads == [1]
    trainer.delete_policy("p")
    assert trainer._reference is None
    trainer.create_policy("q", PolicySpec())
    assert_same(weights(trainer, "q"), before)
    trainer.forward_backward("q", make_data(), PPO, 1.0)
    assert gradients(trainer, "q")


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_entropies_are_those_of_plain_transformers(tiny_model_dir: Path, temperature: float) -> None:
    trainer, model = make(tiny_model_dir, None), plain_model(tiny_model_dir)
    (entropies,) = scores(trainer, "entropy", temperature=temperature)
    for datum, entropy in zip(make_data(), entropies, strict=True):
        np.testing.assert_allclose(entropy, plain_entropy(model, datum, temperature), atol=2e-5)
        assert entropy.dtype == np.float32


def test_entropies_are_the_trained_policys_also_with_an_adapter(tiny_model_dir: Path) -> None:
    trainer, model = make(tiny_model_dir, {"rank": 4}), plain_model(tiny_model_dir)
    train(trainer)
    model.load_state_dict(weights(trainer))
    for datum, entropy in zip(make_data(), scores(trainer, "entropy")[0], strict=True):
        np.testing.assert_allclose(entropy, plain_entropy(model, datum, 1.0), atol=2e-5)


def test_a_soft_cap_counts_in_the_entropy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    config = Gemma2Config(
        **sizes,
        vocab_size=512,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attn_logit_softcapping=None,
        final_logit_softcapping=2.0,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0.0, 1.0)
    model.save_pretrained(tmp_path)
    trainer, model = make(tmp_path, None), plain_model(tmp_path)
    for datum, entropy in zip(make_data(), scores(trainer, "entropy", temperature=0.7)[0], strict=True):
        np.testing.assert_allclose(entropy, plain_entropy(model, datum, 0.7), atol=2e-5)


@KINDS
def test_what_is_computed_together_is_what_is_computed_apart(tiny_model_dir: Path, lora: dict[str, Any] | None) -> None:
    trainer = make(tiny_model_dir, lora)
    train(trainer)
    names: tuple[TokenScore, ...] = ("logprobs", "reference_logprobs", "entropy")
    for name, together in zip(names, scores(trainer, *names), strict=True):
        assert_equal(together, scores(trainer, name)[0])
        for datum, score in zip(make_data(), together, strict=True):
            assert not score[datum.weights == 0].any()
            assert score[datum.weights != 0].all()


def test_the_policys_logprobs_and_entropies_come_from_one_pass(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, passes = make(tiny_model_dir, {"rank": 4}), []
    hidden = trainer._model._hidden
    monkeypatch.setattr(trainer._model, "_hidden", lambda pack: passes.append(pack) or hidden(pack))
    counts = []
    names: list[tuple[TokenScore, ...]] = [
        ("logprobs",),
        ("entropy",),
        ("logprobs", "entropy"),
        ("logprobs", "reference_logprobs", "entropy"),
    ]
    for compute in names:
        passes.clear()
        scores(trainer, *compute)
        counts.append(len(passes))
    assert counts == [counts[0], counts[0], counts[0], 2 * counts[0]]


@KINDS
def test_a_forward_leaves_no_gradient_and_no_trace_in_the_weights(tiny_model_dir: Path, lora: dict[str, Any] | None) -> None:
    trainer = make(tiny_model_dir, lora)
    train(trainer)
    before = weights(trainer)
    scores(trainer, "logprobs", "reference_logprobs", "entropy")
    assert gradients(trainer) == {}
    assert_same(weights(trainer), before)


def test_values_are_refused_before_anything_is_computed(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tiny_model_dir, None)
    monkeypatch.setattr(trainer._model, "_hidden", lambda pack: 1 / 0)
    with pytest.raises(InvalidRequestError, match=r"policy p has no value head.*nothing was computed"):
        scores(trainer, "logprobs", "values")
