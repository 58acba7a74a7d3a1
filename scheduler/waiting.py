"""Why a job waits, in words that a person can act on."""

from opentinker.scheduler.backfill import Reservation
from opentinker.scheduler.capacity import Capacity
from opentinker.scheduler.placement import Demand, Request, count
from opentinker.scheduler.settings import Quota


def needs(request: Request) -> str:
    """What is asked for: "needs 4 GPUs on one node"."""
    if len(request) == 1:
        demand = request[0]
        if demand.shares_gpu:
            return f"needs {demand.gpus:g} of a GPU"
        return f"needs {demand}" + (" on one node" if demand.gpus > 1 or demand.cpu_slots > 1 else "")
    sizes = {demand: request.count(demand) for demand in sorted(set(request), reverse=True)}
    return "needs " + " and ".join(f"{number} x {demand}" for demand, number in sizes.items()) + ", each on one node"


def shortage(request: Request, capacity: Capacity) -> str:
    """What is asked for against what is free."""
    if len(request) > 1:
        largest = max(request)
        free = sum(capacity.blocks(number, largest) for number in range(len(capacity.nodes)))
        return f"{needs(request)}; {free or 'no'} block{'' if free == 1 else 's'} of {largest} free"
    return f"{needs(request)}; {_largest(request[0], capacity)}"


def _largest(demand: Demand, capacity: Capacity) -> str:
    free = capacity.largest_free(demand)
    if not free:
        return "no GPU is free" if demand.gpus else "no CPU slot is free"
    return f"largest free block is {free:g}"


def estimate(reservation: Reservation | None, now: float) -> str:
    """When the job's turn is expected: "estimated after job-17 (in 12 min)"."""
    if reservation is None:
        return "not possible before nodes come back"
    if reservation.at is None:
        return f"after {reservation.after}, which has no time limit"
    return f"estimated after {reservation.after} (in {duration(reservation.at - now)})"


def impossible(request: Request, *, addable: bool) -> str:
    """For a job that the present nodes could not even hold when empty. `addable`: nodes could be added that can."""
    if addable:
        return f"{needs(request)}; waits for a node to be added"
    return f"{needs(request)}; the nodes that are up now are too small for that, also when nothing runs"


def in_line(ahead: int, head: str) -> str:
    """Its place behind the head of the queue."""
    return f"{ahead} job{'' if ahead == 1 else 's'} ahead in the queue (next: {head})"


def over_quota(request: Request, quota: Quota, gpus: float, jobs: int) -> str:
    """Why the owner's quota keeps the job waiting; empty when it does not. `gpus` and `jobs`: what the owner holds."""
    if quota.jobs is not None and jobs >= quota.jobs:
        return f"its owner's quota: {jobs} of {count(quota.jobs, 'job')} running"
    asked = sum(demand.gpus for demand in request)
    if quota.gpus is not None and asked and gpus + asked > quota.gpus + 1e-6:
        return f"its owner's quota: needs {count(asked, 'GPU')}, and {gpus:g} of {count(quota.gpus, 'GPU')} are in use"
    return ""


def duration(seconds: float) -> str:
    """A time span as people say it: "40 s", "12 min", "2 h 5 min", "3 d 4 h"."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    days, minutes_left = divmod(minutes, 24 * 60)
    hours, rest = divmod(minutes_left, 60)
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    return f"{hours} h {rest} min" if rest else f"{hours} h"
