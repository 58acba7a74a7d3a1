"""The loop that makes the cluster match the store: snapshot, plan, obey. Level-triggered: what failed is tried again."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from opentinker.config.job import KINDS
from opentinker.errors import ConfigError, OpenTinkerError
from opentinker.scheduler.autoscale import Growth, wanted
from opentinker.scheduler.driver_care import DriverCare
from opentinker.scheduler.hosting import known_job
from opentinker.scheduler.job_clocks import JobClocks
from opentinker.scheduler.job_moves import JobMoves
from opentinker.scheduler.journal import Journal
from opentinker.scheduler.last_checkpoints import LastCheckpoints
from opentinker.scheduler.launcher import Launcher
from opentinker.scheduler.metrics import SchedulerMetrics
from opentinker.scheduler.named_tasks import NamedTasks
from opentinker.scheduler.plan import LEASE_EXPIRED, Decision, End, Restart, Run, Snapshot, Start, Stop, Wait, plan
from opentinker.scheduler.queue_view import QueueView
from opentinker.scheduler.records import Event, Job
from opentinker.scheduler.run_copies import RunCopies
from opentinker.scheduler.server_care import ServerCare
from opentinker.scheduler.settings import Quota, Settings
from opentinker.scheduler.states import JobState, ServerState
from opentinker.scheduler.store import JobStore
from opentinker.scheduler.warming import Warmth, next_jobs

logger = logging.getLogger(__name__)
RESTARTED = "scheduler_restarted"
LOOK_S = 30.0
"""Ray's word on its nodes has to come within this."""
_HOLDING = frozenset({JobState.STARTING, JobState.RUNNING})
"""Jobs in these states have a server, or make one."""


class Reconciler:
    """Everything that is under way is a task of its own, given by the loop to whatever needs one, and all on one event loop."""

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
        self._now = now
        self.metrics = SchedulerMetrics()
        self.node_types = settings.node_types if settings.autoscale else ()
        """Of nodes that can be added."""
        self.clocks = JobClocks(settings, now, steady)
        self.journal = Journal(store, now)
        self.copies = RunCopies(store, settings, now)
        self._queue = QueueView(store, settings, now())
        self._warmth = Warmth(launcher, steady)
        self._growth = Growth(lambda bundles: self._launcher.request_nodes(bundles))
        self._tasks = NamedTasks()
        self.moves = JobMoves(store, self.journal, self._queue, self.clocks, self._warmth, self.metrics, now)
        self._last_checkpoints = LastCheckpoints(store, launcher, self.journal, self.moves, self._tasks)
        self.servers = ServerCare(store, launcher, settings, token_of, self.journal, self._tasks, self.copies, self.metrics)
        self._drivers = DriverCare(store, launcher, self.servers, self.journal, token_of, secrets_of)
        self._waits: dict[str, str] = {}

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
            self.journal.awake()
            try:
                with self.metrics.placement_pass.time():
                    await self.tick()
            except Exception:
                # A passing fault of the cluster must not end the control plane; the next look tries again.
                logger.exception("event=reconcile_failed")
            await self.journal.wait_work(self._settings.reconcile_s)

    async def tick(self) -> None:
        """One look at the cluster, and what follows from it. What fails for one job does not keep the others waiting."""
        snapshot = await self._look()
        self._waits.clear()
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
        self._prepare(snapshot, decisions)
        self.clocks.looked()

    async def close(self) -> None:
        """Cancel the tasks; processes are left as they are."""
        await self._tasks.close()
        self.copies.close()

    def waiting_for(self, job: Job) -> str:
        """What a job that is not yet RUNNING waits for, in words; empty for others."""
        if job.state is JobState.QUEUED:
            return self._waits.get(job.id, "its turn")
        return "its server starts" if job.state is JobState.STARTING else ""

    def quota_of(self, owner: str) -> Quota:
        """What the owner's jobs may hold at once."""
        return self._queue.policy.quota_of(owner)

    async def _look(self) -> Snapshot:
        async with asyncio.timeout(LOOK_S):
            nodes = await self._launcher.nodes()
        self.clocks.forgive_outage()
        jobs = [self.clocks.timed(job) for job in self._queue.jobs()]
        servers = self.servers.views()
        now = self._now()
        return Snapshot(
            now,
            nodes,
            jobs,
            servers,
            self._drivers.outcomes,
            self._settings.lease_s,
            self._settings.last_checkpoint_s,
            self._queue.policy,
            self._queue.usage(now),
        )

    def _obey(self, decision: Decision) -> None:
        match decision:
            case Start(job_id, where):
                self.moves.start(known_job(self._store, job_id), where)
            case Wait(job_id, waiting_for):
                self._waits[job_id] = waiting_for
            case Run(job_id):
                self.moves.run(known_job(self._store, job_id))
            case End(job_id, state, cause, save):
                end = self._last_checkpoints.end if save else self.moves.end
                end(known_job(self._store, job_id), state, cause)
                if cause.startswith(LEASE_EXPIRED):
                    self.metrics.lease_expiries.inc()
            case Restart(job_id, cause, counted):
                self.moves.restart(known_job(self._store, job_id), cause, counted=counted)
            case Stop(server_id):
                self._tasks.spawn(f"stop:{server_id}", partial(self._stop, server_id))

    def _give_up(self, decision: Decision, error: OpenTinkerError) -> None:
        """A job that cannot even be started, such as one whose stored config this version refuses, fails with that."""
        job = known_job(self._store, decision.job_id) if isinstance(decision, Start) else None
        if job is not None and isinstance(error, ConfigError) and not job.state.ended:
            self.moves.end(job, JobState.FAILED, str(error))

    def _attend(self) -> None:
        """Give every server, every driver and every copy that a job needs the task that sees to it; a restart leaves none."""
        self._copy()
        for server, policies in self._store.open_servers():
            jobs = [known_job(self._store, policy.job_id) for policy in policies]
            jobs = [job for job in jobs if job.state in _HOLDING]
            if not jobs or self.servers.failed(server.id) or f"stop:{server.id}" in self._tasks:
                continue
            if server.state is ServerState.STARTING:
                self._tasks.spawn(f"server:{server.id}", partial(self.servers.launch, server, policies[0], jobs[0]))
            elif server.state is ServerState.READY:
                self._tasks.spawn(f"server:{server.id}", partial(self.servers.watch, server.id))
            for job in [] if server.name else jobs:  # the driver is the job's own server's
                if job.state is JobState.RUNNING and KINDS[job.kind].driven and job.id not in self._drivers.outcomes:
                    self._tasks.spawn(f"driver:{job.id}", partial(self._drivers.drive, job))

    def _prepare(self, snapshot: Snapshot, decisions: Sequence[Decision]) -> None:
        """See to what makes later starts possible, or faster."""
        if self._settings.autoscale:
            self._growth.want(wanted(snapshot, decisions))
            self._tasks.spawn("autoscale", self._growth.ask)
        self._warmth.want(next_jobs(snapshot, decisions, self._settings.prestart_jobs))
        if self._warmth.due:
            self._tasks.spawn("warmth", self._warmth.work)

    async def _stop(self, server_id: str) -> None:
        released = await self.servers.stop(server_id)
        for job_id in released:
            self._drivers.forget(job_id)
        if released:
            self._copy()  # before the job's next server can start
            self.journal.wake()

    def _copy(self) -> None:
        for job_id in self.copies.pending:
            self._tasks.spawn(f"copy:{job_id}", partial(self.copies.copy, job_id))
