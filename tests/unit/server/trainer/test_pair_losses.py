"""The losses of preferences against float64 numpy, written from their formulas, and against TRL's numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from opentinker.client.messages import Datum, LossConfig, TokenChunk
from opentinker.errors import InvalidRequestError
from opentinker.server.trainer.losses import check_arrays, merge_metrics, token_loss

LOSSES = [
    LossConfig(name="dpo"),
    LossConfig(name="dpo", beta=2.0, label_smoothing=0.2),
    LossConfig(name="dpo", beta=1e-6),
    LossConfig(name="dpo", beta=50.0),
    LossConfig(name="ipo"),
    LossConfig(name="ipo", beta=3.0),
    LossConfig(name="bradley_terry"),
    LossConfig(name="bradley_terry", centring_coefficient=0.3),
]
Answers = list[dict[str, np.ndarray]]


@pytest.fixture
def answers() -> Answers:
    """Five pairs, chosen and rejected in turns, of 1 to 6 tokens."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(10):
        n = int(rng.integers(1, 7))
        reference = -rng.exponential(2.0, n)
        outputs = np.minimum(reference + rng.normal(0, 0.7, n), -1e-3)
        weights = rng.choice([1.0, 0.5], n)
        found.append(
            {"outputs": outputs, "reference_logprobs": reference, "weights": weights, "margins": rng.exponential(1.0, n)}
        )
    return found


def log_sigmoid(x: float) -> float:
    return -float(np.logaddexp(0.0, -x))


def reference(loss: LossConfig, answers: Answers) -> float:
    total = 0.0
    for chosen, rejected in zip(answers[0::2], answers[1::2], strict=True):
        if loss.name == "bradley_terry":
            v_c, v_r = chosen["outputs"][-1], rejected["outputs"][-1]
            total += -log_sigmoid(v_c - v_r - chosen["margins"][-1]) + loss.centring_coefficient * (v_c + v_r) ** 2
            continue
        sums = [float(np.sum(a["weights"] * (a["outputs"] - a["reference_logprobs"]))) for a in (chosen, rejected)]
        if loss.name == "ipo":
            means = [s / float(a["weights"].sum()) for s, a in zip(sums, (chosen, rejected), strict=True)]
            total += (means[0] - means[1] - 1 / (2 * loss.beta)) ** 2
        else:
            h = loss.beta * (sums[0] - sums[1])
            total += -(1 - loss.label_smoothing) * log_sigmoid(h) - loss.label_smoothing * log_sigmoid(-h)
    return total


def run(loss: LossConfig, answers: Answers) -> tuple[float, np.ndarray, dict[str, float]]:
    arrays = {name: torch.tensor(np.concatenate([a[name] for a in answers])) for name in answers[0]}
    outputs = arrays.pop("outputs").requires_grad_()
    sequence = torch.tensor(np.repeat(np.arange(len(answers)), [len(a["weights"]) for a in answers]))
    total, metrics = token_loss(loss, outputs, arrays, sequence)
    total.backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    return float(total.detach()), outputs.grad.numpy(), metrics


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_loss_is_its_formula_in_float64(loss: LossConfig, answers: Answers) -> None:
    total, _, metrics = run(loss, answers)
    assert total == pytest.approx(reference(loss, answers), rel=1e-12)
    assert metrics["loss_sum"] == pytest.approx(total)
    assert metrics["pairs"] == 5
    assert metrics["tokens"] == sum(len(a["weights"]) for a in answers)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_gradient_is_the_slope_of_the_formula(loss: LossConfig, answers: Answers) -> None:
    _, gradient, _ = run(loss, answers)
    at = 0
    for number, answer in enumerate(answers):
        for n in range(len(answer["weights"])):
            losses = []
            for sign in (1, -1):
                moved = [dict(a, outputs=a["outputs"].copy()) for a in answers]
                moved[number]["outputs"][n] += sign * 1e-6
                losses.append(reference(loss, moved))
            assert gradient[at] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-6)
            at += 1


def pairs(chosen: list[list[float]], rejected: list[list[float]]) -> list[list[float]]:
    return [answer for pair in zip(chosen, rejected, strict=True) for answer in pair]


LOGPROBS = pairs(
    [[-0.5, -1.25, -2.0], [-0.125], [-3.0, -0.25, -0.75, -1.5]],
    [[-1.0, -2.5], [-0.375, -0.625, -1.75, -2.25, -0.0625], [-4.0]],
)
REFERENCES = pairs(
    [[-0.75, -1.0, -2.5], [-0.5], [-2.75, -0.5, -0.5, -1.75]],
    [[-0.875, -2.25], [-0.5, -0.5, -1.5, -2.0, -0.25], [-3.25]],
)
SCORES = pairs([[1.5], [-0.25], [0.5]], [[0.5], [0.75], [0.25]])


def given(outputs: list[list[float]], margins: list[float] | None = None) -> Answers:
    made = []
    for number, (output, base) in enumerate(zip(outputs, REFERENCES, strict=True)):
        values = np.array(output)
        margin = margins[number // 2] if margins else 0.0
        base_values = np.array(base) if len(base) == len(output) else np.zeros(len(output))
        made.append(
            {
                "outputs": values,
                "reference_logprobs": base_values,
                "weights": np.ones(len(values)),
                "margins": np.full(len(values), margin),
            }
        )
    return made


TRL = [
    (LossConfig(name="dpo", beta=0.1), given(LOGPROBS), 0.6553556440141421),
    (LossConfig(name="dpo", beta=0.5), given(LOGPROBS), 0.5190761150614461),
    (LossConfig(name="ipo", beta=0.1), given(LOGPROBS), 20.154224537037035),
    (LossConfig(name="ipo", beta=1.0), given(LOGPROBS), 0.02922453703703704),
    (LossConfig(name="bradley_terry"), given(SCORES), 0.7341542649717631),
    (LossConfig(name="bradley_terry"), given(SCORES, [0.5, 0.0, 1.0]), 0.9747365592710765),
    (LossConfig(name="bradley_terry", centring_coefficient=0.01), given(SCORES), 0.7501959316384297),
    (LossConfig(name="bradley_terry", centring_coefficient=0.01), given(SCORES, [0.5, 0.0, 1.0]), 0.9907782259377431),
]


@pytest.mark.parametrize(("loss", "made", "mean"), TRL)
def test_a_mean_over_pairs_is_the_number_that_trl_1_16_computes(loss: LossConfig, made: Answers, mean: float) -> None:
    """From `DPOTrainer._compute_loss` and `RewardTrainer.compute_loss` on the same numbers in float64."""
    assert run(loss, made)[0] / 3 == pytest.approx(mean, rel=1e-6)


def test_metrics_are_their_formulas(answers: Answers) -> None:
    _, _, metrics = run(LossConfig(name="dpo", beta=0.5), answers)
    rewards = [0.5 * float(np.sum(a["weights"] * (a["outputs"] - a["reference_logprobs"]))) for a in answers]
    said = [float(np.sum(a["weights"] * a["outputs"])) for a in answers]
    assert metrics["chosen_reward_sum"] == pytest.approx(sum(rewards[0::2]))
    assert metrics["rejected_reward_sum"] == pytest.approx(sum(rewards[1::2]))
    assert metrics["margin_sum"] == pytest.approx(sum(rewards[0::2]) - sum(rewards[1::2]))
    assert metrics["correct_sum"] == sum(c > r for c, r in zip(rewards[0::2], rewards[1::2], strict=True))
    assert metrics["chosen_logprob_sum"] == pytest.approx(sum(said[0::2]))
    assert metrics["rejected_logprob_sum"] == pytest.approx(sum(said[1::2]))


def test_a_policy_that_is_its_reference_has_the_loss_of_a_coin_and_every_pair_is_a_tie(answers: Answers) -> None:
    same = [dict(a, outputs=a["reference_logprobs"]) for a in answers]
    total, _, metrics = run(LossConfig(name="dpo", label_smoothing=0.3), same)
    assert total == pytest.approx(5 * np.log(2))
    assert (metrics["correct_sum"], metrics["margin_sum"]) == (2.5, 0.0)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_pairs_do_not_see_each_other(loss: LossConfig, answers: Answers) -> None:
    parts = [run(loss, answers[start : start + 2]) for start in range(0, 10, 2)]
    total, gradient, metrics = run(loss, answers)
    assert total == pytest.approx(sum(p[0] for p in parts))
    np.testing.assert_allclose(gradient, np.concatenate([p[1] for p in parts]))
    assert merge_metrics([p[2] for p in parts]) == pytest.approx(metrics)


def test_exchanging_the_answers_is_smoothing_with_everything_else(answers: Answers) -> None:
    """-log sigmoid(-h) = -log sigmoid(h) + h, so that a smoothed loss is a mixture of both orders."""
    swapped = [answers[i + 1 - 2 * (i % 2)] for i in range(10)]
    plain, other = (run(LossConfig(name="dpo"), a)[0] for a in (answers, swapped))
    mixed = run(LossConfig(name="dpo", label_smoothing=0.25), answers)[0]
    assert mixed == pytest.approx(0.75 * plain + 0.25 * other)


@pytest.mark.parametrize("far", [1e3, -1e3])
def test_a_pair_that_is_far_apart_has_a_finite_loss(far: float) -> None:
    made: Answers = [{"outputs": np.array([v]), "weights": np.ones(1), "margins": np.zeros(1)} for v in (far, 0.0)]
    for loss in (LossConfig(name="dpo", beta=1.0), LossConfig(name="bradley_terry")):
        total, gradient, _ = run(loss, [dict(a, reference_logprobs=np.zeros(1)) for a in made])
        assert total == pytest.approx(max(-far, 0.0))
        assert np.isfinite(gradient).all()


def datum(tokens: list[int], weights: list[float], **arrays: list[float]) -> Datum:
    ids = np.array(tokens, np.int32)
    named = {name: np.array(value, np.float32) for name, value in {"weights": weights, **arrays}.items()}
    return Datum((TokenChunk(ids),), np.append(ids[1:], 9).astype(np.int32), named)


GOOD = [datum([1, 2, a], [0, 1, 1], reference_logprobs=[0, -1, -1]) for a in (3, 4)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (GOOD[:1], "compares pairs, but there are 1 data"),
        ([*GOOD, GOOD[0], datum([7, 2, 4], [0, 1, 1], reference_logprobs=[0, -1, -1])], "data 2 and 3 are no pair"),
        ([GOOD[0], datum([1, 2, 4], [0, 0, 1], reference_logprobs=[0, 0, -1])], "data 0 and 1 are no pair"),
        ([GOOD[0], datum([1, 2, 4], [0, 0, 0], reference_logprobs=[0, 0, 0])], "datum 1 has no weighted target"),
        ([GOOD[0], datum([1, 2, 4], [0, 1, 1])], "datum 1 has no 'reference_logprobs'"),
        ([GOOD[0], datum([1, 2, 4], [0, 1, 1], reference_logprobs=[0, 1, -1])], "positive reference_logprobs"),
    ],
)
def test_data_that_are_no_pairs_are_named(data: list[Datum], says: str) -> None:
    check_arrays(GOOD, LossConfig(name="dpo"))
    with pytest.raises(InvalidRequestError, match=says):
        check_arrays(data, LossConfig(name="dpo"))


def test_a_reward_model_needs_no_reference() -> None:
    check_arrays([datum([1, 2, a], [0, 1, 1]) for a in (3, 4)], LossConfig(name="bradley_terry"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reference_that_is_no_number_is_refused_as_it_arrives(value: float) -> None:
    body = {**GOOD[0].to_wire(), "reference_logprobs": np.array([0, value, -1], np.float32)}
    with pytest.raises(InvalidRequestError, match="reference_logprobs holds NaN or infinity"):
        Datum.from_wire(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "dpo", "beta": 0.0},
        {"name": "dpo", "label_smoothing": 0.5},
        {"name": "ipo", "label_smoothing": 0.1},
        {"name": "dpo", "centring_coefficient": 0.1},
        {"name": "dpo", "kl_coefficient": 0.1},
        {"name": "bradley_terry", "entropy_coefficient": 0.1},
    ],
)
def test_settings_that_mean_nothing_for_a_loss_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LossConfig.model_validate(fields)
