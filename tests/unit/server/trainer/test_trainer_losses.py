"""The losses against float64 numpy, written from their formulas."""

import numpy as np
import pytest
import torch

from opentinker.client.messages import Datum, LossConfig, TokenChunk
from opentinker.errors import InvalidRequestError
from opentinker.server.trainer.losses import check_arrays, merge_metrics, token_loss

N = 200


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    behaviour = -rng.exponential(2.0, N)
    return {
        "logprobs": np.minimum(behaviour + rng.normal(0, 0.4, N), -1e-3),
        "weights": rng.choice([1.0, 0.5], N),
        "advantages": rng.normal(0, 1, N),
        "behaviour_logprobs": behaviour,
    }


def reference(loss: LossConfig, a: dict[str, np.ndarray]) -> float:
    ratio = np.exp(a["logprobs"] - a["behaviour_logprobs"])
    match loss.name:
        case "cross_entropy":
            return float(np.sum(a["weights"] * -a["logprobs"]))
        case "importance_sampling":
            return float(np.sum(a["weights"] * -ratio * a["advantages"]))
        case "ppo":
            bounded = np.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
            return float(np.sum(a["weights"] * -np.minimum(ratio * a["advantages"], bounded * a["advantages"])))


def run(loss: LossConfig, a: dict[str, np.ndarray]) -> tuple[float, np.ndarray, dict[str, float]]:
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in a.items()}
    logprobs = tensors.pop("logprobs").requires_grad_()
    total, metrics = token_loss(loss, logprobs, tensors)
    total.backward()
    assert logprobs.grad is not None
    return float(total.detach()), logprobs.grad.numpy(), metrics


LOSSES = [
    LossConfig(name="cross_entropy"),
    LossConfig(name="importance_sampling"),
    LossConfig(name="ppo"),
    LossConfig(name="ppo", clip_low=0.1, clip_high=0.5),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_loss_is_its_formula_in_float64(loss: LossConfig, arrays: dict[str, np.ndarray]) -> None:
    total, _, metrics = run(loss, arrays)
    assert total == pytest.approx(reference(loss, arrays), rel=1e-12)
    assert metrics["loss_sum"] == pytest.approx(total)
    assert metrics["tokens"] == N


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_gradient_is_the_slope_of_the_formula(loss: LossConfig, arrays: dict[str, np.ndarray]) -> None:
    _, gradient, _ = run(loss, arrays)
    for n in range(0, N, 7):
        up, down = (dict(arrays, logprobs=arrays["logprobs"].copy()) for _ in range(2))
        up["logprobs"][n] += 1e-6
        down["logprobs"][n] -= 1e-6
        assert gradient[n] == pytest.approx((reference(loss, up) - reference(loss, down)) / 2e-6, rel=1e-4, abs=1e-6)


def test_metrics_are_their_formulas(arrays: dict[str, np.ndarray]) -> None:
    loss = LossConfig(name="ppo", clip_low=0.2, clip_high=0.3)
    _, gradient, metrics = run(loss, arrays)
    log_ratio = arrays["logprobs"] - arrays["behaviour_logprobs"]
    ratio = np.exp(log_ratio)
    assert metrics["ratio_max"] == pytest.approx(ratio.max())
    assert metrics["abs_logprob_diff_sum"] == pytest.approx(np.abs(log_ratio).sum())
    assert metrics["mismatch_kl_sum"] == pytest.approx((ratio - 1 - log_ratio).sum())
    assert metrics["clipped_sum"] == np.count_nonzero(gradient == 0) > 0


def test_on_policy_there_is_no_mismatch_and_ppo_is_plain_policy_gradient(arrays: dict[str, np.ndarray]) -> None:
    on_policy = dict(arrays, logprobs=arrays["behaviour_logprobs"])
    _, gradient, metrics = run(LossConfig(name="ppo"), on_policy)
    np.testing.assert_allclose(gradient, -arrays["weights"] * arrays["advantages"])
    assert (metrics["ratio_max"], metrics["mismatch_kl_sum"], metrics["clipped_sum"]) == (1.0, 0.0, 0.0)


def test_merged_metrics_are_those_of_the_whole(arrays: dict[str, np.ndarray]) -> None:
    loss = LossConfig(name="ppo")
    _, _, whole = run(loss, arrays)
    halves = [run(loss, {k: v[part] for k, v in arrays.items()})[2] for part in (slice(0, 80), slice(80, N))]
    assert merge_metrics(halves) == pytest.approx(whole)


def datum(**arrays: list[float]) -> Datum:
    tokens = np.array([1, 2], np.int32)
    named = {name: np.array(value, np.float32) for name, value in {"weights": [0, 1], **arrays}.items()}
    return Datum((TokenChunk(tokens),), tokens, named)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (datum(), "datum 1 has no 'advantages', which the loss 'ppo' needs"),
        (datum(advantages=[0, 1]), "no 'behaviour_logprobs'"),
        (datum(advantages=[0, 1], behaviour_logprobs=[0, 0.5]), "positive behaviour_logprobs"),
        (datum(advantages=[0, 1], behaviour_logprobs=[0, -1], proximal_logprobs=[0, -1]), "does not use"),
    ],
)
def test_data_that_do_not_suit_the_loss_are_named(bad: Datum, message: str) -> None:
    good = datum(advantages=[0, 1], behaviour_logprobs=[0, -1])
    check_arrays([good], LossConfig(name="ppo"))
    with pytest.raises(InvalidRequestError, match=message):
        check_arrays([good, bad], LossConfig(name="ppo"))


def test_cross_entropy_needs_only_weights() -> None:
    check_arrays([datum()], LossConfig(name="cross_entropy"))
