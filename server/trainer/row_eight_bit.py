"""8-bit moments on several ranks: each keeps the bytes of its rows and the scales of their blocks. Several ranks may have parts
of a block, whose entries share a scale: then they agree on it, so that the bytes are those that one rank would have.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Self

import torch

from opentinker.server.trainer.eight_bit import BLOCK, EightBitOptimizer, Zeros, codebook, cpu_zeros, encoded
from opentinker.server.trainer.ranks import Ranks, rows_of
from opentinker.server.trainer.row_optimizer import RowOptimizer
from opentinker.server.trainer.state_plan import Piece


class QuantizedRows:
    """A rank's rows of a float32 tensor, in bytes; zeros at first. All ranks call `put` together if blocks are `shared`."""

    per = 1

    def __init__(self, own: torch.Tensor, shape: torch.Size, ranks: Ranks, *, signed: bool, zeros: Zeros = cpu_zeros) -> None:
        """`own` are the rank's rows of a tensor of this shape."""
        self._ranks, self._signed = ranks, signed
        first, _ = rows_of(shape[0], ranks.count, ranks.rank)
        begin = first * shape[1:].numel()
        self._blocks = slice(begin // BLOCK, -(-(begin + own.numel()) // BLOCK) if own.numel() else begin // BLOCK)
        self._all_blocks = -(-shape.numel() // BLOCK)
        self._lead = begin % BLOCK
        """Entries of the first block that are on ranks before."""
        _, second = rows_of(shape[0], ranks.count, 0)
        self.shared = second < shape[0] and second * shape[1:].numel() % BLOCK > 0
        """Whether a block has parts on several ranks."""
        self._shape = own.shape
        self.codes = zeros((own.numel(),), torch.uint8)
        self.scales = zeros((self._blocks.stop - self._blocks.start, 1), torch.float32)
        """The largest magnitude of each block that the rank has a part of."""

    def part(self, piece: Piece, codes: torch.Tensor, scales: torch.Tensor) -> Self:
        """A piece, flat, whose bytes are in these tensors; all of it if blocks are shared."""
        part = copy(self)
        part._shape, part.codes, part.scales = torch.Size((len(piece),)), codes, scales
        return part

    def get(self) -> torch.Tensor:
        values = codebook(self._signed, self.codes.device)[self.codes.int()] * self._each(self.scales)
        return values.view(self._shape)

    def put(self, own: torch.Tensor) -> None:
        flat = own.reshape(-1)
        if len(flat):
            behind = len(self.scales) * BLOCK - self._lead - len(flat)
            blocks = torch.nn.functional.pad(flat, (self._lead, behind)).view(-1, BLOCK)
            self.scales.copy_(blocks.abs().amax(1, keepdim=True))
        if self.shared:
            self.scales.copy_(self.all_scales()[self._blocks])
        self.codes.copy_(encoded(flat, self._each(self.scales), signed=self._signed))

    def all_scales(self) -> torch.Tensor:
        """Those of the full tensor, [blocks, 1]. All ranks call it together."""
        scales = torch.zeros(self._all_blocks, 1, device=self._ranks.device)
        scales[self._blocks] = self.scales.to(scales.device)
        return self._ranks.largest(scales)

    def own_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Of those of the full tensor."""
        return scales[self._blocks]

    def _each(self, scales: torch.Tensor) -> torch.Tensor:
        """The scale of each own entry, flat."""
        return scales.expand(-1, BLOCK).reshape(-1)[self._lead : self._lead + self.codes.numel()]


class EightBitRowOptimizer(EightBitOptimizer, RowOptimizer):
    """A `RowOptimizer` with moments as `EightBitOptimizer` has them; their checkpoints are the same."""

    _means: Mapping[str, QuantizedRows]
    _roots: Mapping[str, QuantizedRows]

    def _bytes(self, name: str, *, signed: bool) -> QuantizedRows:
        shape, zeros = self.parameters[name].shape, partial(self._zeros, name)
        return QuantizedRows(self.masters[name], shape, self._ranks, signed=signed, zeros=zeros)

    def _uncut(self) -> Container[str]:
        return {name for name, mean in self._means.items() if mean.shared}

    def like(self) -> dict[str, torch.Tensor]:
        found = super().like()
        for key, tensor in found.items():
            if (kind := self._kind(key)) != "float":
                width, dtype = (BLOCK, torch.uint8) if kind == "codes" else (1, torch.float32)
                found[key] = torch.empty(-(-tensor.numel() // BLOCK), width, dtype=dtype, device="meta")
        return found

    def rows(self, keys: Sequence[str]) -> tuple[list[torch.Tensor], list[torch.Size]]:
        """Of bytes the rank's rows of the parameter, which are made blocks when they are together."""
        rows, shapes = super().rows(keys)
        for place, key in enumerate(keys):
            if self._kind(key) == "scales":
                scales = self._kept(key).all_scales()
                shapes[place] = scales.shape
                rows[place] = self._ranks.rows(scales)
        return rows, shapes

    def _whole_state(self, keys: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in super()._whole_state(keys):
            if self._kind(key) == "codes":
                blocks = -(-tensor.numel() // BLOCK)
                tensor = torch.nn.functional.pad(tensor.reshape(-1), (0, blocks * BLOCK - tensor.numel())).view(blocks, BLOCK)
            yield key, tensor

    def _kept_of(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        kind = self._kind(key)
        if kind == "codes":
            shape = self.parameters[key.split("/", 1)[1]].shape
            return self._ranks.rows(tensor.reshape(-1)[: shape.numel()].view(shape)).reshape(-1)
        return self._kept(key).own_scales(tensor) if kind == "scales" else super()._kept_of(key, tensor)

    def _kept(self, key: str) -> QuantizedRows:
        """The bytes that the codes or scales of this key are of."""
        part, name = key.split("/", 1)
        return (self._means if part.removesuffix("_scale") == "exp_avg" else self._roots)[name]

    def _kind(self, key: str) -> str:
        part, name = key.split("/", 1)
        if name not in self._means or part == "master":
            return "float"
        return "scales" if part.endswith("_scale") else "codes"
