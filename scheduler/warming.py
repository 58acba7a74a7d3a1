"""Processes of the jobs that come next are started while the jobs before them run, so that a slot that comes free is used at
once: a process of Ray takes about a second of a core before it can do anything.

It is a guess and never needed: a job that starts elsewhere, or before its processes are up, starts as it would without.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from opentinker.scheduler.placement import Demand, Node
from opentinker.scheduler.plan import Decision, JobView, Snapshot, Start, Wait
from opentinker.scheduler.states import ServerState
from opentinker.scheduler.waiting import over_quota

KEEP_S = 300.0
"""How long processes wait for a job; then they end by themselves, and are started anew if it still waits."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NextJob:
    """A queued job, and the node that it will likely start on."""

    job_id: str
    node_id: str
    demand: Demand


class Starter(Protocol):
    """What a `Warmth` asks of a launcher."""

    async def prestart(self, job: NextJob, keep_s: float) -> None: ...

    async def forget(self, job_id: str, node_id: str) -> None: ...


def next_jobs(snapshot: Snapshot, decisions: Sequence[Decision], most: int) -> tuple[NextJob, ...]:
    """The first of those who wait, each with the place of a running job that ends before others as far as is known: by its time
    limit, or else the longest running. At most one per running job; jobs over their quota are passed over. None on a node where
    a server starts, which needs the processor more."""
    jobs = {job.id: job for job in snapshot.jobs}
    nodes = {node.id: node for node in snapshot.nodes}
    leaving = {job_id for server in snapshot.servers for job_id in server.jobs}
    queue = [jobs[d.job_id] for d in decisions if isinstance(d, Wait) and d.job_id not in leaving]
    busy = {d.where[0].node_id for d in decisions if isinstance(d, Start)}
    busy |= {held.node_id for server in snapshot.servers if server.state is ServerState.STARTING for held in server.held}
    places = sorted((_ends(server.jobs, jobs), server.held[0].node_id) for server in snapshot.servers if server.held)
    places = [place for place in places if place[1] not in busy]
    found: list[NextJob] = []
    for job in queue:
        quota = snapshot.policy.quota_of(job.owner)
        if len(found) == most or not places:
            break
        if len(job.request) != 1 or over_quota(job.request, quota, 0.0, 0):
            continue
        (demand,) = job.request
        place = next((place for place in places if _could_hold(nodes.get(place[1]), demand)), None)
        if place is not None:
            places.remove(place)
            found.append(NextJob(job.id, place[1], demand))
    return tuple(found)


def _could_hold(node: Node | None, demand: Demand) -> bool:
    return node is not None and node.gpus >= demand.gpus and node.cpu_slots >= demand.cpu_slots


def _ends(job_ids: Sequence[str], jobs: dict[str, JobView]) -> tuple[float, float]:
    """(when its time is up, since when it runs) of a server's jobs; those that have ended come first."""
    living = [jobs[job_id] for job_id in job_ids if job_id in jobs]
    if not living:
        return (-math.inf, 0.0)
    since = min(job.holds_since or 0.0 for job in living)
    return (max(since + job.time_limit_s if job.time_limit_s is not None else math.inf for job in living), since)


class Warmth:
    """Knows whose processes were started ahead, and where."""

    def __init__(self, starter: Starter, clock: Callable[[], float]) -> None:
        self._starter = starter
        self._clock = clock
        self._wanted: tuple[NextJob, ...] = ()
        self._warm: dict[str, tuple[str, float]] = {}
        """By job: the node, and until when the processes wait there."""
        self._stale: list[tuple[str, str]] = []
        self._off = False

    def want(self, jobs: tuple[NextJob, ...]) -> None:
        self._wanted = jobs

    def left(self, job_id: str, node_id: str = "") -> None:
        """The job is not queued any more: it starts on this node, or has ended."""
        self._wanted = tuple(job for job in self._wanted if job.job_id != job_id)
        self._stale = [(job, node) for job, node in self._stale if (job, node) != (job_id, node_id)]
        self._move(job_id, node_id)

    def _move(self, job_id: str, node_id: str) -> None:
        warm = self._warm.pop(job_id, None)
        if warm is not None and warm[0] != node_id:
            self._stale.append((job_id, warm[0]))

    @property
    def due(self) -> bool:
        """Whether `work` has anything to do."""
        return bool(self._stale) or any(self._is_cold(job) for job in self._wanted)

    async def work(self) -> None:
        """Start what is wanted and not there; end what is there for nobody."""
        while self._stale:
            await self._starter.forget(*self._stale.pop())
        for job in self._wanted:
            if not self._is_cold(job) or job not in self._wanted:  # it may have started meanwhile
                continue
            self._move(job.job_id, job.node_id)
            self._warm[job.job_id] = (job.node_id, self._clock() + KEEP_S)
            try:
                await self._starter.prestart(job, KEEP_S)
            except Exception as error:
                # Jobs start without it; another version of Ray may not have it at all.
                logger.warning("event=no_prestart error=%r", error)
                self._off = True

    def _is_cold(self, job: NextJob) -> bool:
        node_id, until = self._warm.get(job.job_id, ("", 0.0))
        return not self._off and (node_id != job.node_id or until <= self._clock())
