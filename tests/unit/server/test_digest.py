import time
from collections.abc import Callable

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.server.digest import tensor_digest

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64)


def _tensor(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(size).remainder(97).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 16_384, 16_385, 40_001, 300_003])
def test_equal_tensors_have_equal_digests(size: int, dtype: torch.dtype) -> None:
    assert tensor_digest(_tensor(size, dtype)) == tensor_digest(_tensor(size, dtype).clone())


@given(size=st.integers(1, 70_000), at=st.data(), dtype=st.sampled_from(DTYPES))
@settings(deadline=None, max_examples=60)
def test_a_change_of_any_one_value_changes_the_digest(size: int, at: st.DataObject, dtype: torch.dtype) -> None:
    before = _tensor(size, dtype)
    after = before.clone()
    after[at.draw(st.integers(0, size - 1))] += 1
    assert tensor_digest(before) != tensor_digest(after)


@given(
    values=hnp.arrays(np.float32, st.integers(2, 2_000), elements=st.floats(-10, 10, width=32)),
    at=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_exchanging_two_different_values_changes_the_digest(values: np.ndarray, at: st.DataObject) -> None:
    i, j = (at.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    swapped = values.copy()
    swapped[[i, j]] = swapped[[j, i]]
    same_bits = values.tobytes() == swapped.tobytes()
    assert (tensor_digest(torch.from_numpy(values)) == tensor_digest(torch.from_numpy(swapped))) == same_bits


def test_moving_a_sign_changes_the_digest() -> None:
    """Signs are the top bits of words: a hash modulo 2^64 of 64-bit words would lose where they are."""
    first, second = torch.ones(8, 64), torch.ones(8, 64)
    first[0, 1], second[3, 9] = -1, -1
    assert tensor_digest(first) != tensor_digest(second)


def test_exchanging_two_blocks_changes_the_digest() -> None:
    first, second = torch.randn(16_384, generator=torch.Generator().manual_seed(0)), torch.zeros(16_384)
    assert tensor_digest(torch.cat([first, second])) != tensor_digest(torch.cat([second, first]))


def test_dtype_and_shape_are_part_of_the_digest() -> None:
    zeros = torch.zeros(6)
    seen = {tensor_digest(t) for t in (zeros, zeros.view(2, 3), zeros.view(3, 2), zeros.int(), torch.zeros(7), torch.zeros(0))}
    assert len(seen) == 6


def test_layout_in_memory_is_not_part_of_the_digest() -> None:
    matrix = _tensor(3_001 * 7, torch.bfloat16).view(3_001, 7)
    assert tensor_digest(matrix.t()) == tensor_digest(matrix.t().contiguous())
    assert tensor_digest(matrix.view(-1)[1:]) == tensor_digest(matrix.view(-1)[1:].clone())


def test_a_parameter_that_requires_grad_has_a_digest() -> None:
    assert tensor_digest(torch.nn.Parameter(torch.zeros(3))) == tensor_digest(torch.zeros(3))


def test_a_digest_costs_little_more_than_reading_the_tensor() -> None:
    tensor = torch.zeros(20_000_000, dtype=torch.bfloat16)

    def fastest(call: Callable[[], object]) -> float:
        """Of several, because other programs run, too."""
        times = []
        for _ in range(7):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return min(times)

    # About 1 here; the bound only catches an implementation that leaves vectorized code.
    assert fastest(lambda: tensor_digest(tensor)) < 40 * fastest(lambda: tensor.view(torch.int16).sum())
