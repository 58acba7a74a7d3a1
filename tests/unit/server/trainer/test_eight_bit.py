"""Moments in bytes: small errors, nothing that blows up, and steps close to those of float32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from opentinker.client.messages import AdamParams
from opentinker.server.trainer.eight_bit import BLOCK, SMALLEST, EightBitOptimizer, Quantized, codebook
from opentinker.server.trainer.optimizer import MasterOptimizer

PARAMS = AdamParams(learning_rate=0.01, weight_decay=0.1, max_grad_norm=None)
CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_the_codebook_has_256_values_with_0_and_1_and_fine_small_ones(signed: bool) -> None:
    values = codebook(signed, CPU)
    assert len(values.unique()) == 256
    assert {0.0, 1.0} <= set(values.tolist())
    assert float(values[values > 0].min()) < 1e-6
    assert (float(values[0]) < 0) == signed


@given(st.integers(0, 1000), st.integers(1, 700), st.floats(1e-20, 1e20))
def test_an_entry_keeps_its_magnitude_within_its_decade(seed: int, size: int, scale: float) -> None:
    original = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    kept = Quantized(original, signed=True)
    kept.put(original)
    error = (kept.get() - original).abs()
    assert (error <= original.abs() * 0.45 + 1e-6 * float(original.abs().max())).all()
    largest = original.abs().argmax()
    assert float(error[largest]) <= 0.008 * float(original.abs()[largest])


def test_what_is_divided_by_never_becomes_zero() -> None:
    tensor = torch.full((BLOCK + 3,), 1e-12)
    tensor[0] = 1.0
    kept = Quantized(tensor, signed=False)
    kept.put(tensor)
    assert (kept.get() > 0).all()
    kept.put(torch.zeros_like(tensor))
    assert (kept.get() == 0).all()


def pair(dtype: torch.dtype) -> list[MasterOptimizer]:
    start = torch.randn(SMALLEST + 100, generator=torch.Generator().manual_seed(0))
    small = torch.randn(7, generator=torch.Generator().manual_seed(1))
    return [
        kind({"w": nn.Parameter(start.to(dtype)), "b": nn.Parameter(small.to(dtype))})
        for kind in (EightBitOptimizer, MasterOptimizer)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_steps_are_close_to_those_of_float32_moments(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    bytes_, floats = pair(dtype)
    before = floats.masters["w"].clone()
    for _ in range(20):
        gradients = {"w": torch.randn(SMALLEST + 100, generator=generator), "b": torch.randn(7, generator=generator)}
        for optimizer in (bytes_, floats):
            for name, parameter in optimizer.parameters.items():
                (parameter * gradients[name].to(dtype)).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step(PARAMS)
    moved = floats.masters["w"] - before
    assert float((bytes_.masters["w"] - floats.masters["w"]).norm() / moved.norm()) < 0.1
    assert torch.equal(bytes_.masters["b"], floats.masters["b"])


def test_it_takes_a_quarter_of_the_memory_and_continues_bit_for_bit() -> None:
    bytes_, floats = pair(torch.float32)
    sizes = [
        sum(t.nbytes for key, t in o.state().items() if not key.startswith("master/") and key.endswith("/w"))
        for o in (bytes_, floats)
    ]
    assert sizes[0] < 0.27 * sizes[1]
    other = pair(torch.float32)[0]
    for step in range(4):
        if step == 2:
            other.load_state({key: tensor.clone() for key, tensor in bytes_.state().items()}, bytes_.step_count)
        for optimizer in (bytes_, other):
            (optimizer.parameters["w"] * (step + 1.5)).sum().backward()
            optimizer.step(PARAMS)
    assert all(torch.equal(tensor, other.state()[key]) for key, tensor in bytes_.state().items())
    bytes_.start_from(bytes_.weights())
    assert (bytes_._means["w"].get() == 0).all()
