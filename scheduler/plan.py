"""What to do next: a pure function of a snapshot of the cluster. The reconciler takes the snapshot and obeys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentinker.scheduler.placement import Allocation, Demand, Node, place
from opentinker.scheduler.states import JobState, ServerState


@dataclass(frozen=True)
class JobView:
    id: str
    state: JobState
    demand: Demand
    lease_expires_at: float | None = None


@dataclass(frozen=True)
class ServerView:
    id: str
    state: ServerState
    held: Allocation
    jobs: tuple[str, ...]
    """Jobs with a policy on it."""
    fault: str = ""
    """Why it did not start or why it died; empty while all is well."""


@dataclass(frozen=True)
class DriverOutcome:
    """How a driver ended: `cause` is empty when it succeeded. `code` is the error's, where it had one."""

    cause: str = ""
    code: str = ""


@dataclass(frozen=True)
class Snapshot:
    """`jobs` are those that have not ended, in the order of their submission; `servers` those not STOPPED."""

    now: float
    nodes: Sequence[Node]
    jobs: Sequence[JobView]
    servers: Sequence[ServerView] = ()
    outcomes: Mapping[str, DriverOutcome] = field(default_factory=dict)
    """By job, of drivers that ended."""
    lease_s: float = 30.0


@dataclass(frozen=True)
class Start:
    job_id: str
    where: Allocation


@dataclass(frozen=True)
class Wait:
    job_id: str
    waiting_for: str


@dataclass(frozen=True)
class Run:
    """The job's server is up."""

    job_id: str


@dataclass(frozen=True)
class End:
    job_id: str
    state: JobState
    cause: str = ""


@dataclass(frozen=True)
class Stop:
    """No living job needs the server."""

    server_id: str


Decision = Start | Wait | Run | End | Stop


def plan(snapshot: Snapshot) -> list[Decision]:
    """Decisions, at most one per job and one per server. A server of a job that this very plan ends is stopped by the next."""
    decisions: list[Decision] = []
    servers = {job: server for server in snapshot.servers for job in server.jobs}
    queue: list[tuple[str, Demand]] = []
    for job in snapshot.jobs:
        decision = _fate(job, servers.get(job.id), snapshot)
        if decision is not None:
            decisions.append(decision)
        elif job.state is JobState.QUEUED:
            queue.append((job.id, job.demand))
    live = {job.id for job in snapshot.jobs}
    decisions += [Stop(server.id) for server in snapshot.servers if not live.intersection(server.jobs)]
    placement = place(snapshot.nodes, [server.held for server in snapshot.servers], queue)
    decisions += [Start(job_id, where) for job_id, where in placement.starts.items()]
    decisions += [Wait(job_id, why) for job_id, why in placement.waits.items()]
    return decisions


def _fate(job: JobView, server: ServerView | None, snapshot: Snapshot) -> Decision | None:
    if job.lease_expires_at is not None and snapshot.now >= job.lease_expires_at:
        return End(job.id, JobState.CANCELLED, f"lease expired: no heartbeat for {snapshot.lease_s:g} s")
    if job.state is JobState.QUEUED:
        return None
    if server is None:
        return End(job.id, JobState.FAILED, "its server is gone")
    outcome = snapshot.outcomes.get(job.id) if job.state is JobState.RUNNING else None
    if outcome is not None and not outcome.cause:
        return End(job.id, JobState.COMPLETED)
    # A server's death comes before a driver's failure: it is the cause, and the failure its echo.
    if server.fault:
        return End(job.id, JobState.FAILED, server.fault)
    if outcome is not None:
        return End(job.id, JobState.FAILED, outcome.cause)
    return Run(job.id) if job.state is JobState.STARTING and server.state is ServerState.READY else None
