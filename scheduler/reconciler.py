"""The loop that makes the cluster match the store: snapshot, plan, obey. Level-triggered: what failed is tried again."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from opentinker.checkpoints import parse_ref
from opentinker.config.job import KINDS, parse_job
from opentinker.errors import ConfigError, DeadlineError, OpenTinkerError, ServerLostError, UnavailableError
from opentinker.scheduler.autoscale import Growth, wanted
from opentinker.scheduler.checkpoint_views import start_folder
from opentinker.scheduler.driver import SERVER_LOG_NAME
from opentinker.scheduler.launcher import DriverSpec, Launcher, NotPlacedError, ServerSpec
from opentinker.scheduler.metrics import SchedulerMetrics
from opentinker.scheduler.model_registry import ModelRegistry
from opentinker.scheduler.placement import Allocation, Demand, server_config
from opentinker.scheduler.plan import (
    LEASE_EXPIRED,
    Decision,
    DriverOutcome,
    End,
    FaultKind,
    JobView,
    Restart,
    Run,
    ServerView,
    Snapshot,
    Start,
    Stop,
    Wait,
    plan,
)
from opentinker.scheduler.queue_view import QueueView
from opentinker.scheduler.records import RESTARTING, RETURNED, STARTING, STOP_REQUESTED, Event, Job, Policy, Server
from opentinker.scheduler.run_copies import RunCopies
from opentinker.scheduler.settings import Quota, Settings
from opentinker.scheduler.states import JobState, ServerState, move_job, move_server
from opentinker.scheduler.store import JobStore
from opentinker.scheduler.warming import Warmth, next_jobs

logger = logging.getLogger(__name__)
RESTARTED = "scheduler_restarted"
LOOK_S = 30.0
"""Ray's word on its nodes has to come within this."""
FORGIVEN_S = 2.0
"""A longer pause between two looks is an outage of the scheduler's own."""
LAST_CHECKPOINT = "stopped"
"""The name of the checkpoint that is written when a job is stopped."""
MAX_TEXT = 2000
_HOLDING = frozenset({JobState.STARTING, JobState.RUNNING})
"""Jobs in these states have a server, or make one."""
_ECHOES = frozenset({"server_lost", "unavailable", "deadline_exceeded"})
"""Codes of driver errors that a server's death may have caused."""


class Reconciler:
    """Owns the tasks that launch, watch, drive and stop. All state changes of jobs go through it, on one event loop."""

    def __init__(
        self,
        store: JobStore,
        launcher: Launcher,
        settings: Settings,
        token_of: Callable[[str], str],
        now: Callable[[], float],
        steady: Callable[[], float],
        secrets_of: Callable[[Job], dict[str, tuple[str, str]]] = lambda job: {},
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._settings = settings
        self._token_of = token_of
        self._secrets_of = secrets_of
        self._now = now
        self._models = ModelRegistry(settings)
        self.copies = RunCopies(store, settings, now)
        self._queue = QueueView(store, settings, now())
        self._steady = steady
        self._leases: dict[str, float] = {}
        self._looked_at = time.monotonic()
        self._warmth = Warmth(launcher, steady)
        self._growth = Growth(lambda bundles: self._launcher.request_nodes(bundles))
        self.node_types = settings.node_types if settings.autoscale else ()
        """Of nodes that can be added."""
        self.metrics = SchedulerMetrics()
        self._faults: dict[str, tuple[str, FaultKind]] = {}
        self._held_since: dict[str, float] = {}
        self._outcomes: dict[str, DriverOutcome] = {}
        self._waits: dict[str, str] = {}
        self._idle: dict[str, float] = {}
        self._left: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()

    def recover(self) -> None:
        """Take over the store of an earlier life. Its jobs go on: the loop finds their processes again, or that they are gone.

        The outage does not count against leases, for nobody could renew them.
        """
        now = self._now()
        self._store.save(*(Event(job.id, now, RESTARTED) for job in self._store.live_queue()))
        self.copies.recover()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            self._wake.clear()
            try:
                with self.metrics.placement_pass.time():
                    await self.tick()
            except Exception:
                # A passing fault of the cluster must not end the control plane; the next look tries again.
                logger.exception("event=reconcile_failed")
            await _wait(self._wake, self._settings.reconcile_s)

    async def tick(self) -> None:
        """One look at the cluster, and what follows from it. What fails for one job does not keep the others waiting."""
        async with asyncio.timeout(LOOK_S):
            nodes = await self._launcher.nodes()
        self._forgive_outage()
        jobs = [self._timed(job) for job in self._queue.jobs()]
        servers = [
            ServerView(
                server.id,
                server.state,
                (Allocation(server.node_id, Demand(server.gpus, server.cpu_slots), self._launcher.gpus_of(server.id)),),
                tuple(policy.job_id for policy in policies),
                *self._faults.get(server.id, ("", FaultKind.LOST)),
                self._idle.get(server.id, 0.0),
            )
            for server, policies in self._store.open_servers()
        ]
        self._waits.clear()
        now = self._now()
        usage = self._queue.usage(now)
        snapshot = Snapshot(
            now,
            nodes,
            jobs,
            servers,
            self._outcomes,
            self._settings.lease_s,
            self._settings.last_checkpoint_s,
            self._queue.policy,
            usage,
        )
        decisions = plan(snapshot)
        for decision in decisions:
            try:
                self._obey(decision)
            except OpenTinkerError as error:
                logger.exception("event=decision_failed decision=%r", decision)
                self._give_up(decision, error)
            except Exception:
                logger.exception("event=decision_failed decision=%r", decision)
        self._attend()
        if self._settings.autoscale:
            self._growth.want(wanted(snapshot, decisions))
            self._spawn("autoscale", self._growth.ask)
        self._warmth.want(next_jobs(snapshot, decisions, self._settings.prestart_jobs))
        if self._warmth.due:
            self._spawn("warmth", self._warmth.work)
        self._looked_at = time.monotonic()

    def _give_up(self, decision: Decision, error: OpenTinkerError) -> None:
        """A job that cannot even be started, such as one whose stored config this version refuses, fails with that."""
        job = self._job(decision.job_id) if isinstance(decision, Start) else None
        if job is not None and isinstance(error, ConfigError) and not job.state.ended:
            self.end(job, JobState.FAILED, str(error))

    def _forgive_outage(self) -> None:
        """Time in which this process could not look, with its store away or itself stopped, renewed nobody's lease: it does
        not count."""
        missed_s = time.monotonic() - self._looked_at - self._settings.reconcile_s
        if missed_s > FORGIVEN_S:
            logger.warning("event=outage seconds=%.1f", missed_s)
            self._leases = {job_id: expires_at + missed_s for job_id, expires_at in self._leases.items()}

    def renew_lease(self, job_id: str) -> None:
        """The job's client was heard of. Leases run by a clock that nobody sets, and start anew when the scheduler does: the
        store's `lease_expires_at` only says that there is one."""
        self._leases[job_id] = self._steady() + self._settings.lease_s

    def _timed(self, job: JobView) -> JobView:
        """The job with its times by the steady clock, told in Unix time as that is now, however it was set meanwhile."""
        lease, since = job.lease_expires_at, job.holds_since
        if since is not None:
            now = self._steady()
            started = self._held_since.setdefault(job.id, now - max(0.0, self._now() - since))
            since = self._now() - (now - started)
        return replace(job, lease_expires_at=None if lease is None else self._lease_expires_at(job), holds_since=since)

    def _lease_expires_at(self, job: JobView) -> float:
        """In Unix time as it is now, however it was set meanwhile."""
        now = self._steady()
        return self._now() + self._leases.setdefault(job.id, now + self._settings.lease_s) - now

    def wake(self) -> None:
        """Something changed: look now."""
        self._wake.set()

    async def wait_change(self, timeout_s: float) -> None:
        """Return at the next change of any job or server, or after the timeout."""
        await _wait(self._changed, timeout_s)

    def end(self, job: Job, state: JobState, cause: str = "") -> Job:
        """Move a job to an end state; its server is stopped by the loop.

        Raises:
            ConflictError: the job has ended, or cannot end like that.
        """
        ended = replace(job, state=move_job(job.state, state), cause=storable(cause), ended_at=self._now())
        self._record(ended, state.lower(), cause)
        self._queue.released(job, self._now())
        self._leases.pop(job.id, None)
        self._held_since.pop(job.id, None)
        self._warmth.left(job.id)
        self.metrics.jobs_ended.labels(state).inc()
        return ended

    def waiting_for(self, job: Job) -> str:
        """What a job that is not yet RUNNING waits for, in words; empty for others."""
        if job.state is JobState.QUEUED:
            return self._waits.get(job.id, "its turn")
        return "its server starts" if job.state is JobState.STARTING else ""

    def quota_of(self, owner: str) -> Quota:
        """What the owner's jobs may hold at once."""
        return self._queue.policy.quota_of(owner)

    def unhealthy(self) -> dict[str, str]:
        """By server: why what it held cannot be given to anybody, although its job has ended."""
        return dict(self._left)

    def released(self, job_id: str) -> bool:
        """Whether nothing of an ended job is left on the cluster."""
        servers = [self._store.server(policy.server_id) for policy in self._store.policies(job_id)]
        return all(server is None or server.state is ServerState.STOPPED for server in servers)

    async def close(self) -> None:
        """Cancel the tasks; processes are left as they are."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.copies.close()

    def _obey(self, decision: Decision) -> None:
        match decision:
            case Start(job_id, (where,)):  # one bundle: other layouts are refused at submit
                self._start(self._job(job_id), where)
            case Wait(job_id, waiting_for):
                self._waits[job_id] = waiting_for
            case Run(job_id):
                self._run(self._job(job_id))
            case End(job_id, state, cause, save):
                if save:
                    self._save_first(self._job(job_id), state, cause)
                else:
                    self.end(self._job(job_id), state, cause)
                if cause.startswith(LEASE_EXPIRED):
                    self.metrics.lease_expiries.inc()
            case Restart(job_id, cause, counted):
                self._restart(self._job(job_id), cause, RESTARTING if counted else RETURNED)
            case Stop(server_id):
                self._spawn(f"stop:{server_id}", partial(self._stop, server_id))

    def _start(self, job: Job, where: Allocation) -> None:
        config = parse_job(job.config)
        demand = where.demand
        server = Server(
            id=f"srv-{secrets.token_hex(5)}",
            state=ServerState.STARTING,
            base_model=config.base_model,
            node_id=where.node_id,
            gpus=demand.gpus,
            cpu_slots=demand.cpu_slots,
        )
        policy = Policy(f"pol-{secrets.token_hex(8)}", job.id, server.id)
        started = replace(job, state=move_job(job.state, JobState.STARTING))
        first = self._store.holding_since(job.id) is None
        self._store.save(server, started, policy, Event(job.id, self._now(), STARTING, f"{demand} on node {where.node_id}"))
        self._queue.started(job.id, self._now())
        self._warmth.left(job.id, where.node_id)
        self._announce(job.id, STARTING, server=server.id, node=where.node_id)
        if first:
            self.metrics.queue_wait.observe(max(0.0, self._now() - job.created_at))

    def _restart(self, job: Job, cause: str, kind: str) -> None:
        queued = replace(job, state=move_job(job.state, JobState.QUEUED), started_at=None)
        self._record(queued, kind, cause)
        self._queue.released(job, self._now())
        self._held_since.pop(job.id, None)

    def stop(self, job: Job, cause: str) -> None:
        """End a job after a checkpoint, if it is RUNNING; the loop sees to it, in this life or the next.

        Raises:
            ConflictError: the job has ended.
        """
        if job.state is not JobState.RUNNING:
            self.end(job, JobState.CANCELLED, cause)
            return
        self._store.save(Event(job.id, self._now(), STOP_REQUESTED, storable(cause)))
        self._queue.stopping(job.id, cause)
        self.wake()

    def _save_first(self, job: Job, state: JobState, cause: str) -> None:
        """End a job after a checkpoint of its policy as `stopped`, if it has something to save."""
        if KINDS[job.kind].trains and job.state is JobState.RUNNING:
            self._spawn(f"save:{job.id}", partial(self._save_and_end, job, state, cause))
        else:
            self.end(job, state, cause)

    async def _save_and_end(self, job: Job, state: JobState, cause: str) -> None:
        self._store.save(Event(job.id, self._now(), "stopping", storable(cause)))
        self._announce(job.id, "stopping", cause=cause)
        try:
            policy = self.policy_of(job.id)
            assert policy is not None
            await self._launcher.save(policy.server_id, policy.id, LAST_CHECKPOINT)
            saved = f"its weights are in checkpoint '{LAST_CHECKPOINT}'"
        except OpenTinkerError as error:
            saved = f"no checkpoint could be written: {error.detail}"
        job = self._job(job.id)
        if job.state is JobState.RUNNING:  # nothing else ended it meanwhile
            self.end(job, state, f"{cause}; {saved}")

    def policy_of(self, job_id: str) -> Policy | None:
        """The policy on the job's present server; None if it has none."""
        for server, policies in self._store.open_servers():
            for policy in policies:
                if policy.job_id == job_id and server.state in (ServerState.STARTING, ServerState.READY):
                    return policy
        return None

    def _attend(self) -> None:
        """Give every server, every driver and every copy that a job needs the task that sees to it; a restart leaves none."""
        self._copy()
        for server, policies in self._store.open_servers():
            jobs = [job for policy in policies if (job := self._job(policy.job_id)) and job.state in _HOLDING]
            if not jobs or server.id in self._faults or f"stop:{server.id}" in self._tasks:
                continue
            if server.state is ServerState.STARTING:
                self._spawn(f"server:{server.id}", partial(self._serve, server, policies[0], jobs[0]))
            elif server.state is ServerState.READY:
                self._spawn(f"server:{server.id}", partial(self._watch, server.id))
            for job in jobs:
                if job.state is JobState.RUNNING and KINDS[job.kind].driven and job.id not in self._outcomes:
                    self._spawn(f"driver:{job.id}", partial(self._drive, job))

    def _server_spec(self, server: Server, policy: Policy, job: Job) -> ServerSpec:
        config, demand = parse_job(job.config), Demand(server.gpus, server.cpu_slots)
        return ServerSpec(
            server_id=server.id,
            job_id=job.id,
            policy_id=policy.id,
            token=self._token_of(policy.id),
            node_id=server.node_id,
            demand=demand,
            config=server_config(config.server(), demand).model_dump(mode="json")
            | {"base_model": self._models.location(config.base_model)},
            lora=None if config.lora is None else config.lora.model_dump(mode="json"),
            seed=config.policy_seed,
            checkpoint_root=str(Path(job.run_dir) / "checkpoints"),
            log_path=str(Path(job.run_dir) / SERVER_LOG_NAME),
            start_from=self._start_folder(config.start_from),
        )

    def _start_folder(self, start_from: str) -> str:
        return start_folder(start_from, self._store.job(parse_ref(start_from).job)) if start_from else ""

    async def _serve(self, server: Server, policy: Policy, job: Job) -> None:
        """Launch a server, or go on launching it, then watch it until it dies or is stopped."""
        started = time.monotonic()
        try:
            launched = await self._launcher.launch(self._server_spec(server, policy, job))
        except OpenTinkerError as error:
            self._fault(server.id, str(error), _kind_of(error))
            return
        except Exception as error:
            logger.exception("event=launch_failed job=%s server=%s", job.id, server.id)
            self._fault(server.id, f"the server did not start: {type(error).__name__}: {' '.join(str(error).split())}")
            return
        self.metrics.server_start.observe(time.monotonic() - started)
        now = self._store.server(server.id)
        assert now is not None
        self._store.save(
            replace(
                now,
                state=move_server(now.state, ServerState.READY),
                endpoint=launched.endpoint,
                worker_pid=launched.worker_pid,
                front_pid=launched.front_pid,
                gpu_indexes=self._launcher.gpus_of(server.id),
            )
        )
        self.wake()
        await self._watch(server.id)

    async def _watch(self, server_id: str) -> None:
        while True:
            probe = await self._launcher.probe(server_id)
            if probe.fault:
                self._fault(server_id, probe.fault)
                return
            self._idle[server_id] = probe.idle_s
            await asyncio.sleep(self._settings.probe_s)

    def _run(self, job: Job) -> None:
        running = replace(job, state=move_job(job.state, JobState.RUNNING), started_at=self._now())
        self._record(running, "running")

    async def _drive(self, job: Job) -> None:
        policy = self.policy_of(job.id)
        server = None if policy is None else self._store.server(policy.server_id)
        if policy is None or server is None:
            return  # it is being stopped
        spec = DriverSpec(
            job_id=job.id,
            server_id=server.id,
            node_id=server.node_id,
            kind=job.kind,
            config=job.config,
            endpoint=server.endpoint,
            policy_id=policy.id,
            token=self._token_of(policy.id),
            run_dir=job.run_dir,
            code_dir=str(Path(job.run_dir) / "code") if job.code_sha256 else None,
            resume=(job.id, RESTARTING) in self._store.event_counts([RESTARTING], [job.id]),
        )
        try:
            spec = replace(spec, secrets=self._secrets_of(job))
        except ConfigError as error:
            spec = replace(spec, refusal=str(error))  # a secret is gone; a driver that runs has its value already
        try:
            outcome = await self._launcher.drive(spec)
        except Exception as error:
            logger.exception("event=drive_failed job=%s", job.id)
            outcome = DriverOutcome(f"the driver did not start: {type(error).__name__}: {' '.join(str(error).split())}")
        if (outcome.lost or outcome.code in _ECHOES) and (probe := await self._launcher.probe(server.id)).fault:
            self._faults[server.id] = (probe.fault, FaultKind.LOST)
        self._outcomes[job.id] = outcome
        self.wake()

    async def _stop(self, server_id: str) -> None:
        server = self._store.server(server_id)
        assert server is not None
        if server.state is not ServerState.STOPPING:
            self._store.save(replace(server, state=move_server(server.state, ServerState.STOPPING)))
        job_ids = sorted(
            policy.job_id for s, policies in self._store.open_servers() if s.id == server_id for policy in policies
        )
        await self._cancel([f"server:{server_id}", *(f"{task}:{job_id}" for job_id in job_ids for task in ("driver", "save"))])
        await self._launcher.stop_driver(server_id)
        graceful = bool(server.endpoint) and server_id not in self._faults  # also where an earlier life began to stop it
        where = Allocation(server.node_id, Demand(server.gpus, server.cpu_slots), server.gpu_indexes)
        left = await self._launcher.stop_server(server_id, job_ids, where, graceful=graceful)
        if left:
            if left != self._left.get(server_id):
                detail = f"{left}; what the job held stays taken"
                self._store.save(*(Event(job_id, self._now(), "unhealthy", detail) for job_id in job_ids))
                logger.error("event=unhealthy server=%s node=%s detail=%r", server_id, server.node_id, left)
            self._left[server_id] = left
            return
        stopped = replace(server, state=ServerState.STOPPED)
        copies = self.copies.wanted([self._job(job_id) for job_id in job_ids]) if self._launcher.is_here(server.node_id) else []
        self._store.save(stopped, *(Event(job_id, self._now(), "released") for job_id in job_ids), *copies)
        self.copies.begin(copies)
        self._copy()  # before the job's next server can start
        for job_id in job_ids:
            self._outcomes.pop(job_id, None)
            self._announce(job_id, "released", server=server_id)
        self._faults.pop(server_id, None)
        self._idle.pop(server_id, None)
        self._left.pop(server_id, None)
        self.wake()

    def _copy(self) -> None:
        for job_id in self.copies.pending:
            self._spawn(f"copy:{job_id}", partial(self.copies.copy, job_id))

    def _fault(self, server_id: str, cause: str, kind: FaultKind = FaultKind.LOST) -> None:
        self._faults[server_id] = (cause, kind)
        self.metrics.server_failures.inc()
        self.wake()

    def _job(self, job_id: str) -> Job:
        job = self._store.job(job_id)
        assert job is not None
        return job

    def _record(self, job: Job, kind: str, detail: str = "") -> None:
        self._store.save(job, Event(job.id, self._now(), kind, storable(detail)))
        self._announce(job.id, kind, detail=detail)
        self.wake()

    def _announce(self, job_id: str, kind: str, **fields: str) -> None:
        logger.info(
            "event=%s job=%s %s", kind, job_id, " ".join(f"{name}={value!r}" for name, value in fields.items() if value)
        )
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` unless it runs already; an error is logged, and the plan leads to it again."""
        if name not in self._tasks:
            task = self._tasks[name] = asyncio.create_task(work(), name=name)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task.get_name(), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("event=task_failed task=%s", task.get_name(), exc_info=error)

    async def _cancel(self, names: list[str]) -> None:
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _kind_of(error: OpenTinkerError) -> FaultKind:
    """What an error of a launch means for the job."""
    if isinstance(error, NotPlacedError):
        return FaultKind.UNPLACED
    passing = isinstance(error, ServerLostError | DeadlineError | UnavailableError)
    # A bare one is what something foreign raised: a full disk, a busy device, a network.
    return FaultKind.LOST if passing or type(error) is OpenTinkerError else FaultKind.REFUSED


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


def storable(text: str) -> str:
    """A text from user code as every database can hold it: whole characters, no NUL, no more than a screenful."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")[:MAX_TEXT]
