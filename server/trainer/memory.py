"""How much memory a pass takes, and packs that fit into what there is. Pure: what is measured and what is free is passed in.

The memory of a pass is taken to be linear in its `PassShape`; the factors are measured on small passes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opentinker.client.messages import Datum
from opentinker.errors import TooLargeError
from opentinker.server.trainer.attention import LONG_ROWS, TILE_ROWS, is_one_sequence
from opentinker.server.trainer.head import head_bytes
from opentinker.server.trainer.packing import Pack, pack_data

MASK_BYTES = 16
"""Of one entry of a mask while it is made: an additive mask, and what it is computed from."""


@dataclass(frozen=True)
class PassShape:
    """What of a pass decides about its memory."""

    tokens: int
    targets: int
    scores: int
    """Attention scores of one head in one layer, over the tiles that hold theirs until the backward pass."""
    long_keys: int = 0
    """Keys of the long tiles, which hold no scores: their prompt's rows are computed once more for each."""
    masked: int = 0
    """Entries of the masks of long tiles, which are made once for all layers."""
    copied_keys: int = 0
    """Keys that the other tiles see besides their own rows, those of prefixes and prompts: each tile has them copied."""


def pass_shape(pack: Pack, *, windowed: bool = False) -> PassShape:
    """The shape of a pack's pass; `windowed`: some layer attends within a sliding window, which takes a mask of its own."""
    scores = long_keys = masked = copied_keys = 0
    for group in pack.groups:
        for start, stop in group.tiles(TILE_ROWS):
            rows = stop - start
            keys = group.prefix_length + (rows if start == group.start else group.prompt + rows)
            if rows <= LONG_ROWS:
                scores += rows * keys
                copied_keys += keys - rows
            else:
                long_keys += keys
                if windowed or not is_one_sequence(group, start, stop):
                    masked += rows * keys
    return PassShape(len(pack), len(pack.rows_N), scores, long_keys, masked, copied_keys)


def sequence_shape(tokens: int, *, windowed: bool = False) -> PassShape:
    """The shape of a pass of one sequence that is weighted all over."""
    if tokens <= LONG_ROWS:
        return PassShape(tokens, tokens, tokens**2)
    return PassShape(tokens, tokens, 0, tokens, tokens**2 if windowed else 0)


@dataclass(frozen=True)
class PassCost:
    """Bytes that a pass takes at its peak, beside weights, gradients and optimizer state."""

    fixed: float
    per_token: float
    per_score: float
    per_long_key: float
    vocabulary: int
    hidden_size: int
    per_copied_key: float = 0.0

    def bytes(self, shape: PassShape) -> float:
        variable = self.per_token * shape.tokens + self.per_score * shape.scores + self.per_long_key * shape.long_keys
        variable += self.per_copied_key * shape.copied_keys
        head = head_bytes(shape.targets, self.vocabulary, self.hidden_size)
        return self.fixed + variable + head + MASK_BYTES * shape.masked

    def tokens_within(self, limit: float, *, windowed: bool = False) -> int:
        """Tokens of the longest single sequence whose pass takes at most `limit` bytes."""
        low, high = 0, 1
        while high < 1 << 40 and self.bytes(sequence_shape(high, windowed=windowed)) <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.bytes(sequence_shape(middle, windowed=windowed)) <= limit
            low, high = (middle, high) if fits else (low, middle)
        return low


def fitted(begun: PassCost, measured: Mapping[PassShape, int]) -> PassCost:
    """The cost whose first three factors explain best what was measured of three passes or more with few targets and without
    copied keys; no factor is below 0, and no pass that was measured is underestimated. Passes with copied keys raise the factor
    of those that was `begun` with, if they took more."""
    plain = {shape: peak for shape, peak in measured.items() if not shape.copied_keys}
    rows = [(1.0, float(shape.tokens), float(shape.scores)) for shape in plain]
    factors, *_ = np.linalg.lstsq(np.array(rows), np.array(list(plain.values()), np.float64), rcond=None)
    fixed, per_token, per_score = (max(0.0, float(factor)) for factor in factors)
    cost = replace(begun, fixed=fixed, per_token=per_token, per_score=per_score)
    short = max(peak - cost.bytes(shape) for shape, peak in plain.items())
    cost = replace(cost, fixed=fixed + max(0.0, short))
    more = [(peak - cost.bytes(shape)) / shape.copied_keys for shape, peak in measured.items() if shape.copied_keys]
    return replace(cost, per_copied_key=cost.per_copied_key + max([0.0, *more]))


def plan_packs(
    data: Sequence[Datum], pack_tokens: int, fits: Callable[[Pack], bool], *, together: int = 1
) -> tuple[list[Pack], int]:
    """(packs of which each fits, the tokens that they were packed to): `pack_tokens`, or as often half of it as needed, so that
    a little more or less free memory seldom changes the packs, and with them the last bits of results.

    Raises:
        DoesNotFitError: what must stay in one pass, a datum or `together` data, does not fit alone.
    """
    tokens = pack_tokens
    while True:
        packs = pack_data(data, tokens, together=together)
        too_large = [pack for pack in packs if not fits(pack)]
        if not too_large:
            return packs, tokens
        for pack in too_large:
            units = sorted({int(datum) // together for datum in pack.data_N})
            if len(units) == 1:
                first = units[0] * together
                raise DoesNotFitError(range(first, min(first + together, len(data))), pack)
        tokens //= 2


class DoesNotFitError(Exception):
    """Data that must be in one pass take more memory than there is."""

    def __init__(self, indices: range, pack: Pack) -> None:
        super().__init__(f"data {indices} do not fit")
        self.indices, self.pack = indices, pack


def refusal(error: DoesNotFitError, needed: float, limit: float, tokens: int, *, recomputes: bool, lora: bool) -> TooLargeError:
    """What a client is told: how much there is room for, and what to set."""
    which = " and ".join(str(index) for index in error.indices)
    have = "datum {} has" if len(error.indices) == 1 else "data {}, which stay together, have"
    ways = ["shorten the sequences (sampling.max_tokens, rollout.max_turns)"]
    ways += [] if recomputes else ["set trainer.activation_checkpointing=true"]
    ways += [] if lora else ["train an adapter (lora)"]
    return TooLargeError(
        f"{have.format(which)} {len(error.pack)} tokens, whose pass takes about {gib(needed)}; with {gib(max(limit, 0))} to "
        f"spare about {tokens} tokens of one sequence fit; nothing was computed",
        hint=", ".join([*ways, "or give the server more memory"]),
    )


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
