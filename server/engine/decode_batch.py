"""Sequences that the transformers engine samples together: each a row of one key-value cache, which rows join and leave.

Axes: B = sequences of the batch, T = positions in it (left-padded), V = vocabulary.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad

from opentinker.client.messages import FloatArray, ImageChunk, IntArray, Sample, SampleRequest, SamplingParams
from opentinker.server.engine.base import AdapterId


@dataclass
class Pending:
    """A request, and what there is of its answer."""

    request: SampleRequest
    params: SamplingParams
    prompt: IntArray
    images: tuple[tuple[int, ImageChunk], ...]
    adapter: AdapterId | None
    version: int
    samples: dict[int, Sample] = field(default_factory=dict)
    prompt_logprobs: FloatArray | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal prompts under the same weights."""
        return (self.adapter, self.prompt.tobytes(), *((start, image.sha256) for start, image in self.images))


@dataclass
class Row:
    """One sequence that is being sampled."""

    pending: Pending
    index: int
    generator: random.Random
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Batch:
    """Sequences that are decoded together. `mask_B_T` is 0 on padding, which is always on the left."""

    rows: list[Row]
    cache: Any
    mask_B_T: torch.Tensor
    logits_B_V: torch.Tensor

    def keep(self, chosen: list[int]) -> None:
        """Drop all rows but the chosen ones, and the padding that none of them needs."""
        index = torch.tensor(chosen, device=self.mask_B_T.device)
        self.rows = [self.rows[i] for i in chosen]
        self.mask_B_T, self.logits_B_V = self.mask_B_T[index], self.logits_B_V[index]
        longest = int(self.mask_B_T.sum(dim=1).max())
        self.mask_B_T = self.mask_B_T[:, -longest:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[index, :, -longest:]
            layer.values = layer.values[index, :, -longest:]

    def join(self, other: "Batch") -> None:
        """Append the other batch's rows; the shorter of the two gets more padding."""
        length = max(self.mask_B_T.shape[1], other.mask_B_T.shape[1])

        def joined(mine: torch.Tensor, theirs: torch.Tensor, after: int) -> torch.Tensor:
            # `after` trailing dimensions follow T.
            grown = [pad(x, (0, 0) * after + (length - x.shape[-1 - after], 0)) for x in (mine, theirs)]
            return torch.cat(grown)

        self.rows += other.rows
        self.logits_B_V = torch.cat([self.logits_B_V, other.logits_B_V])
        self.mask_B_T = joined(self.mask_B_T, other.mask_B_T, 0)
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys = joined(mine.keys, theirs.keys, 1)
            mine.values = joined(mine.values, theirs.values, 1)
