"""The state of an optimizer in the host's memory, stepped on the device a bucket after the other.

While a bucket is stepped, the next is on its way to the device and the one before on its way back.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from opentinker.server.buckets import aligned, typed
from opentinker.server.trainer.host_memory import HostMemory, host_memory
from opentinker.server.trainer.lanes import Lanes, lanes_of
from opentinker.server.trainer.state_plan import Piece, state_plan

SLOTS = 2
"""Buckets that have room on the device."""


@dataclass(frozen=True)
class Column:
    """A tensor that is kept of a parameter; an entry of its first axis is of `per` numbers."""

    tensor: torch.Tensor
    per: int = 1
    whole: bool = False
    """It goes with all of the parameter, which is not cut."""
    comes_back: bool = True

    def of(self, piece: Piece) -> torch.Tensor:
        if self.whole:
            return self.tensor
        return self.tensor[piece.start // self.per : -(-piece.stop // self.per)]


Views = Sequence[torch.Tensor]
"""What a piece has of each column of its parameter."""
Move = Callable[[Sequence[Piece], Sequence[Views]], None]
"""Step these pieces, whose state is on the device, in place."""


@dataclass(frozen=True)
class Host:
    """Where state is kept that is stepped on another device, and how it gets there."""

    memory: HostMemory
    lanes: Lanes

    @staticmethod
    def of(device: torch.device) -> "Host":
        return Host(host_memory(device), lanes_of(device))


class StateStream:
    """All methods are called by one thread."""

    def __init__(
        self, lanes: Lanes, columns: Mapping[str, Sequence[Column]], sizes: Mapping[str, int], uncut: Container[str] = ()
    ) -> None:
        """`columns`: of each parameter, its master's first. `sizes`: its numbers. `uncut`: see `state_plan`; all ranks step
        these together."""
        self._lanes, self._columns = lanes, columns
        self._buckets = state_plan(sizes, uncut)
        alone = [piece for bucket in self._buckets for piece in bucket if piece.name not in uncut]
        self._largest = max(alone, key=len, default=None)
        self._slots: list[torch.Tensor] = []

    @contextmanager
    def room(self, rehearse: Move) -> Iterator[None]:
        """Hold the memory on the device that `run` takes, inside. `rehearse` steps zeros in place of the largest piece: what
        that takes by the way is then the allocator's, too, before the first parameter is touched.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        nbytes = max((self._nbytes(bucket) for bucket in self._buckets), default=0)
        try:
            for _ in self._buckets[:SLOTS]:
                self._slots.append(torch.zeros(nbytes, dtype=torch.uint8, device=self._lanes.device))
            if self._largest is not None:
                rehearse([self._largest], self._views([self._largest], self._slots[0]))
            yield
        except BaseException:
            with suppress(Exception):  # a device that is broken says so again
                self._lanes.finish()
            raise
        else:
            self._lanes.finish()
        finally:  # not before: until then the memory is nobody else's
            self._slots.clear()

    def run(self, move: Move, *, masters: bool) -> None:
        """Step all pieces, inside `room`; when it returns, the host's memory has the outcome, of masters only where told so.

        Raises:
            Exception: a copy or a computation failed; some pieces are stepped and others not, or in part.
        """
        lanes, arrived, returned = self._lanes, list[Any](), list[Any]()
        lanes.fetching.wait(lanes.computing.mark())

        def fetch(number: int) -> None:
            if number >= SLOTS:
                lanes.fetching.wait(returned[number - SLOTS])
            lanes.fetching.run(lambda: self._copy(number, in_=True, masters=True))
            arrived.append(lanes.fetching.mark())

        def step(number: int) -> None:
            bucket = self._buckets[number]
            lanes.computing.wait(arrived[number])
            lanes.computing.run(lambda: move(bucket, self._views(bucket, self._slots[number % SLOTS])))
            lanes.returning.wait(lanes.computing.mark())
            lanes.returning.run(lambda: self._copy(number, in_=False, masters=masters))
            returned.append(lanes.returning.mark())

        for number in range(len(self._buckets)):
            for ahead in range(len(arrived), min(number + SLOTS, len(self._buckets))):
                fetch(ahead)
            step(number)
        lanes.finish()

    def _copy(self, number: int, *, in_: bool, masters: bool) -> None:
        bucket = self._buckets[number]
        for piece, views in zip(bucket, self._views(bucket, self._slots[number % SLOTS]), strict=True):
            for place, (column, view) in enumerate(zip(self._columns[piece.name], views, strict=True)):
                if in_:
                    view.copy_(column.of(piece), non_blocking=True)
                elif column.comes_back and (masters or place > 0):
                    column.of(piece).copy_(view, non_blocking=True)

    def _views(self, bucket: Sequence[Piece], slot: torch.Tensor) -> list[list[torch.Tensor]]:
        views, offset = list[list[torch.Tensor]](), 0
        for piece in bucket:
            views.append([])
            for column in self._columns[piece.name]:
                like = column.of(piece)
                views[-1].append(typed(slot[offset : offset + like.nbytes], like.dtype, like.shape).to(slot.device))
                offset = aligned(offset + like.nbytes)
        return views

    def _nbytes(self, bucket: Sequence[Piece]) -> int:
        return sum(aligned(column.of(piece).nbytes) for piece in bucket for column in self._columns[piece.name])
