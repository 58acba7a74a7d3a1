"""8-bit moments on several ranks are the bytes that one rank would have, wherever the rows are cut, and the pieces of them."""

from dataclasses import dataclass, field
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from opentinker.server.trainer.eight_bit import BLOCK, Quantized
from opentinker.server.trainer.ranks import Ranks, rows_of
from opentinker.server.trainer.row_eight_bit import QuantizedRows
from opentinker.server.trainer.state_plan import Piece

CPU = torch.device("cpu")


@dataclass
class FakeRank:
    """One of several ranks that come to an exchange one after another: what the largest is over all of them is known before."""

    rank: int
    count: int
    expected: torch.Tensor
    device: torch.device = CPU
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
    shared = parts[0].shared
    assert [part.shared for part in parts] == [shared] * count
    assert [len(rank.seen) for rank in ranks] == [int(shared)] * count  # they agree on the scales only where they have to
    for part in parts:
        assert torch.equal(part.all_scales(), whole.scales)
        assert torch.equal(part.scales, part.own_scales(whole.scales))
    assert torch.equal(torch.stack([rank.seen[0] for rank in ranks]).amax(0), whole.scales)
    codes = torch.cat([part.codes.reshape(-1) for part in parts])
    assert torch.equal(codes, whole.codes.reshape(-1)[: values.numel()])
    assert torch.equal(torch.cat([part.get() for part in parts]), whole.get())
    assert all(part.codes.nbytes <= -(-rows // count) * width for part in parts)
    assert whole.codes.shape[1] == BLOCK


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_pieces_of_rows_that_share_no_block_are_stepped_alone(rows: int, blocks: int, count: int, signed: bool) -> None:
    values = torch.randn(rows, blocks * BLOCK, generator=torch.Generator().manual_seed(rows)).abs_()
    for rank in (FakeRank(rank, count, torch.empty(0)) for rank in range(count)):
        own = rank.rows(values)
        whole, cut = (QuantizedRows(own, values.shape, cast(Ranks, rank), signed=signed) for _ in range(2))
        assert not whole.shared
        whole.put(own)
        for start in range(0, own.numel(), 2 * BLOCK):
            piece = Piece("w", start, min(start + 2 * BLOCK, own.numel()))
            codes, scales = cut.codes[piece.start : piece.stop], cut.scales[piece.start // BLOCK : -(-piece.stop // BLOCK)]
            cut.part(piece, codes, scales).put(own.reshape(-1)[piece.start : piece.stop])
        assert torch.equal(cut.codes, whole.codes)
        assert torch.equal(cut.scales, whole.scales)
        assert rank.seen == []
