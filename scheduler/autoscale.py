"""What Ray's autoscaler is asked for: what the running jobs hold, and what those who wait for a node need.

Ray takes a request as the least that the cluster has to have in all, until the next one. So what runs is part of it, and the
empty request lets every node go that nothing runs on.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from opentinker.scheduler.capacity import Capacity
from opentinker.scheduler.placement import Demand, Request, addable
from opentinker.scheduler.plan import Decision, Snapshot, Start, Wait
from opentinker.scheduler.queueing import Held
from opentinker.scheduler.states import JobState
from opentinker.scheduler.waiting import over_quota

MAX_BUNDLES = 1000
"""Of queued jobs. Ray packs a request anew every few seconds; who is beyond this many waits for those before."""

logger = logging.getLogger(__name__)


def wanted(snapshot: Snapshot, decisions: Iterable[Decision], most: int = MAX_BUNDLES) -> tuple[Demand, ...]:
    """What the cluster should be able to hold, for a snapshot and the plan that was made of it; sorted.

    Queued jobs come in the order in which the plan looked at them, each whole or not at all, until the next one would make
    theirs more than `most` bundles. Jobs that their owner's quota would keep waiting, and those that no node could
    ever hold, ask for nothing. With nobody left who waits for a node, nothing is asked for.
    """
    jobs = {job.id: job for job in snapshot.jobs}
    # What is left of a job that starts anew goes before the job gets another place.
    leaving = {job.id for job in jobs.values() if job.state is JobState.QUEUED}
    staying = [server for server in snapshot.servers if not leaving.issuperset(server.jobs)]
    bundles = [allocation.demand for server in staying for allocation in server.held]
    taken = [jobs[job_id] for server in snapshot.servers for job_id in server.jobs if job_id in jobs]
    queue = []
    for decision in decisions:
        if isinstance(decision, Start):
            bundles += [allocation.demand for allocation in decision.where]
            taken.append(jobs[decision.job_id])
        elif isinstance(decision, Wait):
            queue.append(jobs[decision.job_id])
    held: dict[str, Held] = {}
    for job in taken:
        held[job.owner] = _with(held.get(job.owner, Held()), job.request)
    possible = _Possible(snapshot)
    running = len(bundles)
    for job in queue:
        mine = held.get(job.owner, Held())
        if over_quota(job.request, snapshot.policy.quota_of(job.owner), mine.gpus, mine.jobs) or not possible(job.request):
            continue
        if len(bundles) - running + len(job.request) > most:
            break
        bundles += job.request
        held[job.owner] = _with(mine, job.request)
    return tuple(sorted(bundles, reverse=True)) if len(bundles) > running else ()


class Growth:
    """Tells the autoscaler of what is wanted, whenever that has changed."""

    def __init__(self, request: Callable[[Sequence[Demand]], Awaitable[None]]) -> None:
        self._request = request
        self._wanted: tuple[Demand, ...] = ()
        self._asked: tuple[Demand, ...] | None = None
        """None: unknown. An earlier scheduler's request may still hold."""

    def want(self, bundles: tuple[Demand, ...]) -> None:
        self._wanted = bundles

    async def ask(self) -> None:
        """Raises what the request does; then the next call asks again."""
        if (bundles := self._wanted) != self._asked:
            self._asked = None
            await self._request(bundles)
            self._asked = bundles
            logger.info("event=nodes_requested bundles=%d", len(bundles))


def _with(held: Held, request: Request) -> Held:
    return Held(held.gpus + sum(demand.gpus for demand in request), held.jobs + 1)


class _Possible:
    """Whether a job fits the nodes that are there, when empty, or those that can be added."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._nodes = (snapshot.nodes, addable(snapshot.policy.node_types))
        self._known: dict[Request, bool] = {}

    def __call__(self, request: Request) -> bool:
        if request not in self._known:
            self._known[request] = any(Capacity(nodes).place(request) is not None for nodes in self._nodes)
        return self._known[request]
