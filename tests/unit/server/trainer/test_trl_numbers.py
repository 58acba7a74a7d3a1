"""Policy-gradient losses, their gradients and advantages are the numbers of TRL 1.16, which `trl_numbers.py` wrote down."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from opentinker.algorithms.select import advantage_function
from opentinker.client.messages import Datum, TokenChunk
from opentinker.config.algorithms import (
    CISPOConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PolicyGradient,
    RLOOConfig,
)
from opentinker.rollout.types import Episode
from opentinker.server.trainer.losses import token_loss
from opentinker.training.batch import Member, build_batch
from opentinker.training.learner import loss_config

TRL: dict[str, Any] = json.loads((Path(__file__).parent / "trl_numbers.json").read_text())
ARRAYS = {name: np.array(values) for name, values in TRL["arrays"].items()}
K3 = {"coefficient": 0.3, "estimator": "k3"}
TRUNCATED = {"truncate": 1.1}
OURS: dict[str, PolicyGradient] = {
    "grpo": GRPOConfig(aggregation="sequence_mean"),
    "bnpo": GRPOConfig(),
    "dapo": DAPOConfig(),
    "dr_grpo": DrGRPOConfig(constant_tokens=11),
    "gspo": GSPOConfig(clip_low=0.03, clip_high=0.04),
    "cispo": CISPOConfig(clip_high=0.2),  # TRL's bound is the ratio itself
    "grpo with k3": GRPOConfig.model_validate({"aggregation": "sequence_mean", "kl": K3}),
    "dapo with k3": GRPOConfig.model_validate({"kl": K3}),
    "dr_grpo with k3": DrGRPOConfig.model_validate({"constant_tokens": 11, "kl": K3}),
    "dapo with entropy": GRPOConfig(entropy_coefficient=0.2),
    "dapo, truncated importance sampling": GRPOConfig.model_validate({"mismatch": TRUNCATED}),
    "grpo, truncated importance sampling": GRPOConfig.model_validate({"aggregation": "sequence_mean", "mismatch": TRUNCATED}),
}


def members() -> list[Member]:
    """The completions, each an episode of its own, with TRL's old logprobs as what sampled and as the trainer's own."""
    found = []
    for number, mask in enumerate(ARRAYS["mask"]):
        tokens = np.arange(len(mask), dtype=np.int32)
        arrays = {"weights": mask, "advantages": mask * ARRAYS["advantages"][number]}
        for name in ("proximal_logprobs", "behaviour_logprobs", "reference_logprobs"):
            arrays[name] = ARRAYS[name][number]
        found.append(Member(cast(Episode, None), (Datum((TokenChunk(tokens),), tokens, arrays),)))
    return found


def run(config: PolicyGradient) -> tuple[float, np.ndarray, np.ndarray]:
    """(loss, its gradients by logprob and by entropy, [completions, tokens]), as a step of the job computes them."""
    batch = build_batch([members()], None, config)
    [minibatch] = batch.minibatches
    loss = loss_config(config.model_copy(update={"epochs": 2}), 1.0)
    if not config.mismatch.active:  # then the ratio is against what sampled; TRL's is against the trainer's own
        batch.data[:] = [
            Datum(d.chunks, d.targets, {**d.arrays, "behaviour_logprobs": d.arrays["proximal_logprobs"]}) for d in batch.data
        ]
    where = ARRAYS["mask"] != 0
    logprobs = torch.tensor(ARRAYS["logprobs"][where], requires_grad=True)
    entropies = torch.tensor(ARRAYS["entropies"][where], requires_grad=True)
    arrays = {
        name: torch.tensor(np.stack([d.arrays[name] for d in batch.data])[where], dtype=torch.float64)
        for name in batch.data[0].arrays
    }
    sequence = torch.tensor(np.nonzero(where)[0])
    total, _ = token_loss(loss, logprobs, arrays, sequence, entropies if loss.entropy_coefficient else None)
    (total * minibatch.factor).backward()  # type: ignore[no-untyped-call]
    slopes = []
    for tensor in (logprobs, entropies):
        slope = np.zeros(where.shape)
        if tensor.grad is not None:
            slope[where] = tensor.grad.numpy()
        slopes.append(slope)
    return float(total.detach()) * minibatch.factor, slopes[0], slopes[1]


def test_every_number_of_trl_is_compared() -> None:
    assert TRL["trl"].startswith("1.16")
    assert OURS.keys() == TRL["losses"].keys()


@pytest.mark.parametrize("name", list(OURS))
def test_a_loss_and_its_gradient_are_those_that_trl_computes(name: str) -> None:
    theirs = TRL["losses"][name]
    loss, gradient, entropy_gradient = run(OURS[name])
    apart = [
        abs(loss - theirs["loss"]),
        float(np.abs(gradient - theirs["gradient"]).max()),
        float(np.abs(entropy_gradient - theirs["entropy_gradient"]).max()),
    ]
    print(f"worst deviation: {max(apart):.1e}")
    assert max(apart) < 1e-6
    assert np.abs(gradient).max() > 0.01


def advantages(config: PolicyGradient) -> np.ndarray:
    groups = [[np.array([r], np.float32) for r in group] for group in TRL["rewards"]]
    found = advantage_function(cast(Any, config))(groups)
    return np.array([[float(a[0]) for a in group] for group in found])


@pytest.mark.parametrize(
    ("config", "name"), [(DrGRPOConfig(), "grpo without std"), (RLOOConfig(), "rloo")], ids=["dr_grpo", "rloo"]
)
def test_advantages_are_those_that_trl_computes(config: PolicyGradient, name: str) -> None:
    apart = float(np.abs(advantages(config) - TRL["advantages"][name]).max())
    print(f"worst deviation: {apart:.1e}")
    assert apart < 1e-6


def test_grpo_divides_by_the_papers_deviation_and_trl_by_that_of_a_sample() -> None:
    rewards = np.array(TRL["rewards"])
    ours, theirs = advantages(GRPOConfig()), np.array(TRL["advantages"]["grpo"])
    scaled = theirs * (rewards.std(1, ddof=1, keepdims=True) + 1e-4) / (rewards.std(1, keepdims=True) + 1e-6)
    apart = float(np.abs(ours - scaled).max())
    print(f"worst deviation: {apart:.1e}")
    assert apart < 1e-6
