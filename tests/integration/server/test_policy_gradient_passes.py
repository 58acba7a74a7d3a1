"""Each policy-gradient loss on a model of 2 layers, in float32: equivalent ways to compute are equal, and the gradient is the
slope. What each test prints is its worst deviation (`pytest -rP`)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_tools import VOCABULARY, gradients, make_data, make_trainer, plain_model
from trainer_tools import make_datum as make

from opentinker.client.messages import Datum, LossConfig, PolicySpec, TokenChunk
from opentinker.server.trainer.losses import token_loss
from opentinker.server.trainer.trainer import TorchTrainer

LOSSES = {
    "cross_entropy": LossConfig(name="cross_entropy"),
    "importance_sampling": LossConfig(name="importance_sampling", temperature=0.7),
    "ppo": LossConfig(name="ppo", clip_high=0.28),
    "gspo": LossConfig(name="gspo", clip_low=0.3, clip_high=0.4),
    "cispo": LossConfig(name="cispo", clip_low=1.0, clip_high=0.3, temperature=1.4),
    "k1": LossConfig(name="ppo", kl_coefficient=0.3, kl_estimator="k1"),
    "k2": LossConfig(name="ppo", kl_coefficient=0.3, kl_estimator="k2"),
    "k3": LossConfig(name="ppo", kl_coefficient=0.3, kl_estimator="k3"),
    "entropy": LossConfig(name="ppo", entropy_coefficient=0.2, temperature=0.8),
    "corrected": LossConfig(name="ppo", anchor="proximal", truncate=1.5, mask_sequences=(0.5, 2.0)),
}
EACH = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def data_for(trainer: TorchTrainer, loss: LossConfig) -> list[Datum]:
    """Eight data whose logprobs under others are near the policy's own, so that some ratios are clipped and others are not."""
    data, rng = make_data(), np.random.default_rng(3)
    own = trainer.forward("p", data, temperature=loss.temperature)["logprobs"]

    def near(logprobs: np.ndarray, weights: np.ndarray, scale: float) -> np.ndarray:
        return np.minimum(logprobs + rng.normal(0, scale, len(logprobs)), -1e-3).astype(np.float32) * weights

    changed = []
    for datum, logprobs in zip(data, own, strict=True):
        arrays = {**datum.arrays, "behaviour_logprobs": near(logprobs, datum.weights, 0.4)}
        arrays["reference_logprobs"] = near(logprobs, datum.weights, 0.5)
        if loss.anchor == "proximal":
            arrays["proximal_logprobs"] = near(logprobs, datum.weights, 0.3)
        changed.append(replace(datum, arrays=arrays))
    return changed


def trainer_of(model_dir: Path, pack_tokens: int = 64) -> TorchTrainer:
    trainer = make_trainer(model_dir, pack_tokens=pack_tokens)
    trainer.create_policy("p", PolicySpec())
    return trainer


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference as a fraction of the tensor's largest entry."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max() / other[n].abs().max().clamp(min=1e-6)) for n in one)


def padded_loss(model: torch.nn.Module, data: list[Datum], loss: LossConfig) -> torch.Tensor:
    """The loss over one batch padded on the right, by the model's own forward pass, with the formulas in float64."""
    longest = max(len(datum) for datum in data)
    tokens, mask = (torch.zeros(len(data), longest, dtype=torch.int64) for _ in range(2))
    for row, datum in enumerate(data):
        tokens[row, : len(datum)] = torch.from_numpy(datum.tokens.astype(np.int64))
        mask[row, : len(datum)] = 1
    logits = model(tokens, attention_mask=mask).logits.double() / loss.temperature
    logprobs = torch.log_softmax(logits, -1)
    where = [(row, int(step)) for row, datum in enumerate(data) for step in np.flatnonzero(datum.weights)]
    rows, steps = (torch.tensor(part) for part in zip(*where, strict=True))
    targets = torch.tensor([int(data[row].targets[step]) for row, step in where])
    arrays = {
        name: torch.tensor([float(data[row].arrays[name][step]) for row, step in where], dtype=torch.float64)
        for name in data[0].arrays
    }
    chosen = logprobs[rows, steps]
    entropies = -(chosen.exp() * chosen).sum(-1) if loss.entropy_coefficient else None
    return token_loss(loss, chosen.gather(1, targets[:, None])[:, 0], arrays, rows, entropies)[0]


@EACH
def test_packed_is_padded_and_is_one_by_one_under_any_budget(tiny_model_dir: Path, loss: LossConfig) -> None:
    model = plain_model(tiny_model_dir)
    data = data_for(trainer_of(tiny_model_dir), loss)
    expected = padded_loss(model, data, loss)
    expected.backward()  # type: ignore[no-untyped-call]
    slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = []
    for budget, parts in [(1024, [data]), (40, [data]), (16, [data]), (64, [[datum] for datum in data])]:
        trainer = trainer_of(tiny_model_dir, budget)
        total = sum(trainer.forward_backward("p", part, loss, 1.0).loss for part in parts)
        found.append((abs(total - float(expected.detach())) / abs(float(expected.detach())), apart(gradients(trainer), slopes)))
    losses, slopes_apart = (max(part) for part in zip(*found, strict=True))
    print(f"worst deviation: loss {losses:.1e}, gradient {slopes_apart:.1e}")
    assert losses < 1e-5
    assert slopes_apart < 1e-5


def norm(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Llama's, without its cast to float32."""
    return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


@EACH
def test_finite_differences_agree_with_the_gradient(
    tiny_model_dir: Path, loss: LossConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along random directions, of the model in float64."""
    trainer = trainer_of(tiny_model_dir)
    data = data_for(trainer, loss)
    trainer.forward_backward("p", data, loss, 1.0)
    gradient = gradients(trainer)
    if loss.name == "cispo":  # its weight, the clipped ratio, counts as a constant: -c A l is a cross entropy weighted with c A
        own = trainer.forward("p", data, temperature=loss.temperature)["logprobs"]
        for datum, logprobs in zip(data, own, strict=True):
            ratio = np.exp(logprobs - datum.arrays["behaviour_logprobs"])
            datum.arrays["weights"] *= datum.arrays["advantages"] * np.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
        loss = LossConfig(name="cross_entropy", temperature=loss.temperature)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", norm)
    model = plain_model(tiny_model_dir).double()
    parameters, generator, step, worst = dict(model.named_parameters()), torch.Generator().manual_seed(0), 1e-6, 0.0
    for _ in range(3):
        direction = {n: torch.randn(p.shape, generator=generator) * p.detach().abs().mean() for n, p in parameters.items()}
        slope = sum(float((gradient[n] * d).sum()) for n, d in direction.items())
        ends = []
        with torch.no_grad():
            for move in (step, -2 * step):
                for name, p in parameters.items():
                    p += move * direction[name]
                ends.append(float(padded_loss(model, data, loss)))
            for name, p in parameters.items():
                p += step * direction[name]
        worst = max(worst, abs((ends[0] - ends[1]) / (2 * step) - slope) / max(abs(slope), 1.0))
    print(f"worst deviation: {worst:.1e} of the slope")
    assert worst < 1e-4


def unweighted(tokens: int) -> Datum:
    ids, zeros = np.full(tokens, 5, np.int32), np.zeros(tokens, np.float32)
    names = ("weights", "advantages", "behaviour_logprobs", "proximal_logprobs", "reference_logprobs")
    return Datum((TokenChunk(ids),), ids, dict.fromkeys(names, zeros))


def without_proximal(datum: Datum, loss: LossConfig) -> Datum:
    kept = {name: a for name, a in datum.arrays.items() if name != "proximal_logprobs" or loss.anchor == "proximal"}
    return replace(datum, arrays=kept)


@EACH
def test_what_holds_nothing_to_learn_has_loss_0_and_no_gradient(tiny_model_dir: Path, loss: LossConfig) -> None:
    trainer = trainer_of(tiny_model_dir)
    for data in ([], [unweighted(1)], [unweighted(4), unweighted(0)]):
        result = trainer.forward_backward("p", [without_proximal(d, loss) for d in data], loss, 1.0)
        assert (result.loss, result.metrics["tokens"]) == (0.0, 0.0)
        assert gradients(trainer) == {}


@EACH
def test_an_answer_of_one_token_is_the_plain_loss_beside_prompts_without_any(tiny_model_dir: Path, loss: LossConfig) -> None:
    rng, trainer, model = np.random.default_rng(0), trainer_of(tiny_model_dir), plain_model(tiny_model_dir)
    one = make(rng, rng.integers(3, VOCABULARY, 6), 1)
    behaviour = one.arrays["behaviour_logprobs"]
    arrays = {**one.arrays, "reference_logprobs": behaviour, "proximal_logprobs": behaviour}
    one = without_proximal(replace(one, arrays=arrays), loss)
    expected = padded_loss(model, [one], loss)
    expected.backward()  # type: ignore[no-untyped-call]
    result = trainer.forward_backward("p", [without_proximal(unweighted(5), loss), one], loss, 1.0)
    assert result.metrics["tokens"] == 1.0
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert apart(gradients(trainer), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) < 1e-5
