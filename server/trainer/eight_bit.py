"""AdamW with moments of a byte each: block-wise dynamic quantization (Dettmers et al., 2022, "8-bit Optimizers via Block-wise
Quantization", sections 2.1 and 2.2), written in plain torch, so that it runs wherever the trainer does.

Of the second moment the square root is kept, whose range is half as wide, and no entry above 0 becomes 0: it is divided by.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import nn

from opentinker.client.messages import AdamParams
from opentinker.server.trainer.optimizer import MasterOptimizer

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


class Quantized:
    """A float32 tensor in bytes; zeros at first."""

    def __init__(self, like: torch.Tensor, *, signed: bool) -> None:
        self._shape, self._signed = like.shape, signed
        blocks = -(-like.numel() // BLOCK)
        self.codes = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=like.device)
        self.scales = torch.zeros(blocks, 1, device=like.device)
        """The largest magnitude of each block."""

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

    def get(self) -> torch.Tensor: ...

    def put(self, tensor: torch.Tensor, /) -> None: ...


class EightBitMoments(MasterOptimizer):
    """A `MasterOptimizer` whose moments of large parameters take 2 bytes in place of 8. Subclasses make them."""

    _means: Mapping[str, Bytes]
    _roots: Mapping[str, Bytes]

    @property
    def _large(self) -> dict[str, torch.Tensor]:
        """The masters whose moments are in bytes."""
        return {name: master for name, master in self.masters.items() if not self._keeps_float(name)}

    def _keeps_float(self, name: str) -> bool:
        return self.parameters[name].numel() < SMALLEST

    def _move(
        self, names: Sequence[str], masters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], params: AdamParams
    ) -> None:
        for name, master, gradient in zip(names, masters, gradients, strict=True):  # one at a time, in float32 meanwhile
            if name not in self._means:
                super()._move([name], [master], [gradient], params)
                continue
            mean, root = self._means[name], self._roots[name]
            exp_avg, exp_avg_sq = mean.get(), root.get().square_()
            self._adamw([master], [gradient], [exp_avg], [exp_avg_sq], params)
            mean.put(exp_avg)
            root.put(exp_avg_sq.sqrt_())

    def held(self) -> dict[str, torch.Tensor]:
        state = super().held()
        for part, kept in (("exp_avg", self._means), ("exp_avg_sq_root", self._roots)):
            for name, quantized in kept.items():
                state |= {f"{part}/{name}": quantized.codes, f"{part}_scale/{name}": quantized.scales}
        return state


class EightBitOptimizer(EightBitMoments):
    """8-bit moments in one process."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self._means = {name: Quantized(master, signed=True) for name, master in self._large.items()}
        self._roots = {name: Quantized(master, signed=False) for name, master in self._large.items()}
