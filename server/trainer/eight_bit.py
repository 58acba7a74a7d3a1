"""AdamW with moments of a byte each: block-wise dynamic quantization (Dettmers et al., 2022, "8-bit Optimizers via Block-wise
Quantization", sections 2.1 and 2.2), written in plain torch, so that it runs wherever the trainer does.

Of the second moment the square root is kept, whose range is half as wide, and no entry above 0 becomes 0: it is divided by.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import Protocol, Self

import torch

from opentinker.client.messages import AdamParams
from opentinker.server.trainer.optimizer import MasterOptimizer
from opentinker.server.trainer.state_plan import Piece
from opentinker.server.trainer.state_stream import Column, Views

BLOCK = 256
"""Entries that share a scale."""
SMALLEST = 4096
"""Smaller parameters, norms and biases, keep float32 moments, as the paper's authors do it."""


@cache
def codebook(signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values of a byte, ascending: 0, 1 and seven decades below 1, each with twice as many values as the one below."""
    decades = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float64)
        decades.append(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)
    positive = torch.cat(decades)
    parts = [positive, torch.tensor([0.0, 1.0], dtype=torch.float64), *([-positive] if signed else [])]
    return torch.cat(parts).sort().values.float().to(device)


Zeros = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes a tensor where moments are kept."""


def cpu_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=dtype)


class Quantized:
    """A float32 tensor in bytes; zeros at first."""

    per = BLOCK
    """Numbers of a row of `codes`."""
    shared = False
    """Whether other ranks have parts of its blocks."""

    def __init__(self, like: torch.Tensor, *, signed: bool, zeros: Zeros = cpu_zeros) -> None:
        self._shape, self._signed = like.shape, signed
        blocks = -(-like.numel() // BLOCK)
        self.codes = zeros((blocks, BLOCK), torch.uint8)
        self.scales = zeros((blocks, 1), torch.float32)
        """The largest magnitude of each block."""

    def part(self, piece: Piece, codes: torch.Tensor, scales: torch.Tensor) -> Self:
        """A piece, flat, whose bytes are in these tensors."""
        part = copy(self)
        part._shape, part.codes, part.scales = torch.Size((len(piece),)), codes, scales
        return part

    def get(self) -> torch.Tensor:
        values = codebook(self._signed, self.codes.device)[self.codes.int()] * self.scales
        return values.view(-1)[: self._shape.numel()].view(self._shape)

    def put(self, tensor: torch.Tensor) -> None:
        flat = torch.nn.functional.pad(tensor.reshape(-1), (0, self.codes.numel() - tensor.numel())).view_as(self.codes)
        self.scales.copy_(flat.abs().amax(1, keepdim=True))
        self.codes.copy_(encoded(flat, self.scales, signed=self._signed))


def encoded(values: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The byte of each value below a scale that is no smaller, both float32 of shapes that match."""
    unit = values / scales.clamp_min(torch.finfo(torch.float32).tiny)
    book = codebook(signed, values.device)
    codes = torch.bucketize(unit, (book[:-1] + book[1:]) / 2)
    if not signed:
        codes.masked_fill_((codes == 0) & (unit > 0), 1)
    return codes


class Bytes(Protocol):
    """A float32 tensor, or a rank's rows of one, in bytes: as `Quantized`, or `QuantizedRows` on several ranks."""

    codes: torch.Tensor
    scales: torch.Tensor
    per: int
    shared: bool

    def part(self, piece: Piece, codes: torch.Tensor, scales: torch.Tensor) -> Self: ...

    def get(self) -> torch.Tensor: ...

    def put(self, tensor: torch.Tensor, /) -> None: ...


class EightBitOptimizer(MasterOptimizer):
    """A `MasterOptimizer` whose moments of large parameters take 2 bytes in place of 8."""

    _means: Mapping[str, Bytes]
    _roots: Mapping[str, Bytes]

    def _keeps_float(self, name: str) -> bool:
        return self.parameters[name].numel() < SMALLEST

    def _make_moments(self) -> None:
        super()._make_moments()
        large = [name for name in self.parameters if not self._keeps_float(name)]
        self._means = {name: self._bytes(name, signed=True) for name in large}
        self._roots = {name: self._bytes(name, signed=False) for name in large}

    def _bytes(self, name: str, *, signed: bool) -> Bytes:
        """Zeros, for a moment of this parameter."""
        return Quantized(self.masters[name], signed=signed, zeros=partial(self._zeros, name))

    def _columns(self, name: str) -> list[Column]:
        if name not in self._means:
            return super()._columns(name)
        return [
            Column(tensor, per, whole=kept.shared)
            for kept in (self._means[name], self._roots[name])
            for tensor, per in ((kept.codes, kept.per), (kept.scales, BLOCK))
        ]

    def _move(
        self,
        pieces: Sequence[Piece],
        masters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        params: AdamParams,
        moments: Sequence[Views] | None = None,
    ) -> None:
        floats = [place for place, piece in enumerate(pieces) if piece.name not in self._means]
        of_floats = None if moments is None else [moments[place] for place in floats]
        super()._move(
            [pieces[p] for p in floats], [masters[p] for p in floats], [gradients[p] for p in floats], params, of_floats
        )
        for place, piece in enumerate(pieces):  # one at a time, in float32 meanwhile
            if piece.name not in self._means:
                continue
            mean, root = self._means[piece.name], self._roots[piece.name]
            if moments is not None:
                mean, root = mean.part(piece, *moments[place][:2]), root.part(piece, *moments[place][2:])
            exp_avg, exp_avg_sq = mean.get(), root.get().square_()
            self._adamw([masters[place]], [gradients[place]], [exp_avg], [exp_avg_sq], params)
            mean.put(exp_avg)
            root.put(exp_avg_sq.sqrt_())

    def held(self) -> dict[str, torch.Tensor]:
        state = super().held()
        for part, kept in (("exp_avg", self._means), ("exp_avg_sq_root", self._roots)):
            for name, quantized in kept.items():
                state |= {f"{part}/{name}": quantized.codes, f"{part}_scale/{name}": quantized.scales}
        return state
