"""How a batch is shared out among the ranks of a trainer: whole packs, so that nobody else sees a datum of theirs."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opentinker.client.messages import Datum
from opentinker.server.trainer.packing import Pack

_PASS_TOKENS = 64
"""What a pass costs besides its tokens, in tokens."""
_SLACK = (1.0, 1.25)
"""How much fuller than even the packs may be when they are made smaller to keep all ranks busy."""


@dataclass(frozen=True)
class Share:
    """One rank's part of a batch. Its packs count its own data from 0."""

    indices: tuple[int, ...]
    """Where its data are in the batch."""
    data: tuple[Datum, ...]
    packs: tuple[Pack, ...]
    passes: int
    """The packs of the rank that has most: ranks that compute together make as many passes each."""
    images: tuple[bytes, ...] = ()
    """The files of the images in its data, for a rank that has no store of the server's."""


def share_out(data: Sequence[Datum], ranks: int, pack_tokens: int, pack: Callable[[int], list[Pack]]) -> list[Share]:
    """A share for each rank, balanced by tokens; a rank may have none. The same for the same batch.

    `pack` makes packs of at most so many tokens; they are smaller than `pack_tokens` where that keeps more ranks busy.
    """
    packs = pack(pack_tokens)
    tokens = sum(map(_tokens, packs))
    even = tokens / (ranks * max(1, -(-len(packs) // ranks)))
    plans = [packs, *(pack(int(even * slack) + 1) for slack in _SLACK if even * slack < pack_tokens and tokens)]
    shared = [(plan, balance([_tokens(p) for p in plan], ranks)) for plan in plans]
    plan, parts = min(shared, key=lambda each: max(_cost([each[0][i] for i in part]) for part in each[1]))
    passes = max(len(part) for part in parts)
    return [_share(data, [plan[i] for i in part], passes) for part in parts]


def balance(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the sizes by rank, in ascending order: the largest first, each to the rank that has least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = heapq.heappop(loads)
        parts[rank].append(index)
        heapq.heappush(loads, (load + sizes[index], rank))
    return [sorted(part) for part in parts]


def _tokens(pack: Pack) -> int:
    return len(pack.tokens_T)


def _cost(packs: Sequence[Pack]) -> int:
    return sum(_tokens(pack) + _PASS_TOKENS for pack in packs)


def _share(data: Sequence[Datum], packs: Sequence[Pack], passes: int) -> Share:
    indices = sorted({int(index) for pack in packs for index in pack.data_N})
    at = np.zeros(len(data), np.int32)
    at[indices] = np.arange(len(indices))
    own = tuple(replace(pack, data_N=at[pack.data_N]) for pack in packs)
    return Share(tuple(indices), tuple(data[i] for i in indices), own, passes)
