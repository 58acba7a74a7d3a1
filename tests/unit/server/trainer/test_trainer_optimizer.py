"""AdamW on float32 masters."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from opentinker.client.messages import AdamParams
from opentinker.config.server import TrainerConfig
from opentinker.errors import TooLargeError, TrainerError
from opentinker.server.trainer.budget import MemoryBudget
from opentinker.server.trainer.optimizer import MasterOptimizer
from opentinker.server.trainer.ranks import Ranks, rows_of
from opentinker.server.trainer.row_optimizer import RowOptimizer
from opentinker.server.trainer.state_plan import device_bytes

PARAMS = AdamParams(learning_rate=0.01, weight_decay=0.1, max_grad_norm=None)


def parameter(dtype: torch.dtype = torch.float32, size: int = 50) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype), requires_grad=False)


def add_gradient(weight: nn.Parameter, gradient: torch.Tensor) -> None:
    (weight * gradient.to(weight.dtype)).sum().backward()  # type: ignore[no-untyped-call]


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(50, generator=generator) for _ in range(count)]


def reference(weight: np.ndarray, grads: list[np.ndarray], params: AdamParams) -> np.ndarray:
    """Loshchilov & Hutter (2019), Algorithm 2, in float64, with the decay multiplied by the learning rate."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for t, g in enumerate(grads, 1):
        weight = weight - params.learning_rate * params.weight_decay * weight
        m = params.beta1 * m + (1 - params.beta1) * g
        v = params.beta2 * v + (1 - params.beta2) * g**2
        m_hat, v_hat = m / (1 - params.beta1**t), v / (1 - params.beta2**t)
        weight = weight - params.learning_rate * m_hat / (np.sqrt(v_hat) + params.eps)
    return weight


def test_steps_are_adamw() -> None:
    weight = parameter()
    expected = reference(weight.detach().double().numpy(), [g.double().numpy() for g in gradients(4)], PARAMS)
    optimizer = MasterOptimizer({"w": weight})
    for gradient in gradients(4):
        add_gradient(weight, gradient)
        optimizer.step(PARAMS)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_small_steps_add_up_in_the_masters_of_bfloat16_weights() -> None:
    weight = nn.Parameter(torch.ones(50, dtype=torch.bfloat16), requires_grad=False)
    optimizer = MasterOptimizer({"w": weight})
    tiny = AdamParams(learning_rate=1e-4, max_grad_norm=None)
    add_gradient(weight, torch.ones(50))
    optimizer.step(tiny)
    assert (weight == 1).all()  # below bfloat16's resolution
    for _ in range(99):
        add_gradient(weight, torch.ones(50))
        optimizer.step(tiny)
    torch.testing.assert_close(weight.detach().float(), torch.full((50,), 0.99), rtol=0, atol=0.004)


def test_gradients_of_bfloat16_weights_add_up_in_float32() -> None:
    weight = parameter(torch.bfloat16)
    optimizer = MasterOptimizer({"w": weight})
    for value in (256.0, *[0.5] * 100):
        add_gradient(weight, torch.full((50,), value))
    assert (optimizer.gradients()["w"] == 306).all()
    assert weight.grad is None


def test_clipping_scales_to_the_norm_and_reports_the_norm_before() -> None:
    weights = [parameter(), parameter()]
    optimizers = [MasterOptimizer({"w": w}) for w in weights]
    (gradient,) = gradients(1)
    add_gradient(weights[0], gradient * 100)
    norm = optimizers[0].step(AdamParams(learning_rate=0.01, eps=1.0, max_grad_norm=0.5))
    assert norm == pytest.approx(float(gradient.norm()) * 100, rel=1e-5)
    add_gradient(weights[1], gradient / gradient.norm() * 0.5)
    optimizers[1].step(AdamParams(learning_rate=0.01, eps=1.0, max_grad_norm=None))
    torch.testing.assert_close(weights[0], weights[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    weight = parameter(dtype)
    optimizer = MasterOptimizer({"w": weight})
    add_gradient(weight, gradients(1)[0])
    optimizer.step(PARAMS)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    copy = weight.detach().clone()
    spoiled = gradients(1)[0]
    spoiled[3] = bad
    add_gradient(weight, spoiled)
    with pytest.raises(TrainerError, match="gradient norm"):
        optimizer.step(PARAMS)
    assert torch.equal(weight, copy)
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())
    assert optimizer.step_count == 1
    assert optimizer.gradients() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_learning_rate_zero_no_bit_moves(dtype: torch.dtype) -> None:
    weight = parameter(dtype)
    weight[:20] = 0.0
    weight[:10] = -0.0
    before = weight.detach().clone().view(torch.uint8)
    optimizer = MasterOptimizer({"w": weight})
    for gradient in gradients(3):
        add_gradient(weight, gradient)
        optimizer.step(AdamParams(learning_rate=0.0, weight_decay=0.1))
    assert torch.equal(weight.detach().view(torch.uint8), before)


def fail_midway(optimizer: MasterOptimizer, weight: nn.Parameter) -> None:
    with optimizer.all_or_nothing():
        add_gradient(weight, gradients(1)[0])
        raise RuntimeError("midway")


def test_passes_that_raise_add_nothing() -> None:
    weight = parameter()
    optimizer = MasterOptimizer({"w": weight})
    for before in ({}, {"w": torch.ones(50)}):
        with pytest.raises(RuntimeError, match="midway"):
            fail_midway(optimizer, weight)
        assert optimizer.gradients().keys() == before.keys()
        assert all(torch.equal(optimizer.gradients()[name], g) for name, g in before.items())
        add_gradient(weight, torch.ones(50))


def test_a_step_without_gradients_is_a_step_with_zero_gradients() -> None:
    weights = [parameter(), parameter()]
    first, second = (MasterOptimizer({"w": w}) for w in weights)
    for optimizer, weight in zip((first, second), weights, strict=True):
        add_gradient(weight, gradients(1)[0])
        optimizer.step(PARAMS)
    add_gradient(weights[1], torch.zeros(50))
    assert first.step(PARAMS) == second.step(PARAMS) == 0.0
    assert torch.equal(weights[0], weights[1])


def test_a_loaded_state_continues_bit_for_bit() -> None:
    weights = [parameter(torch.bfloat16), parameter(torch.bfloat16)]
    first, second = (MasterOptimizer({"w": w}) for w in weights)
    add_gradient(weights[0], gradients(1)[0])
    first.step(PARAMS)
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()}, first.step_count)
    for optimizer, weight in zip((first, second), weights, strict=True):
        add_gradient(weight, gradients(2)[1])
        optimizer.step(PARAMS)
    assert torch.equal(weights[0], weights[1])
    assert all(torch.equal(tensor, second.state()[name]) for name, tensor in first.state().items())


def test_a_closed_optimizer_leaves_the_parameters_frozen() -> None:
    weight = parameter()
    MasterOptimizer({"w": weight}).close()
    assert not weight.requires_grad


def rows_on_first_of(count: int, tensor: torch.Tensor) -> torch.Tensor:
    start, stop = rows_of(tensor.shape[0], count, 0)
    return tensor[start:stop]


@pytest.mark.parametrize("count", [1, 8])
def test_what_is_foreseen_for_gradients_is_what_they_take_on_each_of_several_ranks(count: int) -> None:
    ranks = SimpleNamespace(rows=lambda tensor: rows_on_first_of(count, tensor))
    weights = {"embeddings": nn.Parameter(torch.zeros(64, 16)), "norm": nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))}
    optimizer = RowOptimizer(weights, cast(Ranks, ranks))
    foreseen = optimizer.pending_bytes()
    sum(weight.float().sum() for weight in weights.values()).backward()  # type: ignore[union-attr]
    taken = sum(gradient.nbytes for gradient in optimizer.gradients().values())
    assert foreseen == taken == 4 * (64 * 16 + 16)
    assert optimizer.pending_bytes() == taken  # a copy, for as long as a pass may fail
    optimizer.clear_gradients()
    assert optimizer.pending_bytes() == 0


@pytest.mark.parametrize(("ranks", "needed"), [(1, 12 * 3000), (4, 12 * 3000 / 4 + 4 * 1000 * 3 / 4)])
def test_gradients_that_are_whole_on_every_rank_need_room_on_each(ranks: int, needed: float) -> None:
    layer, head = nn.Parameter(torch.zeros(2000)), nn.Parameter(torch.zeros(1000))
    budget = MemoryBudget(TrainerConfig())
    budget.check_state([layer, head], needed, ranks, [head])
    with pytest.raises(TooLargeError, match="to train all parameters"):
        budget.check_state([layer, head], needed - 1, ranks, [head])


@pytest.mark.parametrize(("optimizer", "state"), [("adamw", 12), ("adamw_8bit", 6)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_state_in_the_hosts_memory_needs_room_there_and_its_stream_on_the_device(
    ranks: int, optimizer: str, state: int
) -> None:
    layers = [nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16)) for _ in range(3)]
    budget = MemoryBudget(TrainerConfig.model_validate({"optimizer": optimizer, "optimizer_state": "host"}))
    device, host = 4 * 6000 / ranks + device_bytes(6000 / ranks), state * 6000
    budget.check_state(layers, device, ranks, host=host)
    with pytest.raises(TooLargeError, match="beside the model"):
        budget.check_state(layers, device - 1, ranks, host=host)
    with pytest.raises(TooLargeError, match="in the host's memory"):
        budget.check_state(layers, device, ranks, host=host - 1)
    both = device + host / ranks  # without a GPU it is the same memory
    budget.check_state(layers, both, ranks)
    with pytest.raises(TooLargeError, match="beside the model"):
        budget.check_state(layers, both - 1, ranks)


def test_who_has_no_room_on_the_device_hears_of_the_hosts_where_that_would_do() -> None:
    layers = [nn.Parameter(torch.empty(10**9, dtype=torch.bfloat16, device="meta"))]
    budget = MemoryBudget(TrainerConfig())
    enough = 4e9 + device_bytes(1e9)
    with pytest.raises(TooLargeError, match="optimizer_state=host"):
        budget.check_state(layers, enough, host=12e9)
    for free, host in ((enough, None), (enough, 12e9 - 1), (enough - 1, 12e9)):
        with pytest.raises(TooLargeError) as refused:
            budget.check_state(layers, free, host=host)
        assert "optimizer_state" not in refused.value.hint


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_host_without_room_for_state_is_told_of_8_bit_moments_unless_they_are_that_already(optimizer: str) -> None:
    layers = [nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16))]
    budget = MemoryBudget(TrainerConfig.model_validate({"optimizer": optimizer, "optimizer_state": "host"}))
    with pytest.raises(TooLargeError, match="in the host's memory") as refused:
        budget.check_state(layers, 1e9, host=1)
    assert ("adamw_8bit" in refused.value.hint) is (optimizer == "adamw")


def test_the_hosts_memory_is_other_memory_than_a_gpus_only() -> None:
    budget = MemoryBudget(TrainerConfig(), lambda device: {"cpu": 7, "cuda": 3}[device.type])
    assert budget.other_free(torch.device("cpu")) is None
    assert budget.other_free(torch.device("cuda")) == 7
    assert MemoryBudget(TrainerConfig(), lambda device: None).other_free(torch.device("cuda")) == float("inf")
