"""8-bit moments on several ranks: each keeps the bytes of its rows. A block of entries that share a scale may have parts on
several ranks, so scales, a 64th of a byte per entry, are whole on all, and the bytes those that one rank would have.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from opentinker.server.trainer.eight_bit import BLOCK, EightBitMoments, codebook, encoded
from opentinker.server.trainer.gathered import Gather
from opentinker.server.trainer.ranks import Ranks, rows_of
from opentinker.server.trainer.row_optimizer import RowOptimizer


class QuantizedRows:
    """A rank's rows of a float32 tensor, in bytes; zeros at first. All ranks call `put` together."""

    def __init__(self, own: torch.Tensor, shape: torch.Size, ranks: Ranks, *, signed: bool) -> None:
        """`own` are the rank's rows of a tensor of this shape."""
        self._ranks, self._signed = ranks, signed
        first, _ = rows_of(shape[0], ranks.count, ranks.rank)
        begin = first * shape[1:].numel()
        self._blocks = slice(begin // BLOCK, -(-(begin + own.numel()) // BLOCK) if own.numel() else begin // BLOCK)
        self._lead = begin % BLOCK
        """Entries of the first block that are on ranks before."""
        self.codes = torch.zeros_like(own, dtype=torch.uint8)
        self.scales = torch.zeros(-(-shape.numel() // BLOCK), 1, device=own.device)
        """The largest magnitude of each block of the full tensor."""

    def get(self) -> torch.Tensor:
        return codebook(self._signed, self.codes.device)[self.codes.int()] * self._each(self.scales)

    def put(self, own: torch.Tensor) -> None:
        blocks = self.scales[self._blocks]
        behind = blocks.numel() * BLOCK - self._lead - own.numel()
        self.scales.zero_()
        if own.numel():
            flat = torch.nn.functional.pad(own.reshape(-1), (self._lead, behind)).view(-1, BLOCK)
            blocks.copy_(flat.abs().amax(1, keepdim=True))
        self._ranks.largest(self.scales)
        self.codes.copy_(encoded(own, self._each(self.scales), signed=self._signed))

    def _each(self, scales: torch.Tensor) -> torch.Tensor:
        """The scale of each own entry."""
        entries = scales[self._blocks].expand(-1, BLOCK).reshape(-1)
        return entries[self._lead : self._lead + self.codes.numel()].view(self.codes.shape)


class EightBitRowOptimizer(EightBitMoments, RowOptimizer):
    """A `RowOptimizer` with moments as `EightBitOptimizer` has them; their checkpoints are the same."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks, gather: Gather | None = None) -> None:
        super().__init__(parameters, ranks, gather)
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self._means = {name: QuantizedRows(own, shapes[name], ranks, signed=True) for name, own in self._large.items()}
        self._roots = {name: QuantizedRows(own, shapes[name], ranks, signed=False) for name, own in self._large.items()}

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
                shapes[place] = rows[place].shape
                rows[place] = self._ranks.rows(rows[place])
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
            return self._ranks.rows(tensor.reshape(-1)[: shape.numel()].view(shape))
        return tensor if kind == "scales" else super()._kept_of(key, tensor)

    def _kind(self, key: str) -> str:
        part, name = key.split("/", 1)
        if name not in self._means or part == "master":
            return "float"
        return "scales" if part.endswith("_scale") else "codes"
