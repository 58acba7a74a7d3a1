"""Whose turn it is: decayed usage against shares, as Slurm's classic multifactor priority, and the order that follows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from opentinker.scheduler.placement import Demand

CPU_SLOT_COST = 0.1
"""What a CPU slot costs, in GPUs. It only matters on clusters that have both."""


def cost_of(demands: Iterable[Demand]) -> float:
    """What holding these costs, per second."""
    return sum(demand.gpus + CPU_SLOT_COST * demand.cpu_slots for demand in demands)


def decayed_usage(cost: float, begin: float, end: float, now: float, half_life_s: float) -> float:
    """Usage by `now` of what was held from `begin` to `end`: each second of it halves in weight every `half_life_s`.

    The integral of cost * 2^(-(now - t) / half_life_s) over t from begin to end. A clock that went back counts as no time.
    """
    rate = math.log(2.0) / half_life_s
    end = min(end, now)
    begin = min(begin, end)
    return cost / rate * (math.exp(-rate * (now - end)) - math.exp(-rate * (now - begin)))


class UsageLedger:
    """Decayed usage by owner of what is no longer held. Sums decay as a whole, so no history is kept."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sums: dict[str, float] = {}
        self._at: float = -math.inf

    def charge(self, owner: str, cost: float, begin: float, end: float) -> None:
        """Add what `owner` held from `begin` to `end`."""
        self._advance(end)
        usage = decayed_usage(cost, begin, end, self._at, self._half_life_s)
        self._sums[owner] = self._sums.get(owner, 0.0) + usage

    def usage(self, now: float) -> dict[str, float]:
        """By owner, decayed to `now`."""
        self._advance(now)
        return dict(self._sums)

    def _advance(self, now: float) -> None:
        if now <= self._at:
            return
        factor = 0.5 ** ((now - self._at) / self._half_life_s) if self._sums else 0.0
        self._sums = {owner: usage * factor for owner, usage in self._sums.items() if usage * factor > 1e-9}
        self._at = now


def fair_share_factors(owners: Iterable[str], usage: Mapping[str, float], shares: Mapping[str, float]) -> dict[str, float]:
    """2^(-U/S) of each owner: U is their part of all decayed usage, S their part of all shares (1.0 for who is not listed).

    1 for who used nothing, 1/2 for who used exactly their share, towards 0 for who used more. The formula is Slurm's
    classic fair share, https://slurm.schedmd.com/classic_fair_share.html, with one level of accounts. Everybody who has jobs
    or usage counts into the sums.
    """
    everybody = sorted({*owners, *usage})
    total_usage = sum(usage.values())
    total_share = sum(shares.get(owner, 1.0) for owner in everybody)
    factors = {}
    for owner in everybody:
        share, used = shares.get(owner, 1.0), usage.get(owner, 0.0)
        if not used or not total_usage:
            factors[owner] = 1.0
        elif share <= 0.0:
            factors[owner] = 0.0
        else:
            factors[owner] = 2.0 ** -((used / total_usage) / (share / total_share))
    return factors


class Queued(Protocol):
    """What the order looks at."""

    @property
    def owner(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def submitted_at(self) -> float: ...


Q = TypeVar("Q", bound=Queued)


def in_order(queue: Sequence[Q], factors: Mapping[str, float], patience_s: float) -> list[Q]:
    """The queue, first to start first: by priority; within one by fair-share factor + waiting time / patience_s; then as given.

    The waiting time is not capped (Slurm caps it): so nobody starves within their priority.
    """

    # Waiting time is now - submitted_at; now is the same for all and falls out.
    return sorted(queue, key=lambda job: (-job.priority, job.submitted_at / patience_s - factors[job.owner]))
