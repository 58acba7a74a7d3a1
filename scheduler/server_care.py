"""Servers are brought up, watched, and cleared away when no job needs them any more."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from opentinker.checkpoints import parse_ref, policy_root
from opentinker.config.job import parse_job
from opentinker.config.servers import server_words
from opentinker.errors import DeadlineError, OpenTinkerError, ServerLostError, UnavailableError
from opentinker.scheduler.checkpoint_views import start_folder
from opentinker.scheduler.driver import SERVER_LOG_NAME
from opentinker.scheduler.hosting import known_job, process_mark, server_folder
from opentinker.scheduler.journal import Journal
from opentinker.scheduler.launcher import Launcher, NotPlacedError, ServerSpec
from opentinker.scheduler.layouts import bundles, held_by
from opentinker.scheduler.metrics import SchedulerMetrics
from opentinker.scheduler.model_registry import ModelRegistry
from opentinker.scheduler.named_tasks import NamedTasks
from opentinker.scheduler.placement import server_config
from opentinker.scheduler.plan import FaultKind, ServerView
from opentinker.scheduler.records import Job, Policy, Server
from opentinker.scheduler.run_copies import RunCopies
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.states import ServerState, move_server
from opentinker.scheduler.store import JobStore

logger = logging.getLogger(__name__)


class ServerCare:
    """Its methods run as tasks called `server:ID` and `stop:ID`, one of each per server."""

    def __init__(
        self,
        store: JobStore,
        launcher: Launcher,
        settings: Settings,
        token_of: Callable[[str], str],
        journal: Journal,
        tasks: NamedTasks,
        copies: RunCopies,
        metrics: SchedulerMetrics,
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._settings = settings
        self._token_of = token_of
        self._journal = journal
        self._tasks = tasks
        self._copies = copies
        self._metrics = metrics
        self._models = ModelRegistry(settings)
        self._faults: dict[str, tuple[str, FaultKind]] = {}
        self._idle: dict[str, float] = {}
        self._left: dict[str, str] = {}

    def views(self) -> list[ServerView]:
        """The servers that are not STOPPED, as a plan sees them."""
        return [
            ServerView(
                server.id,
                server.state,
                held_by(server, self._launcher.gpus_of(server.id)),
                tuple(policy.job_id for policy in policies),
                *self._faults.get(server.id, ("", FaultKind.LOST)),
                self._idle.get(server.id, 0.0),
            )
            for server, policies in self._store.open_servers()
        ]

    def failed(self, server_id: str) -> bool:
        """Whether it is known to be lost, or not to start."""
        return server_id in self._faults

    def unhealthy(self) -> dict[str, str]:
        """By server: why what it held cannot be given to anybody, although its job has ended."""
        return dict(self._left)

    async def launch(self, server: Server, policy: Policy, job: Job) -> None:
        """Launch a server, or go on launching it, then watch it until it dies or is stopped."""
        started = time.monotonic()
        try:
            launched = await self._launcher.launch(self._spec(server, policy, job))
        except OpenTinkerError as error:
            self._fault(server.id, str(error), _kind_of(error))
            return
        except Exception as error:
            logger.exception("event=launch_failed job=%s server=%s", job.id, server.id)
            self._fault(server.id, f"the server did not start: {type(error).__name__}: {' '.join(str(error).split())}")
            return
        self._metrics.server_start.observe(time.monotonic() - started)
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
                rollout_gpu_indexes=launched.engine_gpus,
            )
        )
        self._journal.wake()
        await self.watch(server.id)

    async def watch(self, server_id: str) -> None:
        """Look at a launched server until it dies or is stopped."""
        while True:
            probe = await self._launcher.probe(server_id)
            if probe.fault:
                self._fault(server_id, probe.fault)
                return
            self._idle[server_id] = probe.idle_s
            await asyncio.sleep(self._settings.probe_s)

    async def check(self, server_id: str) -> None:
        """Look at a launched server now: what was seen of something else may be an echo of its death."""
        fault = (await self._launcher.probe(server_id)).fault
        if fault:
            self._faults[server_id] = (self._named(server_id, fault), FaultKind.LOST)

    async def stop(self, server_id: str) -> Sequence[str]:
        """Stop a server and what its jobs have on it; once everything is free that it and their other servers held, those jobs,
        and none before."""
        server = self._store.server(server_id)
        assert server is not None
        if server.state is not ServerState.STOPPING:
            self._store.save(replace(server, state=move_server(server.state, ServerState.STOPPING)))
        job_ids = sorted(
            policy.job_id for s, policies in self._store.open_servers() if s.id == server_id for policy in policies
        )
        of_jobs = [f"{task}:{job_id}" for job_id in job_ids for task in ("driver", "save")]
        await self._tasks.cancel([f"server:{server_id}", *of_jobs])
        await self._launcher.stop_driver(server_id)
        graceful = bool(server.endpoint) and server_id not in self._faults  # also where an earlier life began to stop it
        marks = [process_mark(job_id, server.name) for job_id in job_ids]
        left = await self._launcher.stop_server(server_id, marks, held_by(server), graceful=graceful)
        if left:
            self._tell_left(server, job_ids, left)
            return ()
        # From here to the save nothing else runs: of several servers of a job, exactly one is the last.
        job_ids = self._without_others(server_id, job_ids)
        own = self._store.server(server.id.removesuffix(f"-{server.name}")) if server.name else server
        here = own is not None and self._launcher.is_here(own.node_id)
        copies = self._copies.wanted([known_job(self._store, job_id) for job_id in job_ids]) if here else []
        released = [self._journal.event(job_id, "released") for job_id in job_ids]
        self._store.save(replace(server, state=ServerState.STOPPED), *released, *copies)
        self._copies.begin(copies)
        for job_id in job_ids:
            self._journal.announce(job_id, "released", server=server_id)
        self._faults.pop(server_id, None)
        self._idle.pop(server_id, None)
        self._left.pop(server_id, None)
        return job_ids

    def _without_others(self, server_id: str, job_ids: Sequence[str]) -> list[str]:
        """Those of the jobs that have no other server left."""
        elsewhere = {p.job_id for server, policies in self._store.open_servers() if server.id != server_id for p in policies}
        return [job_id for job_id in job_ids if job_id not in elsewhere]

    def _tell_left(self, server: Server, job_ids: Sequence[str], left: str) -> None:
        if left != self._left.get(server.id):
            detail = f"{left}; what the job held stays taken"
            self._store.save(*(self._journal.event(job_id, "unhealthy", detail) for job_id in job_ids))
            logger.error("event=unhealthy server=%s node=%s detail=%r", server.id, server.node_id, left)
        self._left[server.id] = left

    def _spec(self, server: Server, policy: Policy, job: Job) -> ServerSpec:
        whole = parse_job(job.config)
        config, run_dir = whole.parts[server.name], Path(job.run_dir)
        demand, *_ = bundles(server)
        *_, engines = held_by(server)
        return ServerSpec(
            server_id=server.id,
            job_id=job.id,
            policy_id=policy.id,
            token=self._token_of(policy.id),
            node_id=server.node_id,
            demand=demand,
            config=server_config(config.server(), engines.demand).model_dump(mode="json")
            | {"base_model": self._models.location(config.base_model)},
            lora=None if config.lora is None else config.lora.model_dump(mode="json"),
            seed=config.policy_seed,
            checkpoint_root=str(policy_root(run_dir / "checkpoints", whole.first_policy(server.name) if server.name else None)),
            log_path=str(server_folder(run_dir, server.name) / SERVER_LOG_NAME),
            start_from=self._start_folder(config.start_from),
            starts={address: self._start_folder(address) for key, address in whole.starts.items() if key != ("start_from",)},
            taken=tuple(whole.first_policy(name) for name in whole.further_servers),
            head=config.policy_head,
            critic=None if config.policy_critic is None else config.policy_critic.model_dump(mode="json"),
            mark=process_mark(job.id, server.name) if server.name else "",
            rollout=engines if server.rollout_node_id else None,
        )

    def _start_folder(self, start_from: str) -> str:
        return start_folder(start_from, self._store.job(parse_ref(start_from).job)) if start_from else ""

    def _named(self, server_id: str, cause: str) -> str:
        """Of several servers of a job, which one it is, and whose."""
        for server, policies in self._store.open_servers():
            if server.id == server_id and policies:
                words = server_words(known_job(self._store, policies[0].job_id).config, server.name)
                return f"{words}: {cause}" if words else cause
        return cause

    def _fault(self, server_id: str, cause: str, kind: FaultKind = FaultKind.LOST) -> None:
        self._faults[server_id] = (self._named(server_id, cause), kind)
        self._metrics.server_failures.inc()
        self._journal.wake()


def _kind_of(error: OpenTinkerError) -> FaultKind:
    """What an error of a launch means for the job."""
    if isinstance(error, NotPlacedError):
        return FaultKind.UNPLACED
    passing = isinstance(error, ServerLostError | DeadlineError | UnavailableError)
    # A bare one is what something foreign raised: a full disk, a busy device, a network.
    return FaultKind.LOST if passing or type(error) is OpenTinkerError else FaultKind.REFUSED
