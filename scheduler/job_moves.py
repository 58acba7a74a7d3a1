"""All moves of a job from state to state, once it was submitted: each is recorded with why, and known to all who count."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from opentinker.config.job import parse_job
from opentinker.scheduler.job_clocks import JobClocks
from opentinker.scheduler.journal import Journal, storable
from opentinker.scheduler.layouts import gang, total
from opentinker.scheduler.metrics import SchedulerMetrics
from opentinker.scheduler.placement import Allocation, Demand
from opentinker.scheduler.queue_view import QueueView
from opentinker.scheduler.records import RESTARTING, RETURNED, STARTING, STOP_REQUESTED, Job, Policy, Server
from opentinker.scheduler.states import JobState, ServerState, move_job
from opentinker.scheduler.store import JobStore
from opentinker.scheduler.warming import Warmth


class JobMoves:
    def __init__(
        self,
        store: JobStore,
        journal: Journal,
        queue: QueueView,
        clocks: JobClocks,
        warmth: Warmth,
        metrics: SchedulerMetrics,
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._journal = journal
        self._queue = queue
        self._clocks = clocks
        self._warmth = warmth
        self._metrics = metrics
        self._now = now

    def start(self, job: Job, where: Sequence[Allocation]) -> None:
        """Give a queued job a place, bundle by bundle, and its servers to come there."""
        parts = parse_job(job.config).parts
        own_id, left = f"srv-{secrets.token_hex(5)}", list(where)
        servers, policies = [], []
        for name, request in gang(job).items():
            here, left = left[: len(request)], left[len(request) :]
            server_id = f"{own_id}-{name}" if name else own_id
            servers.append(_server(server_id, name, parts[name].base_model, here))
            policies.append(Policy(f"pol-{secrets.token_hex(8)}", job.id, server_id))
        main = where[0]
        started = replace(job, state=move_job(job.state, JobState.STARTING))
        first = self._store.holding_since(job.id) is None
        places = " and ".join(f"{allocation.demand} on node {allocation.node_id}" for allocation in where)
        event = self._journal.event(job.id, STARTING, places)
        self._store.save(*servers, started, *policies, event)
        self._queue.started(job.id, self._now())
        self._warmth.left(job.id, main.node_id)
        self._journal.announce(job.id, STARTING, server=own_id, node=main.node_id)
        if first:
            self._metrics.queue_wait.observe(max(0.0, self._now() - job.created_at))

    def run(self, job: Job) -> None:
        """All of the job's servers are up."""
        running = replace(job, state=move_job(job.state, JobState.RUNNING), started_at=self._now())
        self._journal.record(running, "running")

    def restart(self, job: Job, cause: str, *, counted: bool) -> None:
        """Put a job back into the queue; its server is stopped by the loop."""
        queued = replace(job, state=move_job(job.state, JobState.QUEUED), started_at=None)
        self._journal.record(queued, RESTARTING if counted else RETURNED, cause)
        self._queue.released(job, self._now())
        self._clocks.queued(job.id)

    def end(self, job: Job, state: JobState, cause: str = "") -> Job:
        """Move a job to an end state; its server is stopped by the loop.

        Raises:
            ConflictError: the job has ended, or cannot end like that.
        """
        ended = replace(job, state=move_job(job.state, state), cause=storable(cause), ended_at=self._now())
        self._journal.record(ended, state.lower(), cause)
        self._queue.released(job, self._now())
        self._clocks.ended(job.id)
        self._warmth.left(job.id)
        self._metrics.jobs_ended.labels(state).inc()
        return ended

    def stop(self, job: Job, cause: str) -> None:
        """End a job after a checkpoint, if it is RUNNING; the loop sees to it, in this life or the next.

        Raises:
            ConflictError: the job has ended.
        """
        if job.state is not JobState.RUNNING:
            self.end(job, JobState.CANCELLED, cause)
            return
        self._store.save(self._journal.event(job.id, STOP_REQUESTED, cause))
        self._queue.stopping(job.id, cause)
        self._journal.wake()


def _server(server_id: str, name: str, base_model: str, where: Sequence[Allocation]) -> Server:
    demand = total([allocation.demand for allocation in where])
    rollout = where[1] if len(where) > 1 else Allocation("", Demand())
    return Server(
        id=server_id,
        state=ServerState.STARTING,
        base_model=base_model,
        node_id=where[0].node_id,
        gpus=demand.gpus,
        cpu_slots=demand.cpu_slots,
        rollout_gpus=rollout.demand.gpus,
        rollout_cpu_slots=rollout.demand.cpu_slots,
        rollout_node_id=rollout.node_id,
        name=name,
    )
