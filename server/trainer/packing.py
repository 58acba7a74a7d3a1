"""How data share forward passes: each prompt is computed once, and groups are packed up to a token budget.

A datum's prompt is its tokens up to and including the one that predicts the first weighted target; the rest, up to the
last weighted target, is its branch. Data with equal prompts form a group, laid out as prompt, branch, branch, ...; a
branch sees the prompt and itself. Tokens that no weighted target depends on are left out. Prompts are equal if their images
are, too; an image is never cut, because no token of it is a weighted target.

What the prompts of several groups of a pack begin with is laid out once, too, before them (`prefixes.py`), as a group
without branches that the others name as their `prefix`.

Axes: T = tokens of a pack, N = weighted targets of a pack.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from opentinker.client.messages import Datum, ImageChunk, IntArray, placed_images
from opentinker.server.trainer.prefixes import Bin, Leaf, Shared, fill

Span = tuple[int, int]
"""(first row, row after the last)."""


@dataclass(frozen=True)
class Group:
    """Where a prompt and its branches lie in a pack: one after the other from row `start` on. Lengths in tokens."""

    start: int
    prompt: int
    branches: tuple[int, ...]
    prefix: tuple[Span, ...] = ()
    """The rows before the prompt that it continues: all rows of the group see them."""

    @property
    def stop(self) -> int:
        return self.start + self.prompt + sum(self.branches)

    @property
    def prefix_length(self) -> int:
        return sum(stop - start for start, stop in self.prefix)

    def tiles(self, rows: int) -> list[Span]:
        """Consecutive parts of at most `rows` rows, if they can be had without cutting the prompt or a branch. The first one
        starts with the prompt; a part sees the prefix, the prompt and itself only."""
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

    @property
    def sequence_tokens(self) -> int:
        """Rows that the data would take if they shared none."""
        lengths = {datum: step + 1 for datum, step in zip(self.data_N.tolist(), self.steps_N.tolist(), strict=True)}
        return sum(lengths.values())

    @cached_property
    def ends_T(self) -> IntArray:
        """How far down each row is seen: row r sees the keys k with k <= r < ends_T[k]."""
        ends_T = np.empty(len(self), np.int32)
        for group in self.groups:
            ends_T[group.start : group.start + group.prompt] = group.stop
            start = group.start + group.prompt
            for branch in group.branches:
                ends_T[start : start + branch] = start + branch
                start += branch
            for first, last in group.prefix:  # groups are in the order of their rows, so the last one decides
                ends_T[first:last] = group.stop
        return ends_T

    def sees(self, rows: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these rows (first axis) see which of these keys (second axis)."""
        seen: npt.NDArray[np.bool_] = (keys[None, :] <= rows[:, None]) & (rows[:, None] < self.ends_T[keys][None, :])
        return seen


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
    def images(self) -> tuple[tuple[int, ImageChunk], ...]:
        """Of the prompt."""
        return self.branches[0].prompt_images

    @property
    def added(self) -> int:
        """Tokens besides the prompt."""
        return sum(len(b.tokens) for b in self.branches)

    def symbols(self, numbers: Mapping[str, int]) -> IntArray:
        """The prompt, with an image's tokens replaced by the image's own number, below 0."""
        symbols = self.branches[0].prompt.copy()
        for start, stop, number in ((*span, numbers[i.sha256]) for span, (_, i) in zip(self.spans(), self.images, strict=True)):
            symbols[start:stop] = number - len(numbers)
        return symbols

    def spans(self) -> tuple[Span, ...]:
        """Of the prompt's images."""
        return tuple((start, start + len(image.tokens)) for start, image in self.images)


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
    numbers = {sha256: number for number, sha256 in enumerate(sorted({i.sha256 for p in pieces for _, i in p.images}))}
    leaves = [Leaf(p, p.branches[0].slot, p.symbols(numbers), p.added, p.spans()) for p in pieces]
    return [_lay_out(bin_, slotted=slots is not None) for bin_ in fill(leaves, pack_tokens)]


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


class _Layout:
    """A pack in the making."""

    def __init__(self) -> None:
        self.tokens: list[IntArray] = []
        self.positions: list[npt.NDArray[np.int64]] = []
        self.slots: list[npt.NDArray[np.int32]] = []
        self.rows: list[npt.NDArray[np.int64]] = []
        self.data: list[npt.NDArray[np.int64]] = []
        self.steps: list[IntArray] = []
        self.images: list[tuple[int, ImageChunk]] = []
        self.groups: list[Group] = []
        self.row = 0

    def add(self, tokens: IntArray, position: int, branch: _Branch) -> None:
        """Rows for tokens of the branch's datum, from a position on."""
        shift, stop = self.row - position, position + len(tokens)
        self.images += [(start + shift, image) for start, image in branch.images if position <= start < stop]
        self.tokens.append(tokens)
        self.positions.append(np.arange(position, stop))
        self.slots.append(np.full(len(tokens), branch.slot, np.int32))
        self.row += len(tokens)

    def share(self, shared: Shared[_Piece], prefix: tuple[Span, ...]) -> None:
        """A prefix, and what continues it."""
        one = shared.any_leaf().item.branches[0]
        start = self.row
        self.add(one.prompt[shared.start : shared.stop], shared.start, one)
        self.groups.append(Group(start, self.row - start, (), prefix))
        self.fill(shared.members, (*prefix, (start, self.row)))

    def fill(self, members: Bin[_Piece], prefix: tuple[Span, ...] = ()) -> None:
        for member in members:
            if isinstance(member, Shared):
                self.share(member, prefix)
            else:
                self.group(member.item, prefix)

    def group(self, piece: _Piece, prefix: tuple[Span, ...]) -> None:
        begun = sum(stop - start for start, stop in prefix)
        prompt, start = piece.branches[0].prompt, self.row
        self.add(prompt[begun:], begun, piece.branches[0])
        last = self.row - 1
        for branch in piece.branches:
            first = branch.steps[0]
            # The first target is predicted by the prompt's last row, all others by the branch's own rows.
            self.rows.append(np.where(branch.steps == first, last, self.row + branch.steps - first - 1))
            self.data.append(np.full(len(branch.steps), branch.datum))
            self.steps.append(branch.steps)
            self.add(branch.tokens, len(prompt), branch)
        self.groups.append(Group(start, len(prompt) - begun, tuple(len(b.tokens) for b in piece.branches), prefix))


def _lay_out(members: Bin[_Piece], *, slotted: bool) -> Pack:
    layout = _Layout()
    layout.fill(members)
    parts = (layout.tokens, layout.positions, layout.rows, layout.data, layout.steps)
    tokens_T, positions_T, rows_N, data_N, steps_N = (np.concatenate(part).astype(np.int32) for part in parts)
    slots_T = np.concatenate(layout.slots) if slotted else None
    return Pack(tokens_T, positions_T, tuple(layout.groups), rows_N, data_N, steps_N, tuple(layout.images), slots_T)
