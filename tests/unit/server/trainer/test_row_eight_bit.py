"""8-bit moments on several ranks are the bytes that one rank would have, wherever the rows are cut."""

from dataclasses import dataclass, field
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from opentinker.server.trainer.eight_bit import BLOCK, Quantized
from opentinker.server.trainer.ranks import Ranks, rows_of
from opentinker.server.trainer.row_eight_bit import QuantizedRows


@dataclass
class FakeRank:
    """One of several ranks that come to an exchange one after another: what the largest is over all of them is known before."""

    rank: int
    count: int
    expected: torch.Tensor
    seen: list[torch.Tensor] = field(default_factory=list)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        start, stop = rows_of(tensor.shape[0], self.count, self.rank)
        return tensor[start:stop]

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        self.seen.append(tensor.clone())
        return tensor.copy_(self.expected)


@given(st.integers(1, 40), st.integers(1, 700), st.integers(1, 7), st.booleans(), st.integers(0, 1000))
def test_rows_on_any_number_of_ranks_are_one_ranks_bytes(rows: int, width: int, count: int, signed: bool, seed: int) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) ** 3
    values = values if signed else values.abs()
    whole = Quantized(values, signed=signed)
    whole.put(values)
    ranks = [FakeRank(rank, count, whole.scales) for rank in range(count)]
    parts = []
    for rank in ranks:
        own = rank.rows(values)
        part = QuantizedRows(own, values.shape, cast(Ranks, rank), signed=signed)
        assert not part.get().any()
        part.put(own)
        parts.append(part)
    assert torch.equal(torch.stack([rank.seen[0] for rank in ranks]).amax(0), whole.scales)
    codes = torch.cat([part.codes.reshape(-1) for part in parts])
    assert torch.equal(codes, whole.codes.reshape(-1)[: values.numel()])
    assert torch.equal(torch.cat([part.get() for part in parts]), whole.get())
    assert all(part.codes.nbytes <= -(-rows // count) * width for part in parts)
    assert whole.codes.shape[1] == BLOCK
