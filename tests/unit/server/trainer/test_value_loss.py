"""The loss of values against its formula in float64, and what it refuses."""

import numpy as np
import pytest
import torch

from opentinker.client.messages import CriticStep, Datum, LossConfig, PolicySpec, TokenChunk, validate
from opentinker.errors import InvalidRequestError
from opentinker.server.trainer.losses import check_arrays, merge_metrics, token_loss

N = 200
LOSSES = [LossConfig(name="value"), LossConfig(name="value", value_clip=0.2), LossConfig(name="value", value_clip=3.0)]


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    old = rng.normal(0, 1, N)
    return {
        "values": old + rng.normal(0, 0.3, N),
        "old_values": old,
        "returns": rng.normal(0, 1, N),
        "weights": rng.choice([1.0, 0.5], N),
    }


def formula(loss: LossConfig, a: dict[str, np.ndarray]) -> float:
    """As verl's `compute_value_loss` and TRL's PPO have it: 0.5 * max(squared error, that of the clipped value)."""
    error = (a["values"] - a["returns"]) ** 2
    if loss.value_clip is not None:
        kept = np.clip(a["values"], a["old_values"] - loss.value_clip, a["old_values"] + loss.value_clip)
        error = np.maximum(error, (kept - a["returns"]) ** 2)
    return float(np.sum(a["weights"] * 0.5 * error))


def run(loss: LossConfig, a: dict[str, np.ndarray]) -> tuple[float, np.ndarray, dict[str, float]]:
    tensors = {name: torch.tensor(value) for name, value in a.items()}
    values = tensors.pop("values").requires_grad_()
    total, metrics = token_loss(loss, values, tensors)
    total.backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    return float(total.detach()), values.grad.numpy(), metrics


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_loss_and_its_gradient_are_those_of_the_formula(loss: LossConfig, arrays: dict[str, np.ndarray]) -> None:
    total, gradient, metrics = run(loss, arrays)
    assert total == pytest.approx(formula(loss, arrays), rel=1e-12)
    assert (metrics["tokens"], metrics["loss_sum"]) == (N, pytest.approx(total))
    assert metrics["value_error_sum"] == pytest.approx(((arrays["values"] - arrays["returns"]) ** 2).sum())
    for n in range(0, N, 7):
        up, down = (dict(arrays, values=arrays["values"].copy()) for _ in range(2))
        up["values"][n] += 1e-6
        down["values"][n] -= 1e-6
        assert gradient[n] == pytest.approx((formula(loss, up) - formula(loss, down)) / 2e-6, rel=1e-4, abs=1e-6)


def test_a_value_that_moved_too_far_gets_no_gradient_and_is_counted(arrays: dict[str, np.ndarray]) -> None:
    _, gradient, metrics = run(LossConfig(name="value", value_clip=0.2), arrays)
    assert metrics["value_clipped_sum"] == np.count_nonzero(gradient == 0) > 0
    assert "value_clipped_sum" not in run(LossConfig(name="value"), arrays)[2]


def test_before_the_first_update_the_clip_changes_nothing(arrays: dict[str, np.ndarray]) -> None:
    still = dict(arrays, values=arrays["old_values"])
    plain, clipped = (run(loss, still) for loss in LOSSES[:2])
    assert plain[0] == clipped[0]
    np.testing.assert_allclose(plain[1], clipped[1])
    assert clipped[2]["value_clipped_sum"] == 0


def test_merged_metrics_are_those_of_the_whole(arrays: dict[str, np.ndarray]) -> None:
    parts = [run(LOSSES[1], {k: v[part] for k, v in arrays.items()})[2] for part in (slice(0, 80), slice(80, N))]
    assert merge_metrics(parts) == pytest.approx(run(LOSSES[1], arrays)[2])


def datum(**arrays: list[float]) -> dict[str, object]:
    tokens = np.array([1, 2], np.int32)
    named = {name: np.array(value, np.float32) for name, value in {"weights": [0, 1], **arrays}.items()}
    return Datum((TokenChunk(tokens),), tokens, named).to_wire()


def test_the_loss_says_which_array_it_lacks_and_needs_no_other() -> None:
    with pytest.raises(InvalidRequestError, match="datum 0 has no 'returns', which the loss 'value' needs"):
        check_arrays([Datum.from_wire(datum())], LOSSES[0])
    bare = Datum.from_wire(datum(returns=[0, 1]))
    check_arrays([bare], LOSSES[0])
    with pytest.raises(InvalidRequestError, match="datum 0 has no 'old_values'"):
        check_arrays([bare], LOSSES[1])
    check_arrays([Datum.from_wire(datum(returns=[0, 1], old_values=[0, -2], proximal_logprobs=[0, -1]))], LOSSES[1])


@pytest.mark.parametrize("name", ["returns", "old_values"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused_on_arrival(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} holds NaN or infinity; nothing was trained"):
        Datum.from_wire(datum(**{name: [0, value]}))


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (LossConfig, {"name": "value", "kl_coefficient": 0.1}, "it has no distribution for a KL or entropy term"),
        (LossConfig, {"name": "ppo", "value_clip": 0.1}, "value_clip is for the loss 'value'"),
        (LossConfig, {"name": "value", "value_clip": 0}, "greater than 0"),
        (CriticStep, {"optimizer": {"learning_rate": -1}}, "optimizer.learning_rate"),
        (PolicySpec, {"head": "scalar", "critic": {}}, "takes no actions that a critic could judge"),
        (PolicySpec, {"head": "values"}, "head"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_name(model: type, body: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        validate(model, body)
