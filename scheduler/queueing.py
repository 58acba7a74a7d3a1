"""One pass over the queue: who starts where, and in words why the others wait. A pure function."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from opentinker.scheduler.backfill import Holder, Reservation, reserve
from opentinker.scheduler.capacity import Capacity
from opentinker.scheduler.fairshare import Queued, fair_share_factors, in_order
from opentinker.scheduler.placement import Allocation, Node, Placement, Request, addable
from opentinker.scheduler.settings import NodeType, Quota
from opentinker.scheduler.waiting import duration, estimate, impossible, in_line, over_quota, shortage

_GPU, _CPU = 1, 2
_TOUCHED = {_GPU: (_GPU, _GPU | _CPU), _CPU: (_CPU, _GPU | _CPU), _GPU | _CPU: (_GPU, _CPU, _GPU | _CPU)}
"""By the lanes of a job, the sets of lanes that have one in common with it."""


class Candidate(Queued, Protocol):
    """What a pass needs to know of a queued job."""

    @property
    def id(self) -> str: ...
    @property
    def request(self) -> Request: ...
    @property
    def time_limit_s(self) -> float | None: ...


@dataclass(frozen=True)
class Held:
    """What an owner's jobs hold, for the quota."""

    gpus: float = 0.0
    jobs: int = 0


@dataclass(frozen=True)
class Policy:
    """How a cluster is shared."""

    shares: Mapping[str, float] = field(default_factory=dict)
    """By owner; 1.0 for who is not listed."""
    quota: Quota = field(default_factory=Quota)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """By owner, in place of `quota`."""
    half_life_s: float = 7 * 86400.0
    patience_s: float = 86400.0
    node_types: tuple[NodeType, ...] = ()
    """Of nodes that can be added."""

    def quota_of(self, owner: str) -> Quota:
        return self.quotas.get(owner, self.quota)


def schedule(
    nodes: Sequence[Node],
    holders: Iterable[Holder],
    queue: Sequence[Candidate],
    now: float = 0.0,
    policy: Policy | None = None,
    usage: Mapping[str, float] | None = None,
    held: Mapping[str, Held] | None = None,
) -> Placement:
    """Fair-share order, quotas, best fit and EASY backfill. `queue` is in the order of submission; `usage` is decayed usage and
    `held` what is held, both by owner.

    GPUs and CPU slots are two lanes: the first job of a lane that does not fit is its head and gets a reservation; behind it,
    only jobs with a time limit may start, and only where they do not delay it. Jobs that are over their owner's quota, or that
    no node could hold, wait without holding anybody up.
    """
    return _Pass(nodes, holders, now, policy or Policy(), held or {}).run(queue, usage or {})


class _Pass:
    def __init__(
        self, nodes: Sequence[Node], holders: Iterable[Holder], now: float, policy: Policy, held: Mapping[str, Held]
    ) -> None:
        self._nodes = nodes
        self._holders = list(holders)
        self._capacity = Capacity(nodes, (allocation for holder in self._holders for allocation in holder.where))
        self._now = now
        self._policy = policy
        self._held = dict(held)
        self._heads: dict[int, list[Reservation]] = {}
        """By a job's lanes, who is to start before it."""
        self._ahead = dict.fromkeys(_TOUCHED, 0)
        """By a job's lanes, how many wait before it."""
        self._starts: dict[str, tuple[Allocation, ...]] = {}
        self._waits: dict[str, str] = {}
        # Within a pass room only shrinks: what did not fit once does not fit later.
        self._failed: dict[tuple[Request, int], str] = {}
        self._lanes: dict[Request, int] = {}
        self._possible: dict[Request, bool] = {}
        self._growable: dict[Request, bool] = {}

    def run(self, queue: Sequence[Candidate], usage: Mapping[str, float]) -> Placement:
        factors = fair_share_factors({job.owner for job in queue}, usage, self._policy.shares)
        limited = self._policy.quota.limits or any(quota.limits for quota in self._policy.quotas.values())
        for job in in_order(queue, factors, self._policy.patience_s):
            if limited and (why := self._over_quota(job)):
                self._waits[job.id] = why
                continue
            lanes = self._lanes.get(job.request) or self._look_at(job.request)
            if not self._possible[job.request]:
                self._waits[job.id] = impossible(job.request, addable=self._addable(job.request))
                continue
            heads = self._heads.get(lanes)
            why = self._overtake(job, lanes, heads) if heads else self._lead(job, lanes)
            if why:
                self._waits[job.id] = why
                for touched in _TOUCHED[lanes]:
                    self._ahead[touched] += 1
        return Placement(self._starts, self._waits)

    def _lead(self, job: Candidate, lanes: int) -> str:
        """Start a job that nobody is ahead of, or make it the head of its lanes."""
        if (placed := self._capacity.place(job.request)) is not None:
            return self._start(job, placed)
        reservation = reserve(self._capacity, self._holders, job.id, job.request, self._now)
        words = f"{shortage(job.request, self._capacity)}; {estimate(reservation, self._now)}"
        if self._addable(job.request):
            words += ", unless a node is added before"
        if reservation is None:
            # It would fit on the empty nodes, so what holds them is on its way out: nobody overtakes meanwhile.
            reservation = Reservation(job.id, None, "", frozenset(range(len(self._nodes))), self._capacity)
        for touched in _TOUCHED[lanes]:
            self._heads.setdefault(touched, []).append(reservation)
        return words

    def _addable(self, request: Request) -> bool:
        """Whether nodes that can be added could hold the job."""
        if request not in self._growable:
            growth = addable(self._policy.node_types, self._nodes)
            self._growable[request] = Capacity(growth).place(request) is not None
        return self._growable[request]

    def _overtake(self, job: Candidate, lanes: int, heads: Sequence[Reservation]) -> str:
        """Start a job if that delays no head; or say why not."""
        request = job.request
        if (why := self._failed.get((request, 0))) is None:
            if job.time_limit_s is None:
                where = in_line(self._ahead[lanes], heads[0].job_id)
                return f"its turn: {where}; with a time limit it could fill a gap before that"
            ends_at = self._now + job.time_limit_s
            outlived = [head for head in heads if head.outlived_by(ends_at)]
            code = sum(1 << heads.index(head) for head in outlived)
            if (why := self._failed.get((request, code))) is None:
                if (placed := self._place_beside(request, outlived)) is not None:
                    return self._start(job, placed)
                why = self._failed[request, code] = self._why_not(request, outlived)
            if code and (request, 0) not in self._failed:
                why = f"{why}, with its time limit of {duration(job.time_limit_s)}"
        return f"{why}; {in_line(self._ahead[lanes], heads[0].job_id)}"

    def _place_beside(self, request: Request, outlived: Sequence[Reservation]) -> list[int] | None:
        if not outlived:
            return self._capacity.place(request)
        placed = self._capacity.place(request, lambda number: all(head.leaves_room(number, request) for head in outlived))
        for head in outlived if placed else ():
            for number, demand in zip(placed or (), request, strict=True):
                if number in head.nodes:
                    head.rest.take(number, demand)
        return placed

    def _why_not(self, request: Request, outlived: Sequence[Reservation]) -> str:
        """It fits nowhere, or only where it would delay a head."""
        if outlived and (placed := self._capacity.place(request)) is not None:
            for number, demand in zip(placed, request, strict=True):
                self._capacity.release(number, demand)
            head = outlived[0]
            when = "whose time is not known" if head.at is None else f"due in {duration(head.at - self._now)}"
            return f"its turn: it would delay {head.job_id}, {when}"
        why = self._failed[request, 0] = shortage(request, self._capacity)
        return why

    def _start(self, job: Candidate, placed: Sequence[int]) -> str:
        where = tuple(
            Allocation(self._capacity.nodes[number].id, demand) for number, demand in zip(placed, job.request, strict=True)
        )
        self._starts[job.id] = where
        ends_at = math.inf if job.time_limit_s is None else self._now + job.time_limit_s
        self._holders.append(Holder(job.id, where, ends_at, self._now))
        before = self._held.get(job.owner, Held())
        self._held[job.owner] = Held(before.gpus + sum(demand.gpus for demand in job.request), before.jobs + 1)
        return ""

    def _over_quota(self, job: Candidate) -> str:
        held = self._held.get(job.owner, Held())
        return over_quota(job.request, self._policy.quota_of(job.owner), held.gpus, held.jobs)

    def _look_at(self, request: Request) -> int:
        lanes = self._lanes[request] = (_GPU if any(d.gpus for d in request) else 0) | (
            _CPU if any(d.cpu_slots for d in request) else 0
        )
        self._possible[request] = Capacity(self._nodes).place(request) is not None
        return lanes
