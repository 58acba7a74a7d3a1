"""Which prompts of a pack share what they begin with, and how shared prompts are put into packs. Pure.

Prompts form a tree: a prefix, then longer prefixes or prompts that continue it. Sizes and positions are in tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from opentinker.client.messages import IntArray

MIN_PREFIX = 16
"""Tokens that a prefix has at least: attention over one more part, and its keys beside those of each prompt, cost about as
much as computing a few tokens again."""
MAX_DEPTH = 8
"""Prefixes that continue one another at most."""

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Leaf(Generic[Item]):
    """Something with a prompt. It shares with others of its slot only."""

    item: Item
    slot: int
    prompt: IntArray
    added: int
    """Its tokens besides the prompt."""
    whole: tuple[tuple[int, int], ...] = ()
    """Parts of the prompt, (start, stop), inside which no prefix ends."""


@dataclass(frozen=True, eq=False)
class Shared(Generic[Item]):
    """What the prompts of all members have at the positions from `start` to `stop`; before that they are alike, too."""

    start: int
    stop: int
    members: "Bin[Item]"

    def any_leaf(self) -> Leaf[Item]:
        first = self.members[0]
        return first.any_leaf() if isinstance(first, Shared) else first


Bin = tuple[Leaf[Item] | Shared[Item], ...]
"""What is in one pack, or in one prefix of it."""


def fill(leaves: Sequence[Leaf[Item]], room: int) -> list[Bin[Item]]:
    """Bins of at most `room` tokens that hold every leaf once; a leaf that is larger has a bin of its own.

    Leaves of a bin share each prefix of `MIN_PREFIX` tokens or more; each keeps at least the last token of its prompt.
    """
    ordered = sorted(leaves, key=lambda leaf: (leaf.slot, leaf.prompt.astype(">i4").tobytes()))
    common = [_common(one, other) for one, other in pairwise(ordered)]
    return _fill(_families(ordered, common, 0, MAX_DEPTH), 0, room)


def _common(one: Leaf[Item], other: Leaf[Item]) -> int:
    """How many tokens two prompts may share."""
    if one.slot != other.slot:
        return 0
    most = min(len(one.prompt), len(other.prompt)) - 1
    differing = np.flatnonzero(one.prompt[:most] != other.prompt[:most])
    common = int(differing[0]) if differing.size else most
    return min([common, *(start for start, stop in (*one.whole, *other.whole) if start < common < stop)])


def _families(
    leaves: Sequence[Leaf[Item]], common: Sequence[int], position: int, depth: int
) -> list[Leaf[Item] | Shared[Item]]:
    """A forest over leaves, in their order, whose prompts are alike up to `position`; `common` is of each with the next one."""
    members: list[Leaf[Item] | Shared[Item]] = []
    first = 0
    for last in range(len(leaves)):
        if last < len(common) and common[last] >= position + MIN_PREFIX and depth:
            continue
        run, inside = leaves[first : last + 1], common[first:last]
        if len(run) == 1:
            members += run
        else:
            stop = min(inside)
            members.append(Shared(position, stop, tuple(_families(run, inside, stop, depth - 1))))
        first = last + 1
    return members


def _size(member: Leaf[Item] | Shared[Item], position: int) -> int:
    """Tokens of a member of which those before `position` are shared."""
    if isinstance(member, Leaf):
        return len(member.prompt) - position + member.added
    return member.stop - position + sum(_size(each, member.stop) for each in member.members)


def _fill(members: Sequence[Leaf[Item] | Shared[Item]], position: int, room: int) -> list[Bin[Item]]:
    """Best-fit decreasing bin packing. A prefix whose members do not fit into one bin is repeated."""
    whole: list[Leaf[Item] | Shared[Item]] = []
    for member in members:
        if isinstance(member, Leaf):
            whole.append(member)
            continue
        parts = _fill(member.members, member.stop, room - (member.stop - position))
        whole += [Shared(position, member.stop, part) if len(part) > 1 else _longer(part[0], position) for part in parts]
    bins: list[list[Leaf[Item] | Shared[Item]]] = []
    free: list[tuple[int, int]] = []  # (tokens free, bin), ascending
    for size, member in sorted(((_size(m, position), m) for m in whole), key=lambda sized: -sized[0]):
        at = bisect_left(free, (size, 0))
        if at < len(free):
            left, chosen = free.pop(at)
        else:
            left, chosen = room, len(bins)
            bins.append([])
        bins[chosen].append(member)
        insort(free, (left - size, chosen))
    return [tuple(bin_) for bin_ in bins]


def _longer(member: Leaf[Item] | Shared[Item], position: int) -> Leaf[Item] | Shared[Item]:
    """A member that is alone with its prefix, from an earlier position on."""
    return member if isinstance(member, Leaf) else Shared(position, member.stop, member.members)
