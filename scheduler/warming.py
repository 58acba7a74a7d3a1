"""Processes of the jobs that come next are started while the jobs before them run, so that a slot that comes free is used at
once: a process of Ray takes about a second of a core before it can do anything.

It is a guess and never needed: a job that starts elsewhere, or before its processes are up, starts as it would without.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from opentinker.errors import OpenTinkerError
from opentinker.scheduler.placement import Demand, Node
from opentinker.scheduler.plan import Decision, JobView, Snapshot, Start, Wait
from opentinker.scheduler.states import ServerState
from opentinker.scheduler.waiting import over_quota

KEEP_S = 300.0
"""How long processes wait for a job; then they end by themselves, and are started anew if it still waits."""
RETRY_S = 30.0
"""After this it is tried again to start or to end what could not be."""
ASK_S = 20.0
"""How long one request may take."""

logger = logging.getLogger(__name__)


class NoPrestartError(OpenTinkerError):
    """This cluster can start no processes ahead, now or ever."""


@dataclass(frozen=True)
class NextJob:
    """A queued job, and the node that it will likely start on."""

    job_id: str
    node_id: str
    demand: Demand


class Starter(Protocol):
    """What a `Warmth` asks of a launcher."""

    async def prestart(self, job: NextJob, keep_s: float) -> None:
        """Raises: NoPrestartError, or anything else when it may do better another time."""
        ...

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


@dataclass(eq=False)
class _Stale:
    """Processes that wait for nobody, and end by themselves at `until`; they are ended from `due_at` on."""

    job_id: str
    node_id: str
    until: float
    due_at: float = -math.inf


class Warmth:
    """Knows whose processes were started ahead, and where."""

    def __init__(self, starter: Starter, clock: Callable[[], float]) -> None:
        self._starter = starter
        self._clock = clock
        self._wanted: tuple[NextJob, ...] = ()
        self._warm: dict[str, tuple[str, float, float]] = {}
        """By job: the node, until when the processes wait there, and when they are to be started anew."""
        self._stale: list[_Stale] = []
        self._off = False

    def want(self, jobs: tuple[NextJob, ...]) -> None:
        self._wanted = jobs

    def left(self, job_id: str, node_id: str = "") -> None:
        """The job is not queued any more: it starts on this node, or has ended."""
        self._wanted = tuple(job for job in self._wanted if job.job_id != job_id)
        self._move(job_id, node_id)

    def _move(self, job_id: str, node_id: str) -> None:
        """What there is of the job on this node is wanted there, and nothing of it elsewhere."""
        self._stale = [stale for stale in self._stale if (stale.job_id, stale.node_id) != (job_id, node_id)]
        node, until, _ = self._warm.pop(job_id, ("", 0.0, 0.0))
        if node and node != node_id:
            self._stale.append(_Stale(job_id, node, until))

    @property
    def due(self) -> bool:
        """Whether `work` has anything to do."""
        return self._next_stale() is not None or any(self._is_cold(job) for job in self._wanted)

    async def work(self) -> None:
        """Start what is wanted and not there; end what is there for nobody. What fails is logged and tried again later."""
        while stale := self._next_stale():
            stale.due_at = self._clock() + RETRY_S
            try:
                async with asyncio.timeout(ASK_S):
                    await self._starter.forget(stale.job_id, stale.node_id)
            except Exception as error:
                logger.warning("event=not_forgotten job=%s node=%s error=%r", stale.job_id, stale.node_id, error)
                if stale.due_at < stale.until:
                    continue  # later they will have ended by themselves
            self._stale = [other for other in self._stale if other is not stale]
        for job in self._wanted:
            if not self._is_cold(job) or job not in self._wanted:  # it may have started meanwhile
                continue
            self._move(job.job_id, job.node_id)
            until = self._clock() + KEEP_S
            self._warm[job.job_id] = (job.node_id, until, until)
            try:
                async with asyncio.timeout(ASK_S):
                    await self._starter.prestart(job, KEEP_S)
            except NoPrestartError as error:
                logger.warning("event=no_prestart error=%r; jobs start without it", error)
                self._off = True
            except Exception as error:
                logger.warning("event=not_prestarted job=%s node=%s error=%r", job.job_id, job.node_id, error)
                if job.job_id in self._warm:  # some of them may be there
                    self._warm[job.job_id] = (job.node_id, until, self._clock() + RETRY_S)

    def _next_stale(self) -> _Stale | None:
        return next((stale for stale in reversed(self._stale) if stale.due_at <= self._clock()), None)

    def _is_cold(self, job: NextJob) -> bool:
        node_id, _, again_at = self._warm.get(job.job_id, ("", 0.0, 0.0))
        return not self._off and (node_id != job.node_id or again_at <= self._clock())
