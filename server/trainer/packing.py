"""How data share forward passes: each prompt is computed once, and groups are packed up to a token budget.

A datum's prompt is its tokens up to and including the one that predicts the first weighted target; the rest, up to the
last weighted target, is its branch. Data with equal prompts form a group, laid out as prompt, branch, branch, ...; a
branch sees the prompt and itself. Tokens that no weighted target depends on are left out. Prompts are equal if their images
are, too; an image is never cut, because no token of it is a weighted target.

Axes: T = tokens of a pack, L = tokens of a group, N = weighted targets of a pack.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from opentinker.client.messages import Datum, ImageChunk, IntArray, placed_images


@dataclass(frozen=True)
class Group:
    """Where a prompt and its branches lie in a pack: one after the other from row `start` on. Lengths in tokens."""

    start: int
    prompt: int
    branches: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.prompt + sum(self.branches)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which row (first axis) sees which (second axis), bool[L, L]."""
        every = np.arange(self.stop - self.start)
        return self.sees(every, every)

    def sees(self, rows: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these rows (first axis) see which of these keys (second axis); both count from the group's start."""
        branch_L = np.repeat(np.arange(len(self.branches) + 1), (self.prompt, *self.branches))
        of_key = branch_L[keys][None, :]
        seen: npt.NDArray[np.bool_] = ((of_key == 0) | (of_key == branch_L[rows][:, None])) & (keys[None, :] <= rows[:, None])
        return seen

    def tiles(self, rows: int) -> list[tuple[int, int]]:
        """(start, stop) in the pack of consecutive parts of at most `rows` rows, if they can be had without cutting the
        prompt or a branch. The first one starts with the prompt; a part sees the prompt and itself only."""
        tiles, start, stop = [], self.start, self.start + self.prompt
        for branch in self.branches:
            if branch and stop + branch - start > rows:
                tiles.append((start, stop))
                start = stop
            stop += branch
        return [*tiles, (start, stop)]


@dataclass(frozen=True)
class Pack:
    """One forward pass. Weighted target n is predicted by row `rows_N[n]` and is target `steps_N[n]` of datum `data_N[n]`."""

    tokens_T: IntArray
    positions_T: IntArray
    groups: tuple[Group, ...]
    rows_N: IntArray
    data_N: IntArray
    steps_N: IntArray
    images: tuple[tuple[int, ImageChunk], ...] = ()
    """(row of its first token, image)."""
    slots_T: IntArray | None = None
    """The slot of each row's datum, where the data are of several policies: see `AdapterPass.using`."""

    def __len__(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True)
class _Branch:
    datum: int
    prompt: IntArray
    tokens: IntArray
    steps: IntArray
    images: tuple[tuple[int, ImageChunk], ...]
    """(position of its first token, image), of prompt and branch."""
    slot: int

    @property
    def prompt_images(self) -> tuple[tuple[int, ImageChunk], ...]:
        return tuple((start, image) for start, image in self.images if start < len(self.prompt))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for branches that share their prompt."""
        return (self.slot, self.prompt.tobytes(), *((start, image.sha256) for start, image in self.prompt_images))


@dataclass(frozen=True)
class _Piece:
    """Branches of one group that stay together."""

    branches: tuple[_Branch, ...]

    @property
    def size(self) -> int:
        return len(self.branches[0].prompt) + sum(len(b.tokens) for b in self.branches)


def pack_data(data: Sequence[Datum], pack_tokens: int, slots: Sequence[int] | None = None, *, together: int = 1) -> list[Pack]:
    """Packs of at most `pack_tokens` tokens that hold every weighted target once. `slots` says under which adapter each datum
    is computed, if that is not one for all: only data of one slot share a prompt.

    A group that does not fit is split and its prompt repeated; a single datum longer than `pack_tokens` gets a pack of
    its own. Data without a weighted target are in no pack. The packs depend on what the data are, not on their order.

    With `together` = n, data 0 to n - 1, n to 2n - 1, ... share their prompt and are each in one pack, however long.
    """
    groups: dict[tuple[object, ...], list[tuple[_Branch, ...]]] = {}
    units = [range(start, min(start + together, len(data))) for start in range(0, len(data), together)]
    slot_of = [0] * len(data) if slots is None else list(slots)
    for unit in sorted(units, key=lambda indices: [(_content(data[i]), slot_of[i]) for i in indices]):
        if branches := tuple(b for index in unit if (b := _branch(data[index], index, slot_of[index])) is not None):
            groups.setdefault(branches[0].key, []).append(branches)
    pieces = [piece for group in groups.values() for piece in _split(group, pack_tokens)]
    bins = _fill(pieces, pack_tokens)
    packs = [_lay_out(bin_) for bin_ in bins]
    return packs if slots is None else [replace(pack, slots_T=_slots(bin_)) for pack, bin_ in zip(packs, bins, strict=True)]


def _slots(pieces: Sequence[_Piece]) -> IntArray:
    return np.concatenate([np.full(piece.size, piece.branches[0].slot, np.int32) for piece in pieces])


def _branch(datum: Datum, index: int, slot: int = 0) -> _Branch | None:
    weighted = np.flatnonzero(datum.weights).astype(np.int32)
    if not weighted.size:
        return None
    tokens, first, last = datum.tokens, int(weighted[0]), int(weighted[-1])
    images = tuple((start, image) for start, image in placed_images(datum.chunks) if start <= last)
    return _Branch(index, tokens[: first + 1], tokens[first + 1 : last + 1], weighted, images, slot)


def same_prompt(one: Datum, other: Datum) -> bool:
    """Whether both have weighted targets, and the same input up to the first of them."""
    branches = _branch(one, 0), _branch(other, 0)
    return branches[0] is not None and branches[1] is not None and branches[0].key == branches[1].key


def _content(datum: Datum) -> tuple[bytes, ...]:
    arrays = (datum.arrays[name].tobytes() for name in sorted(datum.arrays))
    images = (f"{start} {image.sha256}".encode() for start, image in placed_images(datum.chunks))
    return (datum.tokens.tobytes(), datum.targets.tobytes(), *arrays, *images)


def _split(units: Sequence[tuple[_Branch, ...]], pack_tokens: int) -> Iterator[_Piece]:
    prompt = len(units[0][0].prompt)
    taken: list[_Branch] = []
    size = prompt
    for unit in units:
        added = sum(len(branch.tokens) for branch in unit)
        if taken and size + added > pack_tokens:
            yield _Piece(tuple(taken))
            taken, size = [], prompt
        taken += unit
        size += added
    yield _Piece(tuple(taken))


def _fill(pieces: Sequence[_Piece], pack_tokens: int) -> list[list[_Piece]]:
    """Best-fit decreasing bin packing."""
    bins: list[list[_Piece]] = []
    free: list[tuple[int, int]] = []  # (tokens free, bin), ascending
    for piece in sorted(pieces, key=lambda p: -p.size):
        at = bisect_left(free, (piece.size, 0))
        if at < len(free):
            room, chosen = free.pop(at)
        else:
            room, chosen = pack_tokens, len(bins)
            bins.append([])
        bins[chosen].append(piece)
        insort(free, (room - piece.size, chosen))
    return bins


def _lay_out(pieces: Sequence[_Piece]) -> Pack:
    tokens, positions, groups = [], [], []
    rows, data, steps = [], [], []
    images: list[tuple[int, ImageChunk]] = []
    row = 0
    for piece in pieces:
        prompt = piece.branches[0].prompt
        start, length = row, len(prompt)
        images += [(start + position, image) for position, image in piece.branches[0].prompt_images]
        tokens.append(prompt)
        positions.append(np.arange(length))
        row += length
        for branch in piece.branches:
            first = branch.steps[0]
            # The first target is predicted by the prompt's last row, all others by the branch's own rows.
            rows.append(np.where(branch.steps == first, start + length - 1, row + branch.steps - first - 1))
            data.append(np.full(len(branch.steps), branch.datum))
            steps.append(branch.steps)
            tokens.append(branch.tokens)
            positions.append(length + np.arange(len(branch.tokens)))
            images += [(row + position - length, image) for position, image in branch.images if position >= length]
            row += len(branch.tokens)
        groups.append(Group(start, length, tuple(len(b.tokens) for b in piece.branches)))
    joined = [np.concatenate(part).astype(np.int32) for part in (tokens, positions, rows, data, steps)]
    return Pack(joined[0], joined[1], tuple(groups), joined[2], joined[3], joined[4], tuple(images))
