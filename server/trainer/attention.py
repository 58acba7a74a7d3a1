"""Attention inside the groups of a pack, as an attention implementation that transformers calls in every layer.

A group attends in tiles, each with its own mask: a mask over the whole pack would be quadratic in the pack.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from opentinker.errors import ConfigError, TrainerError
from opentinker.server.trainer.flex import block_mask, flex
from opentinker.server.trainer.packing import Group, Pack

PACKED_ATTENTION = "opentinker_packed"
"""The name under which transformers finds `packed_attention`."""

TILE_ROWS = 192
"""Rows that attend together: branches do not see each other, so a product over many of them is mostly wasted."""

LONG_ROWS = 768
"""Tiles of more rows never hold their scores, which would be quadratic in them: 4,000 tokens of 9 heads are 0.3 GiB in bfloat16
in each layer, until the backward pass."""


def _is_long(rows: int) -> bool:
    return rows > LONG_ROWS


def is_one_sequence(group: Group, start: int, stop: int) -> bool:
    """Whether the tile is the prompt alone, or one branch."""
    bounds = {group.start, group.start + group.prompt}
    bounds |= {group.start + group.prompt + sum(group.branches[:n]) for n in range(1, len(group.branches) + 1)}
    return not any(start < bound < stop for bound in bounds)


class PackLayout:
    """The tiles of a pack on a device, with their masks made once for all layers."""

    def __init__(self, pack: Pack, dtype: torch.dtype, device: torch.device, *, flex: bool = False) -> None:
        """`flex`: attend by one FlexAttention kernel instead of tile by tile."""
        self._pack, self._flex = pack, flex
        self.tiles = [(group, start, stop) for group in pack.groups for start, stop in group.tiles(TILE_ROWS)]
        self._dtype, self._device = dtype, device
        self._masks: dict[int | None, list[torch.Tensor | None]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def block_mask(self, window: int | None) -> BlockMask | None:
        """What FlexAttention takes; None where tiles attend."""
        if self._flex and window not in self._block_masks:
            self._block_masks[window] = block_mask(self._pack, window, self._device)
        return self._block_masks.get(window)

    def masks(self, window: int | None) -> list[torch.Tensor | None]:
        """Additive mask of each tile, [rows, keys] in the model's dtype: 0 where a row sees a key, -inf elsewhere. None for a
        long tile in which each row sees all keys up to itself: its mask would be as large as its scores.

        A tile's keys are the group's prefix, its prompt, where it isn't in the tile, and the tile. With a sliding `window` a
        row sees only the last `window` positions, itself included.
        """
        if window not in self._masks:
            self._masks[window] = [
                None
                if window is None and _is_long(stop - start) and is_one_sequence(group, start, stop)
                else self._mask(group, start, stop, window)
                for group, start, stop in self.tiles
            ]
        return self._masks[window]

    def _mask(self, group: Group, start: int, stop: int, window: int | None) -> torch.Tensor:
        rows, before = np.arange(start, stop), [np.arange(*span) for span in group.prefix]
        if start != group.start:
            before.append(np.arange(group.start, group.start + group.prompt))
        keys = np.concatenate([*before, rows])
        sees = self._pack.sees(rows, keys)
        if window is not None:
            position = self._pack.positions_T
            sees &= position[rows][:, None] - position[keys][None, :] < window
        additive = np.where(sees, np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(additive).to(self._device, self._dtype)


def _attend_causally(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one sequence, query [H, rows, D]; key, value [K, rows, D], by a kernel that holds no scores."""
    shared = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
    out: torch.Tensor = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, scale=scale)
    return out[0]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one tile: query [H, rows, D]; key, value [K, keys, D] with H a multiple of K; mask [rows, keys]."""
    heads, rows, width = query.shape
    if query.is_cuda or _is_long(rows):
        shared = heads // key.shape[0]
        key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
        out: torch.Tensor = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=scale)
        return out[0]
    # Plain products beat the fused CPU kernel, whose backward is slow (measured 3x with head_dim 64 in bfloat16). The
    # query heads that share a key head are rows of one product, so keys and values are never repeated.
    folded = (query * scale).reshape(key.shape[0], -1, width)
    scores = torch.bmm(folded, key.transpose(1, 2)).add_(mask.repeat(heads // key.shape[0], 1))
    return torch.bmm(torch.softmax(scores, -1), value).view(heads, rows, -1)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackLayout | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a pack: query [1, H, T, D]; key and value [1, K, T, D]; the result is [1, T, H, D].

    `packed` arrives through the keyword arguments of the model's forward.

    Raises:
        TrainerError: the model did not pass the layout on.
        ConfigError: the model bends its scores (soft cap) or has attention sinks.
    """
    for name in ("softcap", "s_aux"):
        if unused.get(name) is not None:
            raise ConfigError(f"the trainer cannot pack models whose attention has '{name}'")
    if packed is None:
        raise TrainerError(f"{type(module).__name__} does not pass the pack's layout to its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (blocks := packed.block_mask(sliding_window)) is not None:
        return flex(query, key, value, blocks, scale).transpose(1, 2).contiguous(), None
    # split, not slices: the gradient of a slice is as long as the whole pack.
    sizes = [stop - start for _, start, stop in packed.tiles]
    queries, keys, values = (torch.split(tensor.squeeze(0), sizes, 1) for tensor in (query, key, value))
    parts = []
    seen: dict[
        int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ] = {}  # by their first rows: prefixes, and the tile's prompt
    for (group, start, _), mask, q, k, v in zip(packed.tiles, packed.masks(sliding_window), queries, keys, values, strict=True):
        before = [seen[first] for first, _ in group.prefix]
        if start == group.start:
            seen[start] = (q[:, : group.prompt], k[:, : group.prompt], v[:, : group.prompt])
        else:
            before.append(seen[group.start])
        if before:
            k, v = torch.cat([*(each[1] for each in before), k], 1), torch.cat([*(each[2] for each in before), v], 1)
        if mask is None:
            # Together with the rows before it, which are computed once more and dropped, a branch is a plain sequence.
            whole = torch.cat([*(each[0] for each in before), q], 1) if before else q
            parts.append(_attend_causally(whole, k, v, scale)[:, -q.shape[1] :])
        else:
            parts.append(_attend(q, k, v, mask, scale))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return joined.transpose(0, 1).unsqueeze(0).contiguous(), None


# What differs from pack to pack is no part of compiled layers.
AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]
