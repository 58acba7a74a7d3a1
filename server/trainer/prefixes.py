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

MIN_PREFIX = 8
"""Tokens that a prefix has at least: its keys are put beside those of each prompt, which costs as much as a token or two."""
MIN_SAVED = 32
"""Tokens that sharing a prefix saves at least: attention over one more part costs about as much as computing 16 to 32 tokens
again (SmolLM2-135M on a CPU: 16 tokens of two groups gained nothing, 32 of two or 8 of eight groups 5 to 8%)."""
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

    Leaves of a bin share the prefixes that are `worth` it; each keeps at least the last token of its prompt.
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


def worth(length: int, prompts: int) -> bool:
    """Whether so many prompts share a prefix of that length."""
    return length >= MIN_PREFIX and length * (prompts - 1) >= MIN_SAVED


def _families(
    leaves: Sequence[Leaf[Item]], common: Sequence[int], position: int, depth: int
) -> list[Leaf[Item] | Shared[Item]]:
    """A forest over leaves, in their order, whose prompts are alike up to `position`; `common` is of each with the next one."""
    members: list[Leaf[Item] | Shared[Item]] = []
    runs = [(0, len(leaves))] if leaves else []  # the next one last
    while runs:
        first, last = runs.pop()
        inside = common[first : last - 1]
        if not inside or not depth:
            members += leaves[first:last]
            continue
        stop = min(inside)
        if worth(stop - position, last - first):
            members.append(Shared(position, stop, tuple(_families(leaves[first:last], inside, stop, depth - 1))))
            continue
        # Not all of them, but perhaps some that have more in common.
        bounds = [first, *(first + 1 + at for at, length in enumerate(inside) if length == stop), last]
        runs += reversed(list(pairwise(bounds)))
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
