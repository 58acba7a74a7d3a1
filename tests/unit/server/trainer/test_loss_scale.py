"""Gradients in float16: none is lost for being small, and none is used that does not fit."""

import math

import pytest
import torch
from torch import nn

from opentinker.client.messages import AdamParams
from opentinker.errors import TrainerError
from opentinker.server.trainer.loss_scale import GROWTH_STEPS, INITIAL, LARGEST, LossScale
from opentinker.server.trainer.optimizer import MasterOptimizer

PARAMS = AdamParams(learning_rate=0.01, max_grad_norm=1.0)


def half(size: int = 8) -> nn.Parameter:
    return nn.Parameter(torch.ones(size, dtype=torch.float16), requires_grad=False)


def add_gradient(optimizer: MasterOptimizer, weight: nn.Parameter, gradient: float) -> None:
    optimizer.scaled((weight.float() * gradient).sum()).backward()  # type: ignore[no-untyped-call]


def test_a_gradient_below_float16_moves_the_weights() -> None:
    weight = half()
    optimizer = MasterOptimizer({"w": weight})
    add_gradient(optimizer, weight, 1e-8)
    assert float(torch.tensor(1e-8).half()) == 0
    assert optimizer.step(PARAMS) == pytest.approx(math.sqrt(8) * 1e-8, rel=1e-2)
    assert (optimizer.masters["w"] < 1).all()


def test_a_step_that_overflows_is_skipped_and_the_scale_halved_until_it_fits() -> None:
    weight = half()
    optimizer = MasterOptimizer({"w": weight})
    assert optimizer.loss_scale is not None
    steps = []
    while not steps or steps[-1] == 0:
        before = {key: tensor.clone() for key, tensor in optimizer.state().items()}
        add_gradient(optimizer, weight, 100.0)
        steps.append(optimizer.step(PARAMS))
        if steps[-1] == 0:
            assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.state().items())
            assert optimizer.step_count == 0
    assert steps[-1] == pytest.approx(math.sqrt(8) * 100, rel=1e-3)
    assert (optimizer.loss_scale.skipped, optimizer.step_count) == (len(steps) - 1, 1)
    assert optimizer.loss_scale.value == INITIAL / 2 ** (len(steps) - 1) <= 65504 / 100


def test_gradients_that_are_not_finite_at_any_scale_are_an_error() -> None:
    weight = half()
    optimizer = MasterOptimizer({"w": weight})
    for _ in range(int(math.log2(INITIAL))):
        add_gradient(optimizer, weight, math.inf)
        assert optimizer.step(PARAMS) == 0
    add_gradient(optimizer, weight, math.inf)
    with pytest.raises(TrainerError, match="weights are unchanged"):
        optimizer.step(PARAMS)


def test_the_scale_grows_after_good_steps_to_a_bound() -> None:
    scale = LossScale()
    for _ in range(GROWTH_STEPS):
        scale.worked()
    assert (scale.value, scale.good_steps) == (2 * INITIAL, 0)
    for _ in range(20 * GROWTH_STEPS):
        scale.worked()
    assert scale.value == LARGEST


def test_its_state_continues_where_it_was() -> None:
    one, other = LossScale(), LossScale()
    one.overflowed()
    one.worked()
    other.load_state(one.state())
    assert vars(one) == vars(other)
    other.restart()
    assert vars(other) == vars(LossScale())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_have_no_scale(dtype: torch.dtype) -> None:
    optimizer = MasterOptimizer({"w": nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)})
    loss = torch.ones(())
    assert optimizer.scaled(loss) is loss
    assert optimizer.progress() == {}
