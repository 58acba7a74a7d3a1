"""Passes of the trainer in float32 on a tiny model: equivalent ways to compute are equal, and equal to plain transformers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_tools import (
    assert_same,
    gradients,
    make_data,
    make_datum,
    make_trainer,
    plain_logprobs,
    plain_loss,
    plain_model,
    weights,
)

from opentinker.client.messages import AdamParams, Datum, LossConfig, PolicySpec, TokenChunk
from opentinker.errors import ConflictError, InvalidRequestError, NotFoundError, TrainerError, UnknownModelError
from opentinker.server.trainer import prefixes
from opentinker.server.trainer.trainer import TorchTrainer

PPO = LossConfig(name="ppo")
LOSSES = [
    LossConfig(name="cross_entropy"),
    LossConfig(name="importance_sampling"),
    PPO,
    LossConfig(name="ppo", temperature=0.7),
]


def full_trainer(model_dir: Path, pack_tokens: int = 64) -> TorchTrainer:
    trainer = make_trainer(model_dir, pack_tokens=pack_tokens)
    trainer.create_policy("p", PolicySpec())
    return trainer


@pytest.fixture(scope="module")
def shared(tiny_model_dir: Path) -> TorchTrainer:
    """For tests that leave its gradients and weights alone."""
    return full_trainer(tiny_model_dir)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_plain_transformers(shared: TorchTrainer, tiny_model_dir: Path, temperature: float) -> None:
    data, model = make_data(), plain_model(tiny_model_dir)
    for datum, logprobs in zip(data, shared.forward("p", data, temperature=temperature)["logprobs"], strict=True):
        expected = plain_logprobs(model, datum, temperature).detach().numpy() * datum.weights
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)
        assert logprobs.dtype == np.float32


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_loss_and_gradients_are_those_of_plain_autograd(tiny_model_dir: Path, loss: LossConfig) -> None:
    trainer, model, data = full_trainer(tiny_model_dir), plain_model(tiny_model_dir), make_data()
    result = trainer.forward_backward("p", data, loss, 0.25)
    expected = plain_loss(model, data, loss) * 0.25
    expected.backward()  # type: ignore[no-untyped-call]
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert result.metrics["loss_sum"] == pytest.approx(4 * result.loss)
    assert result.metrics["tokens"] == sum(d.weights.sum() for d in data)
    reference = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same(gradients(trainer), reference, relative=1e-4)


@pytest.mark.parametrize("pack_tokens", [16, 40, 1024])
def test_the_size_of_packs_changes_nothing(tiny_model_dir: Path, pack_tokens: int) -> None:
    data = make_data()
    one, other = full_trainer(tiny_model_dir, 64), full_trainer(tiny_model_dir, pack_tokens)
    first, second = (t.forward_backward("p", data, PPO, 1.0) for t in (one, other))
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    for a, b in zip(first.logprobs, second.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert_same(gradients(one), gradients(other), relative=1e-5)


def test_a_batch_is_its_data_one_by_one(tiny_model_dir: Path) -> None:
    data = make_data()
    together, apart = full_trainer(tiny_model_dir), full_trainer(tiny_model_dir)
    whole = together.forward_backward("p", data, PPO, 0.125)
    parts = [apart.forward_backward("p", [datum], PPO, 0.125) for datum in data]
    assert whole.loss == pytest.approx(sum(p.loss for p in parts), rel=1e-5)
    assert whole.metrics["mismatch_kl_sum"] == pytest.approx(sum(p.metrics["mismatch_kl_sum"] for p in parts), rel=1e-4)
    assert whole.metrics["ratio_max"] == pytest.approx(max(p.metrics["ratio_max"] for p in parts), rel=1e-4)
    assert_same(gradients(together), gradients(apart), relative=1e-5)


def test_a_shared_prompt_is_a_repeated_prompt(tiny_model_dir: Path) -> None:
    # A first token that differs keeps prompts apart; weights on the branches only make the rest of the data equal.
    data = make_data(groups=1, size=4)
    shared, repeated = full_trainer(tiny_model_dir, 512), full_trainer(tiny_model_dir, 16)
    for trainer in (shared, repeated):
        trainer.forward_backward("p", data, PPO, 1.0)
    assert_same(gradients(shared), gradients(repeated), relative=1e-5)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_shared_prefix_is_a_repeated_prefix(
    tiny_model_dir: Path, lora: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    system, examples = rng.integers(3, 512, 30), rng.integers(3, 512, 20)
    starts = [system, np.concatenate([system, examples])]
    prompts = [np.concatenate([start, rng.integers(3, 512, 3 + i)]) for i, start in enumerate(starts * 2)]
    data = [make_datum(rng, prompt, int(rng.integers(1, 9))) for prompt in prompts for _ in range(2)]
    found = []
    for shortest in (16, 1000):
        monkeypatch.setattr(prefixes, "MIN_PREFIX", shortest)
        monkeypatch.setattr(prefixes, "MIN_SAVED", shortest)
        trainer = make_trainer(tiny_model_dir, pack_tokens=512)
        trainer.create_policy("p", PolicySpec(lora=lora, seed=3))
        trainer.forward_backward("p", make_data(), PPO, 0.1)
        trainer.optim_step("p", AdamParams(learning_rate=1e-3))
        found.append((trainer.forward_backward("p", data, PPO, 0.125), trainer))
    (shared, one), (repeated, other) = found
    assert shared.loss == pytest.approx(repeated.loss, rel=1e-5)
    for a, b in zip(shared.logprobs, repeated.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert_same(gradients(one), gradients(other), relative=1e-5)
    branches = sum(int(d.weights.sum()) - 1 for d in data)
    assert shared.metrics["computed_tokens"] == 30 + 20 + sum(len(prompt) - 30 for prompt in prompts) - 2 * 20 + branches
    assert repeated.metrics["computed_tokens"] == sum(map(len, prompts)) + branches
    for result in (shared, repeated):
        assert result.metrics["sequence_tokens"] == sum(map(len, data))
        assert (result.metrics["passes"], result.metrics["pass_tokens_max"]) == (1, result.metrics["computed_tokens"])


def test_the_order_of_the_data_changes_no_bit(tiny_model_dir: Path) -> None:
    data = make_data()
    order = np.random.default_rng(1).permutation(len(data))
    one, other = full_trainer(tiny_model_dir), full_trainer(tiny_model_dir)
    first = one.forward_backward("p", data, PPO, 1.0)
    second = other.forward_backward("p", [data[i] for i in order], PPO, 1.0)
    assert first.loss == second.loss
    for at, i in enumerate(order):
        np.testing.assert_array_equal(second.logprobs[at], first.logprobs[i])
    assert_same(gradients(one), gradients(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_repeated_run_is_equal_bit_for_bit(tiny_model_dir: Path, dtype: str, lora: dict[str, int] | None) -> None:
    ends = []
    for _ in range(2):
        trainer = make_trainer(tiny_model_dir, dtype=dtype)
        trainer.create_policy("p", PolicySpec(lora=lora, seed=3))
        for step in range(2):
            trainer.forward_backward("p", make_data(seed=step), PPO, 0.1)
            trainer.optim_step("p", AdamParams(learning_rate=1e-3))
        ends.append(weights(trainer))
    assert_same(*ends)


def test_training_lowers_the_loss(tiny_model_dir: Path) -> None:
    trainer, data = full_trainer(tiny_model_dir), make_data()
    losses = []
    for _ in range(5):
        losses.append(trainer.forward_backward("p", data, LossConfig(name="cross_entropy"), 0.01).loss)
        assert trainer.optim_step("p", AdamParams(learning_rate=3e-3))["grad_norm"] > 0
    assert losses == sorted(losses, reverse=True)


def test_with_learning_rate_zero_no_weight_moves(tiny_model_dir: Path) -> None:
    trainer = full_trainer(tiny_model_dir)
    before = weights(trainer)
    trainer.forward_backward("p", make_data(), PPO, 1.0)
    trainer.optim_step("p", AdamParams(learning_rate=0.0, weight_decay=0.1))
    assert_same(weights(trainer), before)


def unweighted(tokens: int) -> Datum:
    ids = np.full(tokens, 5, np.int32)
    zeros = np.zeros(tokens, np.float32)
    return Datum((TokenChunk(ids),), ids, {"weights": zeros, "advantages": zeros, "behaviour_logprobs": zeros})


@pytest.mark.parametrize("data", [[], [unweighted(1)], [unweighted(4), unweighted(0)]])
def test_without_weighted_targets_there_is_no_loss_and_no_gradient(shared: TorchTrainer, data: list[Datum]) -> None:
    result = shared.forward_backward("p", data, PPO, 1.0)
    assert (result.loss, result.metrics["tokens"]) == (0.0, 0.0)
    assert [len(p) for p in result.logprobs] == [len(d) for d in data]
    assert gradients(shared) == {}


def test_a_datum_of_one_token_and_one_longer_than_a_pack_work(shared: TorchTrainer, tiny_model_dir: Path) -> None:
    rng, model = np.random.default_rng(0), plain_model(tiny_model_dir)
    data = [make_datum(rng, np.array([9]), 1), make_datum(rng, np.array([9, 8]), 150)]
    for datum, logprobs in zip(data, shared.forward("p", data)["logprobs"], strict=True):
        np.testing.assert_allclose(logprobs, plain_logprobs(model, datum).detach().numpy() * datum.weights, atol=1e-4)


def with_arrays(datum: Datum, **arrays: np.ndarray | None) -> Datum:
    merged = {**datum.arrays, **arrays}
    return replace(datum, arrays={name: array for name, array in merged.items() if array is not None})


def out_of_vocabulary(datum: Datum) -> Datum:
    return replace(datum, targets=np.where(datum.weights > 0, 512, datum.targets).astype(np.int32))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (out_of_vocabulary, "datum 3: targets are outside the vocabulary of 512"),
        (lambda d: replace(d, chunks=(TokenChunk(d.tokens + 512),)), "datum 3: tokens are outside"),
        (lambda d: with_arrays(d, advantages=None), "datum 3 has no 'advantages'"),
        (lambda d: make_datum(np.random.default_rng(0), np.array([1]), 600), "datum 3 has 600 tokens, the model takes 512"),
    ],
)
def test_wrong_data_are_refused_before_anything_is_computed(shared: TorchTrainer, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    data = make_data()
    data[3] = spoil(data[3])
    for call in (lambda: shared.forward_backward("p", data, PPO, 1.0), lambda: shared.check("p", data, PPO)):
        with pytest.raises(InvalidRequestError, match=message):
            call()
    assert gradients(shared) == {}


def test_a_pass_that_fails_midway_leaves_earlier_gradients_as_they_were(tiny_model_dir: Path) -> None:
    trainer, data = full_trainer(tiny_model_dir, 16), make_data()
    trainer.forward_backward("p", data, PPO, 1.0)
    before = gradients(trainer)
    spoiled = [*data[:-1], with_arrays(data[-1], advantages=np.full(len(data[-1]), np.inf, np.float32))]
    with pytest.raises(TrainerError, match="no gradient was added"):
        trainer.forward_backward("p", spoiled, PPO, 1.0)
    assert_same(gradients(trainer), before)


def test_full_weights_name_every_parameter_and_the_tied_head(shared: TorchTrainer, tiny_model_dir: Path) -> None:
    sent = weights(shared)
    assert sent.keys() == {*dict(plain_model(tiny_model_dir).named_parameters()), "lm_head.weight"}
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])


def test_an_untied_head_is_trained_like_plain_autograd(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = plain_model(tiny_model_dir)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.9)
    model.save_pretrained(tmp_path)
    trainer, data = full_trainer(tmp_path), make_data()
    trainer.forward_backward("p", data, PPO, 1.0)
    plain_loss(model, data, PPO).backward()  # type: ignore[no-untyped-call]
    reference = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert "lm_head.weight" in reference
    assert_same(gradients(trainer), reference, relative=1e-4)


def test_a_full_policy_has_the_model_to_itself(tiny_model_dir: Path) -> None:
    trainer = full_trainer(tiny_model_dir)
    for spec in (PolicySpec(), PolicySpec(lora={"rank": 2})):
        with pytest.raises(ConflictError, match="to itself"):
            trainer.create_policy("q", spec)
    with pytest.raises(ConflictError, match="already is"):
        trainer.create_policy("p", PolicySpec())
    with pytest.raises(NotFoundError, match="no policy q"):
        trainer.forward("q", [])


def test_deleting_a_full_policy_restores_the_base_weights(tiny_model_dir: Path) -> None:
    trainer, data = full_trainer(tiny_model_dir), make_data()
    before = weights(trainer)
    trainer.forward_backward("p", data, PPO, 1.0)
    trainer.optim_step("p", AdamParams(learning_rate=1e-2))
    trainer.delete_policy("p")
    trainer.create_policy("q", PolicySpec(lora={"rank": 2}))
    assert_same(weights(trainer, "q"), before)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=str(tmp_path)):
        make_trainer(tmp_path)
