"""Attention inside the groups of a pack, as an attention implementation that transformers calls in every layer.

Each group attends in itself: a mask over the whole pack would be quadratic in the pack.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from opentinker.errors import TrainerError
from opentinker.server.trainer.packing import Group, Pack

PACKED_ATTENTION = "opentinker_packed"
"""The name under which transformers finds `packed_attention`."""


class PackLayout:
    """The groups of a pack on a device, with their masks made once for all layers."""

    def __init__(self, pack: Pack, dtype: torch.dtype, device: torch.device) -> None:
        self.groups = pack.groups
        self._positions = pack.positions_T
        self._dtype, self._device = dtype, device
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def mask(self, group: Group, window: int | None) -> torch.Tensor:
        """Additive mask of a group, [L, L] in the model's dtype: 0 where a row sees another, -inf elsewhere.

        With a sliding `window` a row sees only the last `window` positions, itself included.
        """
        key = (group.start, window)
        if key not in self._masks:
            sees = group.mask()
            if window is not None:
                position = self._positions[group.start : group.stop]
                sees &= position[:, None] - position[None, :] < window
            additive = np.where(sees, np.float32(0), np.float32(-np.inf))
            self._masks[key] = torch.from_numpy(additive).to(self._device, self._dtype)
        return self._masks[key]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one group: query [H, L, D]; key, value [K, L, D] with H a multiple of K; mask [L, L]."""
    heads, length, width = query.shape
    if query.is_cuda:
        shared = heads // key.shape[0]
        key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
        out: torch.Tensor = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=scale)
        return out[0]
    # Plain products beat the fused CPU kernel, whose backward is slow (measured 3x with head_dim 64 in bfloat16). The
    # query heads that share a key head are rows of one product, so keys and values are never repeated.
    folded = (query * scale).reshape(key.shape[0], -1, width)
    scores = torch.bmm(folded, key.transpose(1, 2)).view(key.shape[0], -1, length, length).add_(mask)
    weights = torch.softmax(scores, -1).view(key.shape[0], -1, length)
    return torch.bmm(weights, value).view(heads, length, -1)


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
    """
    if packed is None:
        raise TrainerError(f"{type(module).__name__} does not pass the pack's layout to its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # split, not slices: the gradient of a slice is as long as the whole pack.
    sizes = [group.stop - group.start for group in packed.groups]
    queries, keys, values = (tensor[0].split(sizes, 1) for tensor in (query, key, value))
    parts = [
        _attend(q, k, v, packed.mask(group, sliding_window), scale)
        for group, q, k, v in zip(packed.groups, queries, keys, values, strict=True)
    ]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return joined.transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
