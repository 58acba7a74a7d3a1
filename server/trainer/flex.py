"""Attention over a whole pack by one FlexAttention kernel (Dong et al., 2024), for CUDA: blocks of the scores that no row needs
are skipped, and no mask is held.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from opentinker.server.trainer.packing import Pack

BLOCK = 128
"""Rows, and keys, of a block."""


def needed_blocks(pack: Pack, size: int) -> npt.NDArray[np.bool_]:
    """Which blocks of `size` rows (first axis) may see something of which blocks of `size` keys (second axis)."""
    count = -(-len(pack) // size)
    needed = np.zeros((count, count), np.bool_)

    def mark(rows: tuple[int, int], keys: tuple[int, int]) -> None:
        if rows[0] < rows[1] and keys[0] < keys[1]:
            needed[rows[0] // size : (rows[1] - 1) // size + 1, keys[0] // size : (keys[1] - 1) // size + 1] = True

    for group in pack.groups:
        prompt = (group.start, group.start + group.prompt)
        for span in (*group.prefix, prompt):
            mark((group.start, group.stop), span)
        start = prompt[1]
        for branch in group.branches:
            mark((start, start + branch), (start, start + branch))
            start += branch
    return np.tril(needed)


def block_mask(pack: Pack, window: int | None, device: torch.device) -> BlockMask:
    """What each row of the pack sees; see `Pack.sees` and `PackLayout.masks`."""
    rows = len(pack)
    ends, positions = (torch.from_numpy(array.astype(np.int32)).to(device) for array in (pack.ends_T, pack.positions_T))

    def sees(batch: Any, head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (key <= row) & (row < ends[key])
        return seen if window is None else seen & (positions[row] - positions[key] < window)

    needed = needed_blocks(pack, BLOCK)
    counts = torch.from_numpy(needed.sum(1).astype(np.int32))
    # The needed blocks of each row of blocks first, in order.
    order = torch.from_numpy(np.argsort(~needed, axis=1, kind="stable").astype(np.int32))
    return BlockMask.from_kv_blocks(
        counts[None, None].to(device), order[None, None].to(device), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(rows, rows)
    )


def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float) -> torch.Tensor:
    """query [1, H, T, D]; key and value [1, K, T, D]; the result is [1, H, T, D]."""
    out: torch.Tensor = _kernel(query.device.type)(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
    return out


@cache
def _kernel(device: str) -> Any:
    """Compiled where there is a kernel; elsewhere torch computes the same plainly, and forward only."""
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
