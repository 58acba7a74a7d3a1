"""Data and an independent reference for the trainer's tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from opentinker.client.messages import Datum, LossConfig, TokenChunk
from opentinker.config.server import TrainerConfig
from opentinker.server.trainer.trainer import TorchTrainer

VOCABULARY = 512
EFFORT = {"sequence_tokens", "computed_tokens", "passes", "pass_tokens_max"}
"""What a batch took, which depends on how it is packed and shared out."""


def make_datum(rng: np.random.Generator, prompt: np.ndarray, length: int) -> Datum:
    tokens = np.concatenate([prompt, rng.integers(3, VOCABULARY, length)]).astype(np.int32)
    weights = (np.arange(len(tokens) - 1) >= len(prompt) - 1).astype(np.float32)
    arrays = {
        "weights": weights,
        "advantages": weights * np.float32(rng.normal()),
        "behaviour_logprobs": weights * rng.uniform(-7, -5, len(weights)).astype(np.float32),
    }
    return Datum((TokenChunk(tokens[:-1]),), tokens[1:], arrays)


def make_data(groups: int = 2, size: int = 4, *, seed: int = 0) -> list[Datum]:
    """`groups` prompts of 5 to 12 tokens with `size` continuations of 1 to 8 tokens each."""
    rng = np.random.default_rng(seed)
    return [
        make_datum(rng, prompt, int(rng.integers(1, 9)))
        for prompt in (rng.integers(3, VOCABULARY, int(rng.integers(5, 13))) for _ in range(groups))
        for _ in range(size)
    ]


def make_trainer(model_dir: Path, *, dtype: str = "float32", pack_tokens: int = 64, **fields: object) -> TorchTrainer:
    config = TrainerConfig.model_validate({"dtype": dtype, "pack_tokens": pack_tokens, **fields})
    return TorchTrainer(model_dir, config, device="cpu")


def plain_logprobs(model: torch.nn.Module, datum: Datum, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of all targets by the model's own forward pass of one unpadded sequence, [T]."""
    logits = model(torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(datum.targets.astype(np.int64))
    return torch.log_softmax(logits.float() / temperature, -1).gather(1, targets[:, None])[:, 0]


def plain_loss(model: torch.nn.Module, data: Sequence[Datum], loss: LossConfig) -> torch.Tensor:
    """The loss from the formulas in `LossConfig`, datum by datum."""
    total = torch.zeros(())
    for datum in data:
        arrays = {name: torch.from_numpy(array) for name, array in datum.arrays.items()}
        logprobs = plain_logprobs(model, datum, loss.temperature)
        ratio = (logprobs - arrays["behaviour_logprobs"]).exp()
        gain = {
            "cross_entropy": logprobs,
            "importance_sampling": ratio * arrays["advantages"],
            "ppo": torch.minimum(
                ratio * arrays["advantages"],
                ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * arrays["advantages"],
            ),
        }[loss.name]
        total = total - (arrays["weights"] * gain).sum()
    return total


def plain_model(model_dir: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return model.eval()


def gradients(trainer: TorchTrainer, policy: str = "p") -> dict[str, torch.Tensor]:
    """Copies of the policy's accumulated gradients."""
    return {name: g.clone() for name, g in trainer._policies[policy].optimizer.gradients().items()}


def weights(trainer: TorchTrainer, policy: str = "p") -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.full_weights(policy)}


def everything(trainer: TorchTrainer, policy: str = "p") -> dict[str, torch.Tensor]:
    """Copies of all that training moves: the policy's weights, their masters, moments, steps and gradients."""
    optimizer = trainer._policies[policy].optimizer
    parts = {**weights(trainer, policy), **optimizer.state(), **{f"grad/{n}": g for n, g in optimizer.gradients().items()}}
    return {**{name: tensor.clone() for name, tensor in parts.items()}, "step": torch.tensor(optimizer.step_count)}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, relative: float | None = None) -> None:
    """Equal bit for bit, or (`relative`) up to a fraction of each tensor's largest entry."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if relative is None:
            assert torch.equal(tensor, other[name]), name
        else:
            scale = float(other[name].abs().max())
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=relative * max(scale, 1e-6), msg=name)


def without_effort(metrics: Mapping[str, float]) -> dict[str, float]:
    """What the metrics say of the data."""
    return {name: value for name, value in metrics.items() if name not in EFFORT}
