"""What is free, indexed so that the best node for a bundle is found at once. Mutable; one is built for each decision pass.

The model of GPUs is Ray's: a whole-number demand takes GPUs that are wholly free, lowest index first; a fraction goes to the
GPU that it leaves fullest. Ray makes these choices when it grants; the indexes are read back from the server's process. As
long as a fraction's GPU is unknown, it counts twice: as a whole GPU, and against the room on every shared GPU of its node.
So whatever Ray chose, what counts as free here is free.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Self

from opentinker.scheduler.placement import Allocation, Demand, Node, Request

_TOLERANCE = 1e-6
"""Fractions are multiples of 0.0001; sums of them carry rounding errors far below."""
Allowed = Callable[[int], bool]
MOST_TRIES = 2000
"""How many places of bundles are tried for one job at most, in one pass over the queue."""


class Capacity:
    """Nodes are numbered by the order of their ids, so that their order in the snapshot does not matter."""

    def __init__(self, nodes: Iterable[Node], held: Iterable[Allocation] = ()) -> None:
        self.nodes: Sequence[Node] = sorted(nodes, key=lambda node: node.id)
        self._number = {node.id: number for number, node in enumerate(self.nodes)}
        # Counts may fall below 0 (a node shrank, a fraction counts twice): then they mean 0, but add up when released.
        self._whole = [node.gpus for node in self.nodes]
        self._slots = [node.cpu_slots for node in self.nodes]
        self._rooms: dict[int, dict[int, float]] = {}
        """By node that has GPUs with known fractions on them: what is left on each."""
        self._unknown = [0.0 for _ in self.nodes]
        """Sum of the fractions whose GPU is not known."""
        self._indexes: list[list[int] | None] = [list(range(node.gpus)) if node.gpu_groups else None for node in self.nodes]
        """Wholly free GPUs, where the topology and the GPUs of all holders are known."""
        self._topology = any(node.gpu_groups for node in self.nodes)
        self._largest = max((node.gpus for node in self.nodes), default=0)
        self._most_slots = max((node.cpu_slots for node in self.nodes), default=0)
        for allocation in held:
            number = self._number.get(allocation.node_id)
            if number is not None:
                self._shift(number, allocation.demand, allocation.gpus, -1)
                if allocation.demand.gpus and not allocation.gpus:
                    self._indexes[number] = None
        self._index()

    def copy(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._whole, other._slots, other._unknown = self._whole[:], self._slots[:], self._unknown[:]
        other._rooms = {number: dict(rooms) for number, rooms in self._rooms.items()}
        other._indexes = [None if indexes is None else indexes[:] for indexes in self._indexes]
        other._by_whole = [bucket[:] for bucket in self._by_whole]
        other._by_slots = [bucket[:] for bucket in self._by_slots]
        return other

    def number(self, node_id: str) -> int | None:
        """A node's number; None when it is gone."""
        return self._number.get(node_id)

    def fits(self, number: int, demand: Demand) -> bool:
        """Whether the node has room for one more such bundle."""
        gpus, slots = demand
        if slots and self._slots[number] < slots:
            return False
        return not gpus or self._whole[number] >= gpus or (demand.shares_gpu and self._room(number, gpus) is not None)

    def blocks(self, number: int, demand: Demand) -> int:
        """How many such bundles fit on the node at once; exact for whole numbers, at least that many for fractions."""
        gpus, slots = demand
        by_slots = max(0, self._slots[number]) // slots if slots else 1 << 30
        if demand.shares_gpu:
            shared = sum(int((room + _TOLERANCE) / gpus) for room in self._rooms.get(number, {}).values())
            return min(by_slots, shared + max(0, self._whole[number]) * int((1 + _TOLERANCE) / gpus))
        return min(by_slots, int(max(0, self._whole[number]) // gpus)) if gpus else by_slots

    def take(self, number: int, demand: Demand, gpus: tuple[int, ...] = ()) -> None:
        """Hold a bundle. What does not fit is held all the same."""
        self._move(number, demand, gpus, -1)

    def release(self, number: int, demand: Demand, gpus: tuple[int, ...] = ()) -> None:
        """Undo `take`."""
        self._move(number, demand, gpus, +1)

    def place(self, request: Request, allowed: Allowed | None = None) -> list[int] | None:
        """Take room for all bundles, and return their nodes' numbers; None, and nothing taken, when one does not fit.

        Large bundles first, each on the node that it leaves fullest, at best where an earlier one of the job is. Three or more
        can fit although that finds no room: then other ways are tried, a bounded number of them.
        """
        chosen = self._place_in_turn(request, allowed)
        if chosen is None and len(request) > 2 and (found := self.copy()._search(request, allowed)) is not None:
            for number, demand in zip(found, request, strict=True):
                self.take(number, demand)
            return found
        return chosen

    def _search(self, request: Request, allowed: Allowed | None) -> list[int] | None:
        """Any way to place all bundles; of nodes that are alike, one is tried. Leaves them taken."""
        order = sorted(range(len(request)), key=lambda p: request[p], reverse=True)
        chosen, tries = [0] * len(request), MOST_TRIES

        def fit(depth: int) -> bool:
            nonlocal tries
            if depth == len(order):
                return True
            demand = request[order[depth]]
            seen = set()
            for number in [n for n in self._candidates(demand) if allowed is None or allowed(n)]:
                rooms = tuple(sorted(self._rooms.get(number, {}).values()))
                like = (self._whole[number], self._slots[number], self._unknown[number], rooms)
                if like in seen or not tries:
                    continue
                seen.add(like)
                tries -= 1
                self.take(number, demand)
                if fit(depth + 1):
                    chosen[order[depth]] = number
                    return True
                self.release(number, demand)
            return False

        return chosen if fit(0) else None

    def _place_in_turn(self, request: Request, allowed: Allowed | None) -> list[int] | None:
        placed: list[tuple[int, Demand]] = []
        chosen = [0] * len(request)
        for position in sorted(range(len(request)), key=lambda p: request[p], reverse=True):
            demand = request[position]
            number = self._choose(demand, allowed, placed[-1][0] if placed else None)
            if number is None:
                for earlier, held in placed:
                    self.release(earlier, held)
                return None
            self.take(number, demand)
            placed.append((number, demand))
            chosen[position] = number
        return chosen

    def largest_free(self, demand: Demand) -> float:
        """The largest block of what the demand asks for (GPUs, else CPU slots) that is free on one node."""
        if demand.shares_gpu:
            room = max((self._most_room(number) for number in range(len(self.nodes))), default=0.0)
            return 1 if any(whole > 0 for whole in self._whole) else round(room, 4)
        return max(0, max(self._whole if demand.gpus else self._slots, default=0))

    def _choose(self, demand: Demand, allowed: Allowed | None, near: int | None) -> int | None:
        if near is not None and self.fits(near, demand) and (allowed is None or allowed(near)):
            return near
        return next((n for n in self._candidates(demand) if allowed is None or allowed(n)), None)

    def _candidates(self, demand: Demand) -> Iterator[int]:
        """Nodes on which the demand fits, best first."""
        gpus, slots = demand
        if demand.shares_gpu:
            shared = [(room, n) for n in self._rooms if (room := self._room(n, gpus)) is not None]
            yield from (number for _, number in sorted(shared) if not slots or self._slots[number] >= slots)
        if gpus:
            buckets = self._by_whole[max(1, int(gpus)) :]
            fitting = (n for bucket in buckets for n in bucket if not slots or self._slots[n] >= slots)
            yield from self._neighbours_first(fitting, int(gpus)) if self._topology and gpus > 1 else fitting
        else:
            yield from (number for bucket in self._by_slots[slots:] for number in bucket)

    def _neighbours_first(self, fitting: Iterable[int], gpus: int) -> Iterator[int]:
        """Neighbours come before packing: a job that straddles groups is slow for as long as it runs."""
        straddling: list[tuple[int, int, int]] = []
        for number in fitting:
            if spread := self._straddles(number, gpus):
                straddling.append((spread, len(straddling), number))
            else:
                yield number
        yield from (number for _, _, number in sorted(straddling))

    def _straddles(self, number: int, gpus: int) -> int:
        """In how many more groups than they have to the GPUs would lie which Ray would choose; 0 where that is unknown."""
        indexes = self._indexes[number]
        if indexes is None:
            return 0
        chosen = set(indexes[:gpus])
        groups = self.nodes[number].gpu_groups
        sizes = accumulate(sorted(map(len, groups), reverse=True))
        fewest = sum(total < gpus for total in sizes) + 1
        return max(0, sum(not chosen.isdisjoint(group) for group in groups) - fewest)

    def _room(self, number: int, gpus: float) -> float | None:
        """What is left of the fullest shared GPU that surely has room for the fraction."""
        sure = gpus + self._unknown[number] - _TOLERANCE
        return min((room for room in self._rooms.get(number, {}).values() if room >= sure), default=None)

    def _most_room(self, number: int) -> float:
        return max((room - self._unknown[number] for room in self._rooms.get(number, {}).values()), default=0.0)

    def _move(self, number: int, demand: Demand, gpus: tuple[int, ...], sign: int) -> None:
        whole, slots = max(0, self._whole[number]), max(0, self._slots[number])
        self._shift(number, demand, gpus, sign)
        _rebucket(self._by_whole, whole, max(0, self._whole[number]), number)
        _rebucket(self._by_slots, slots, max(0, self._slots[number]), number)

    def _shift(self, number: int, demand: Demand, gpus: tuple[int, ...], sign: int) -> None:
        self._slots[number] += sign * demand.cpu_slots
        if not demand.shares_gpu:
            self._whole[number] += sign * int(demand.gpus)
        elif gpus:
            rooms, index = self._rooms.setdefault(number, {}), gpus[0]
            room = rooms.get(index, 1.0) + sign * demand.gpus
            if index not in rooms:
                self._whole[number] -= 1
            rooms[index] = room
            if room >= 1.0 - _TOLERANCE:
                del rooms[index]
                self._whole[number] += 1
        else:
            self._unknown[number] -= sign * demand.gpus
            self._whole[number] += sign
        self._track(number, demand, gpus, sign)

    def _track(self, number: int, demand: Demand, gpus: tuple[int, ...], sign: int) -> None:
        indexes = self._indexes[number]
        if indexes is None or not demand.gpus:
            return
        if gpus and sign < 0:
            self._indexes[number] = [index for index in indexes if index not in gpus]
        elif sign < 0 and not demand.shares_gpu:
            self._indexes[number] = indexes[int(demand.gpus) :]
        else:
            self._indexes[number] = None  # from here on only the count is known

    def _index(self) -> None:
        self._by_whole: list[list[int]] = [[] for _ in range(self._largest + 1)]
        self._by_slots: list[list[int]] = [[] for _ in range(self._most_slots + 1)]
        for number in range(len(self.nodes)):
            self._by_whole[max(0, self._whole[number])].append(number)
            self._by_slots[max(0, self._slots[number])].append(number)


def _rebucket(buckets: list[list[int]], old: int, new: int, number: int) -> None:
    if old != new:
        del buckets[old][bisect_left(buckets[old], number)]
        insort(buckets[new], number)
