"""EASY backfill: the first job that does not fit has a reservation; whoever overtakes it must not delay it.

After Lifka, "The ANL/IBM SP scheduling system" (JSSPP 1995), made aware of nodes: the reservation is a time and the nodes
that the job will get then.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from opentinker.scheduler.capacity import Capacity
from opentinker.scheduler.placement import Allocation, Demand, Request

_TOLERANCE_S = 1e-6


@dataclass(frozen=True)
class Holder:
    """A job that holds resources, and when it gives them back at the latest; infinity without a time limit."""

    job_id: str
    where: tuple[Allocation, ...]
    ends_at: float = math.inf
    since: float = 0.0


@dataclass(eq=False)
class Reservation:
    """`at`: when the job can start at the latest; None when that is unknown. `after`: the holder that it waits for last.

    `rest` is what will be free at that time on `nodes` beside the job itself.
    """

    job_id: str
    at: float | None
    after: str
    nodes: frozenset[int]
    rest: Capacity = field(repr=False)

    def outlived_by(self, ends_at: float) -> bool:
        """Whether a job that ends then may still hold something when the reserved one is to start."""
        return self.at is None or ends_at > self.at + _TOLERANCE_S

    def leaves_room(self, number: int, request: Request) -> bool:
        """Whether the request may hold the node beyond `at` without delaying the reserved job."""
        if number not in self.nodes:
            return True
        # Which GPU a fraction will be on is not known ahead, and a gang may need the node twice: they stay away.
        return self.at is not None and len(request) == 1 and not request[0].shares_gpu and self.rest.fits(number, request[0])


def reserve(capacity: Capacity, holders: Iterable[Holder], job_id: str, request: Request, now: float) -> Reservation | None:
    """The earliest time and the nodes at which the request fits if every holder stays as long as it may.

    Holders without a limit are thought to leave last, the oldest first: then the time is unknown, but the nodes are not.

    Returns:
        None when it does not fit even after all have gone.
    """
    rest = capacity.copy()
    # No bundle is smaller than this one, in GPUs or in slots.
    smallest = Demand(min(d.gpus for d in request), min(d.cpu_slots for d in request))
    blocks = sum(rest.blocks(number, smallest) for number in range(len(rest.nodes)))
    for holder in sorted(holders, key=lambda h: (h.ends_at, h.since, h.job_id)):
        for allocation in holder.where:
            number = rest.number(allocation.node_id)
            if number is None:
                continue
            before = rest.blocks(number, smallest)
            rest.release(number, allocation.demand, allocation.gpus)
            blocks += rest.blocks(number, smallest) - before
        # So many blocks are needed at least; to look only then keeps this linear.
        if blocks >= len(request) and (placed := rest.place(request)) is not None:
            at = None if math.isinf(holder.ends_at) else max(now, holder.ends_at)
            return Reservation(job_id, at, holder.job_id, frozenset(placed), rest)
    return None
