"""What to do next: a pure function of a snapshot of the cluster. The reconciler takes the snapshot and obeys."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from opentinker.errors import AgentStuckError
from opentinker.scheduler.backfill import Holder
from opentinker.scheduler.fairshare import cost_of, decayed_usage
from opentinker.scheduler.placement import Allocation, Node, Request
from opentinker.scheduler.queueing import Held, Policy, schedule
from opentinker.scheduler.states import JobState, ServerState
from opentinker.scheduler.waiting import duration

LEASE_EXPIRED = "lease expired"


@dataclass(frozen=True)
class JobView:
    id: str
    state: JobState
    request: Request
    lease_expires_at: float | None = None
    owner: str = ""
    priority: int = 0
    time_limit_s: float | None = None
    submitted_at: float = 0.0
    holds_since: float | None = None
    """When it was given its resources; None while QUEUED, or when that is not known any more."""
    idle_limit_s: float | None = None
    idle_end: JobState = JobState.FAILED
    """How it ends when its server was idle for that long."""
    restarts_left: int = 0
    returns_left: int = 0
    """How often it may still go back into the queue because its server could not even be placed."""
    saves: bool = False
    """It has weights to save before it is ended at a limit."""
    stopping: str = ""
    """Why it is to be ended with a checkpoint, if somebody asked for that."""


class FaultKind(StrEnum):
    LOST = "lost"
    """It died, or was not heard of in time: another one may do better."""
    REFUSED = "refused"
    """It said why it cannot start, and would say so again."""
    UNPLACED = "unplaced"
    """There never was one: what it was to be placed on was gone."""


_GRAVITY = (FaultKind.REFUSED, FaultKind.LOST, FaultKind.UNPLACED)
"""When several servers of a job fail, what is said of it, and done with it, is what the first of these asks for."""


@dataclass(frozen=True)
class ServerView:
    id: str
    state: ServerState
    held: tuple[Allocation, ...]
    jobs: tuple[str, ...]
    """Jobs with a policy on it."""
    fault: str = ""
    """Why it did not start or why it died; empty while all is well."""
    fault_kind: FaultKind = FaultKind.LOST
    idle_s: float = 0.0
    """How long it has had nothing to do."""


@dataclass(frozen=True)
class DriverOutcome:
    """How a driver ended: `cause` is empty when it succeeded. `code` is the error's, where it had one."""

    cause: str = ""
    code: str = ""
    lost: bool = False
    """Its process died: nothing is wrong with the job itself, as far as anybody knows."""

    @property
    def restarts(self) -> bool:
        """Another one may do better, on other servers: this one is lost, or found that a server hangs."""
        return self.lost or self.code == AgentStuckError.code


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
    last_checkpoint_s: float = 300.0
    """Most of a time limit that is set aside for the last checkpoint."""
    policy: Policy = field(default_factory=Policy)
    usage: Mapping[str, float] = field(default_factory=dict)
    """Decayed usage by owner of jobs that have ended; that of the living is added here."""


@dataclass(frozen=True)
class Start:
    job_id: str
    where: tuple[Allocation, ...]
    """Bundle by bundle, in the order of the job's request."""


@dataclass(frozen=True)
class Wait:
    job_id: str
    waiting_for: str


@dataclass(frozen=True)
class Run:
    """All of the job's servers are up."""

    job_id: str


@dataclass(frozen=True)
class End:
    job_id: str
    state: JobState
    cause: str = ""
    save: bool = False
    """Write a checkpoint first: the job reached a limit, and its server is well."""


@dataclass(frozen=True)
class Restart:
    """Back into the queue: what ran the job is lost, not the job."""

    job_id: str
    cause: str
    counted: bool = True
    """Against the job's `max_restarts`; not if it never got to run."""


@dataclass(frozen=True)
class Stop:
    """No job needs the server any more."""

    server_id: str


Decision = Start | Wait | Run | End | Restart | Stop


def plan(snapshot: Snapshot) -> list[Decision]:
    """Decisions, at most one per job and one per server. A server of a job that this very plan ends is stopped by the next."""
    decisions: list[Decision] = []
    servers: dict[str, list[ServerView]] = {}
    for server in snapshot.servers:
        for job_id in server.jobs:
            servers.setdefault(job_id, []).append(server)
    queue: list[JobView] = []
    living: dict[str, JobView] = {}
    for job in snapshot.jobs:
        decision = _fate(job, servers.get(job.id, ()), snapshot)
        if decision is not None:
            decisions.append(decision)
        elif job.id in servers and job.state is JobState.QUEUED:
            # A restart. Two incarnations of a job would write to the same files.
            what = "server" if len(servers[job.id]) == 1 else "servers"
            decisions.append(Wait(job.id, f"its earlier {what} to be gone"))
        elif job.state is JobState.QUEUED:
            queue.append(job)
        if job.state is not JobState.QUEUED:
            living[job.id] = job
    decisions += [Stop(server.id) for server in snapshot.servers if not living.keys() & server.jobs]
    if queue:
        holders = [_holder(server, living, snapshot.now) for server in snapshot.servers]
        usage, held = _taken(living.values(), snapshot)
        placement = schedule(snapshot.nodes, holders, queue, snapshot.now, snapshot.policy, usage, held)
        decisions += [Start(job_id, where) for job_id, where in placement.starts.items()]
        decisions += [Wait(job_id, why) for job_id, why in placement.waits.items()]
    return decisions


def _holder(server: ServerView, living: Mapping[str, JobView], now: float) -> Holder:
    """What a server holds, until its last job must end; one without living jobs is on its way out."""
    jobs = [living[job_id] for job_id in server.jobs if job_id in living]
    name = jobs[0].id if jobs else next(iter(server.jobs), server.id)
    ends_at = max((_ends_at(job) for job in jobs), default=now)
    since = min((job.holds_since or 0.0 for job in jobs), default=0.0)
    return Holder(name, server.held, ends_at, since)


def _ends_at(job: JobView) -> float:
    if job.time_limit_s is None or job.holds_since is None:
        return math.inf
    return job.holds_since + job.time_limit_s


def _taken(living: Iterable[JobView], snapshot: Snapshot) -> tuple[dict[str, float], dict[str, Held]]:
    """By owner: usage, that of the living included, and what they hold."""
    usage, held = dict(snapshot.usage), dict[str, Held]()
    for job in living:
        before = held.get(job.owner, Held())
        held[job.owner] = Held(before.gpus + sum(demand.gpus for demand in job.request), before.jobs + 1)
        if job.holds_since is not None:
            cost, now = cost_of(job.request), snapshot.now
            used = decayed_usage(cost, job.holds_since, now, now, snapshot.policy.half_life_s)
            usage[job.owner] = usage.get(job.owner, 0.0) + used
    return usage, held


def _fate(job: JobView, servers: Sequence[ServerView], snapshot: Snapshot) -> Decision | None:
    if job.lease_expires_at is not None and snapshot.now >= job.lease_expires_at:
        return End(job.id, JobState.CANCELLED, f"{LEASE_EXPIRED}: no heartbeat for {snapshot.lease_s:g} s")
    if job.state is JobState.QUEUED:
        return None
    if not servers:
        return _lost(job, "its server is gone")
    outcome = snapshot.outcomes.get(job.id) if job.state is JobState.RUNNING else None
    if outcome is not None and not outcome.cause:
        return End(job.id, JobState.COMPLETED)
    # A server's death comes before a driver's failure: it is the cause, and the failure its echo.
    if lost := [server for server in servers if server.fault]:
        return _without_server(job, min(lost, key=lambda server: _GRAVITY.index(server.fault_kind)))
    if outcome is not None:
        return _lost(job, outcome.cause) if outcome.restarts else End(job.id, JobState.FAILED, outcome.cause)
    return _at_limit(job, min(server.idle_s for server in servers), snapshot) or (
        Run(job.id) if job.state is JobState.STARTING and all(server.state is ServerState.READY for server in servers) else None
    )


def _at_limit(job: JobView, idle_s: float, snapshot: Snapshot) -> End | None:
    """The end of a job that was asked to stop, or reached a limit; `idle_s` is for how long all its servers had nothing to do.
    The last tenth of a time limit is for the checkpoint, for nothing is held beyond the limit."""
    running = job.state is JobState.RUNNING
    if job.time_limit_s is not None and snapshot.now >= _ends_at(job):
        cause = f"reached its time limit of {duration(job.time_limit_s)}"
        return End(job.id, JobState.CANCELLED, job.stopping) if job.stopping else End(job.id, JobState.FAILED, cause)
    if job.stopping:
        return End(job.id, JobState.CANCELLED, job.stopping, save=running)
    if job.time_limit_s is not None:
        cause = f"reached its time limit of {duration(job.time_limit_s)}"
        aside_s = min(job.time_limit_s / 10, snapshot.last_checkpoint_s)
        if running and job.saves and snapshot.now >= _ends_at(job) - aside_s:
            return End(job.id, JobState.FAILED, cause, save=True)
    if running and job.idle_limit_s is not None and idle_s >= job.idle_limit_s:
        cause = f"its server was idle for {duration(job.idle_limit_s)}, its limit"
        return End(job.id, job.idle_end, cause, save=True)
    return None


def _without_server(job: JobView, server: ServerView) -> End | Restart:
    if server.fault_kind is FaultKind.REFUSED:
        return End(job.id, JobState.FAILED, server.fault)
    if server.fault_kind is FaultKind.UNPLACED and job.returns_left > 0 and not job.stopping:
        return Restart(job.id, server.fault, counted=False)
    return _lost(job, server.fault)


def _lost(job: JobView, cause: str) -> End | Restart:
    if job.stopping:
        return End(job.id, JobState.CANCELLED, f"{job.stopping}; no checkpoint could be written: {cause}")
    return Restart(job.id, cause) if job.restarts_left > 0 else End(job.id, JobState.FAILED, cause)
