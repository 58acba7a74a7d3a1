"""Which numbers of an optimizer's state are on the device together while it is stepped out of the host's memory. Pure."""

from collections.abc import Container, Mapping
from dataclasses import dataclass

GRAIN = 2**16
"""Buckets are multiples of it: a chunk of torch's fused AdamW, so that it computes a part of a parameter as it does the whole,
bit for bit; and whole blocks of 8-bit moments."""
BUCKET = 64 * GRAIN
"""Numbers of a bucket: 16 MiB of each float32 tensor, with which a bus is as fast as it gets."""
DEVICE_BYTES = 64
"""Of each number in a bucket, on the device: masters and moments of two buckets, and what it takes to step one with 8-bit
moments."""


@dataclass(frozen=True)
class Piece:
    """The numbers [start, stop) of a parameter, or of a rank's rows of it, flat."""

    name: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def state_plan(sizes: Mapping[str, int], uncut: Container[str] = (), limit: int = BUCKET) -> list[list[Piece]]:
    """Buckets of at most `limit` numbers, in which each number of these parameters is once, in order.

    A parameter in `uncut` is one piece, also if it has more numbers, or none.
    """
    buckets: list[list[Piece]] = []
    room = 0
    for name, size in sizes.items():
        starts = [0] if name in uncut else range(0, size, limit)
        for start in starts:
            piece = Piece(name, start, size if name in uncut else min(start + limit, size))
            if len(piece) > room or not buckets:
                buckets.append([])
                room = limit
            buckets[-1].append(piece)
            room -= len(piece)
    return buckets


def device_bytes(numbers: float) -> float:
    """The most that steps on so many parameters take on the device where their state is not, beside their gradients."""
    return DEVICE_BYTES * min(numbers, BUCKET)
