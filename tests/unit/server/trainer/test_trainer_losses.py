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
        "proximal_logprobs": np.minimum(behaviour + rng.normal(0, 0.2, N), -1e-3),
        "reference_logprobs": np.minimum(behaviour + rng.normal(0, 0.5, N), -1e-3),
        "entropies": rng.exponential(1.0, N),
        "sequence": rng.integers(0, 12, N),
    }


def means(values: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    return np.array([values[sequences == s].mean() for s in sequences])


def reference(loss: LossConfig, a: dict[str, np.ndarray], frozen: dict[str, np.ndarray] | None = None) -> float:
    """The loss from its formulas; `frozen` are the arrays from which constants (whatever has no gradient) are taken."""
    fixed = frozen or a
    logprobs, behaviour, sequences = a["logprobs"], a["behaviour_logprobs"], a["sequence"]
    if loss.name == "cross_entropy":
        per_token, weights = -logprobs, a["weights"]
    else:
        anchor = {"behaviour": behaviour, "proximal": a["proximal_logprobs"], "current": fixed["logprobs"]}[loss.anchor]
        weights = a["weights"].copy()
        if loss.truncate is not None:
            weights *= np.minimum(np.exp(anchor - behaviour), loss.truncate)
        if loss.mask_sequences is not None:
            mean = np.exp(means(anchor - behaviour, sequences))
            weights *= (mean >= loss.mask_sequences[0]) & (mean <= loss.mask_sequences[1])
        difference = logprobs - anchor
        ratio = np.exp(means(difference, sequences) if loss.name == "gspo" else difference)
        bounded = np.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
        match loss.name:
            case "importance_sampling":
                per_token = -ratio * a["advantages"]
            case "cispo":
                constant = np.clip(np.exp(fixed["logprobs"] - anchor), 1 - loss.clip_low, 1 + loss.clip_high)
                per_token = -constant * a["advantages"] * logprobs
            case _:
                per_token = -np.minimum(ratio * a["advantages"], bounded * a["advantages"])
    d = logprobs - a["reference_logprobs"]
    kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[loss.kl_estimator]
    return float(np.sum(weights * (per_token + loss.kl_coefficient * kl - loss.entropy_coefficient * a["entropies"])))


def run(loss: LossConfig, a: dict[str, np.ndarray]) -> tuple[float, np.ndarray, dict[str, float]]:
    tensors = {name: torch.tensor(value) for name, value in a.items()}
    logprobs, sequence, entropies = (tensors.pop(name) for name in ("logprobs", "sequence", "entropies"))
    logprobs.requires_grad_()
    total, metrics = token_loss(loss, logprobs, tensors, sequence, entropies if loss.entropy_coefficient else None)
    total.backward()
    assert logprobs.grad is not None
    return float(total.detach()), logprobs.grad.numpy(), metrics


LOSSES = [
    LossConfig(name="cross_entropy"),
    LossConfig(name="cross_entropy", kl_coefficient=0.3),
    LossConfig(name="importance_sampling"),
    LossConfig(name="ppo"),
    LossConfig(name="ppo", clip_low=0.1, clip_high=0.5),
    LossConfig(name="ppo", anchor="proximal", truncate=1.2),
    LossConfig(name="ppo", anchor="current", mask_sequences=(0.9, 1.1)),
    LossConfig(name="importance_sampling", anchor="proximal", truncate=2.0, mask_sequences=(0.9, 1.2)),
    LossConfig(name="gspo", clip_low=0.05, clip_high=0.08),
    LossConfig(name="gspo", anchor="proximal", truncate=1.5),
    LossConfig(name="cispo", clip_low=1.0, clip_high=0.3),
    LossConfig(name="ppo", kl_coefficient=0.2, kl_estimator="k1", entropy_coefficient=0.1),
    LossConfig(name="ppo", kl_coefficient=0.2, kl_estimator="k2"),
    LossConfig(name="ppo", kl_coefficient=0.2, kl_estimator="k3"),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_loss_is_its_formula_in_float64(loss: LossConfig, arrays: dict[str, np.ndarray]) -> None:
    total, _, metrics = run(loss, arrays)
    print(f"deviation: {abs(total / reference(loss, arrays) - 1):.1e}")
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
        assert gradient[n] == pytest.approx(
            (reference(loss, up, arrays) - reference(loss, down, arrays)) / 2e-6, rel=1e-4, abs=1e-6
        )


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
        (datum(advantages=[0, 1], behaviour_logprobs=[0, -1], proximal_logprobs=[0, -1]), "does not use .*anchor 'behaviour'"),
    ],
)
def test_data_that_do_not_suit_the_loss_are_named(bad: Datum, message: str) -> None:
    good = datum(advantages=[0, 1], behaviour_logprobs=[0, -1])
    check_arrays([good], LossConfig(name="ppo"))
    with pytest.raises(InvalidRequestError, match=message):
        check_arrays([good, bad], LossConfig(name="ppo"))


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (LossConfig(name="ppo", anchor="proximal"), "proximal_logprobs"),
        (LossConfig(name="ppo", kl_coefficient=0.1), "reference_logprobs"),
    ],
)
def test_a_loss_says_which_array_it_lacks(loss: LossConfig, name: str) -> None:
    bare = datum(advantages=[0, 1], behaviour_logprobs=[0, -1])
    with pytest.raises(InvalidRequestError, match=f"no '{name}'"):
        check_arrays([bare], loss)
    check_arrays([datum(advantages=[0, 1], behaviour_logprobs=[0, -1], **{name: [0, -1]})], loss)


def test_the_first_step_of_a_batch_has_a_ratio_of_exactly_one_against_the_trainer(arrays: dict[str, np.ndarray]) -> None:
    same = dict(arrays, proximal_logprobs=arrays["logprobs"])
    for anchor in ("proximal", "current"):
        _, _, metrics = run(LossConfig(name="ppo", anchor=anchor, truncate=1e9), same)  # type: ignore[arg-type]
        assert (metrics["ratio_max"], metrics["clipped_sum"], metrics["truncated_sum"]) == (1.0, 0.0, 0.0)


def test_sequences_do_not_see_each_other(arrays: dict[str, np.ndarray]) -> None:
    loss = LossConfig(name="gspo", clip_low=0.05, clip_high=0.08)
    one_by_one = [run(loss, {k: v[arrays["sequence"] == s] for k, v in arrays.items()})[0] for s in range(12)]
    assert run(loss, arrays)[0] == pytest.approx(sum(one_by_one))


def test_a_correction_without_the_trainers_own_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="take anchor 'proximal' or 'current'"):
        LossConfig(name="ppo", truncate=2.0)


def test_cross_entropy_needs_only_weights() -> None:
    check_arrays([datum()], LossConfig(name="cross_entropy"))
