"""What users can ask of the scheduler. Every question about a job checks that it is theirs."""

import asyncio
import hmac
import json
import math
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from opentinker.config.job import InteractiveJobConfig, JobConfig, parse_job
from opentinker.errors import (
    ConfigError,
    ConflictError,
    InvalidRequestError,
    JobFailedError,
    NotFoundError,
    ServerLostError,
    TooLargeError,
    UnavailableError,
)
from opentinker.scheduler.auth import new_api_key, policy_token, unauthenticated
from opentinker.scheduler.cluster_view import QUEUE_SHOWN, cluster_view
from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.imports import load
from opentinker.scheduler.launcher import Launcher
from opentinker.scheduler.listing import FIRST_PAGE, JobQuery
from opentinker.scheduler.placement import Allocation, Demand, Node, demand_of, free_on
from opentinker.scheduler.quotas import check_quota
from opentinker.scheduler.reconciler import Reconciler
from opentinker.scheduler.records import Event, Job, Policy, Server
from opentinker.scheduler.run_files import LogSource, log_path, parse_rows, read_lines
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.state_dir import StateDir, write_secret
from opentinker.scheduler.states import JobState
from opentinker.scheduler.store import JobStore
from opentinker.scheduler.uploads import decode_zip, unpack
from opentinker.scheduler.users import EVERYONE, Caller, UserDirectory

MAX_CONFIG_BYTES = 256 * 2**10
MAX_WAIT_S = 60.0
RELEASE_WAIT_S = 15.0
"""How long `cancel` and `complete` wait for the job's processes to be gone before they answer."""
SHUTDOWN_S = 30.0
GPU_USE_FRESH_S = 1.0
NAME_LENGTH = 200
"""What the store has room for."""


class SchedulerService:
    """All methods run on one event loop; between two awaits, what was read from the store holds."""

    def __init__(
        self,
        settings: Settings,
        store: JobStore,
        launcher: Launcher,
        secret: str,
        now: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is Unix time, for records; `steady` is a clock that nobody sets, for leases and limits."""
        self._settings = settings
        self._store = store
        self._launcher = launcher
        self._secret = secret
        self._now = now
        self._submitting = asyncio.Lock()
        self._closing = False
        self._reconciler = Reconciler(store, launcher, settings, lambda policy_id: policy_token(secret, policy_id), now, steady)
        self.users = UserDirectory(store, secret, now, steady)
        self._reading_gpus = asyncio.Lock()
        self._gpu_use_read: dict[str, list[GpuUse]] = {}
        self._gpu_use_until = -math.inf

    def create_key(self) -> None:
        """Make sure that the key in the state folder's file is valid, whichever of file and store is new."""
        self.users.ensure_admin(write_secret(StateDir(self._settings.state_dir).api_key, new_api_key))

    def recover(self) -> None:
        """Take over the store of an earlier life, before `run`."""
        self._reconciler.recover()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        try:
            await self._reconciler.run()
        finally:
            await self._reconciler.close()
            self._store.close()

    async def authenticate(self, key: str, address: str = "") -> Caller:
        """Who presents this key; see `UserDirectory.authenticate`."""
        return self.users.authenticate(key, address)

    async def submit(
        self, owner: str, config: dict[str, Any], idempotency_key: str | None = None, code: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Accept a job; `code` is {"zip": base64, "sha256": hex}. A repeat with the same key gets the first one's job.

        Raises:
            ConfigError: the config is wrong, or the job could never run here.
            TooLargeError: the config is larger than `MAX_CONFIG_BYTES`.
            StorageError: the store's disk is full; nothing was accepted.
            UnknownModelError: the cluster does not know the base model.
            InvalidRequestError: the code is damaged, too large or unsafe.
            ConflictError: the key was used for another config, or the cluster is being stopped.
        """
        # One at a time, so that a retry that overtakes its first attempt still finds it.
        async with self._submitting:
            _check_size(config)
            parsed = parse_job(config)
            resolved = parsed.model_dump(mode="json")
            if idempotency_key is not None:
                earlier = self._store.job_by_key(owner, idempotency_key)
                if earlier is not None:
                    return self._view(_same(earlier, resolved, code))
            await asyncio.to_thread(load(self._settings.check_model), parsed.base_model)
            demand = demand_of(parsed.resources, await self._launcher.nodes(), self._reconciler.node_types)
            check_quota(self._reconciler.quota_of(owner), demand, parsed.scheduling.priority)
            job_id = f"job-{secrets.token_hex(5)}"
            run_dir = self._settings.runs_dir / job_id
            await asyncio.to_thread(_prepare, run_dir, code)
            if self._closing:
                raise ConflictError("the cluster is being stopped")
            now = self._now()
            job = Job(
                id=job_id,
                owner=owner,
                name=(parsed.name or _default_name(parsed))[:NAME_LENGTH],
                kind=parsed.kind,
                state=JobState.QUEUED,
                config=resolved,
                run_dir=str(run_dir),
                gpus=demand.gpus,
                cpu_slots=demand.cpu_slots,
                created_at=now,
                lease_expires_at=now + self._settings.lease_s if isinstance(parsed, InteractiveJobConfig) else None,
                idempotency_key=idempotency_key,
                code_sha256=code["sha256"].lower() if code else None,
            )
            try:
                accepted = self._store.accept(job, Event(job_id, now, "submitted"))
            except Exception:
                await asyncio.to_thread(shutil.rmtree, run_dir, ignore_errors=True)
                raise
            if accepted.id != job_id:  # another scheduler's answer to the same request
                await asyncio.to_thread(shutil.rmtree, run_dir, ignore_errors=True)
                return self._view(_same(accepted, resolved, code))
            self._reconciler.renew_lease(job_id)
        self._reconciler.wake()
        return self._view(job)

    async def jobs(self, owner: str, query: JobQuery = FIRST_PAGE) -> dict[str, Any]:
        """{"jobs", "next"}: a page, newest first, without tokens; `next` is the cursor of the page after it, or None.

        Raises:
            InvalidRequestError: the cursor is not of these jobs.
        """
        whose = None if owner == EVERYONE else owner
        if query.cursor is not None:
            at = self._store.job(query.cursor)
            if at is None or whose not in (None, at.owner):
                raise InvalidRequestError("the cursor is not one of this list's", hint="take it from an earlier page's `next`")
        jobs = self._store.jobs(whose, query)
        hosts = self._hosts()
        page = [self._view(job, hosts, with_token=False) for job in jobs[: query.limit]]
        return {"jobs": page, "next": page[-1]["id"] if len(jobs) > query.limit else None}

    async def job(self, owner: str, job_id: str, state: str | None = None, wait_s: float = 0.0) -> dict[str, Any]:
        """The job; with `state`, as soon as its state differs from it, at the latest after `wait_s` (at most 60).

        Raises:
            NotFoundError: no such job of this owner.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + min(wait_s, MAX_WAIT_S)
        while (job := self._owned(owner, job_id)).state == state and (left := deadline - clock()) > 0:
            await self._reconciler.wait_change(left)
        return self._view(job)

    async def events(self, owner: str, job_id: str) -> list[dict[str, Any]]:
        self._owned(owner, job_id)
        return [{"at": event.at, "kind": event.kind, "detail": event.detail} for event in self._store.events(job_id)]

    async def heartbeat(self, owner: str, job_id: str) -> dict[str, Any]:
        """Renew an interactive job's lease; for an ended job it only tells its state."""
        job = self._owned(owner, job_id)
        if job.lease_expires_at is None:
            raise ConflictError(f"job {job_id} holds no lease: it runs on the cluster by itself")
        if not job.state.ended:
            self._reconciler.renew_lease(job_id)
        return self._view(job)

    async def complete(self, owner: str, job_id: str) -> dict[str, Any]:
        """End an interactive job well.

        Raises:
            ConflictError: it is not RUNNING, or it is not interactive.
        """
        job = self._owned(owner, job_id)
        if job.lease_expires_at is None:
            raise ConflictError(f"job {job_id} completes by itself", hint="cancel it to end it early")
        return await self._end(owner, job, JobState.COMPLETED)

    async def cancel(self, owner: str, job_id: str, by: Caller | None = None) -> dict[str, Any]:
        """End a job in any state; one that has ended stays as it is. `by` is who does it, if not the owner."""
        job = self._owned(owner, job_id)
        cause = "cancelled by its owner"
        if by is not None and by.name != job.owner:
            cause = f"cancelled by {by.name}"
            self.users.note(by, "job.cancel", f"{job.owner}/{job_id}")
        return await self._end(owner, job, job.state if job.state.ended else JobState.CANCELLED, cause)

    async def logs(self, owner: str, job_id: str, offset: int = 0, source: LogSource | None = None) -> dict[str, Any]:
        """{"text", "offset", "finished"}: a log of the job from a byte offset on; by default what `log_path` finds."""
        job = self._owned(owner, job_id)
        path = log_path(Path(job.run_dir), source, has_driver=job.kind != "interactive", ended=job.state.ended)
        data, offset, at_end = await asyncio.to_thread(read_lines, path, offset, complete=self._quiet(job))
        return {"text": data.decode(errors="replace"), "offset": offset, "finished": at_end and self._quiet(job)}

    async def metrics(self, owner: str, job_id: str, after: int = 0) -> dict[str, Any]:
        """{"rows", "next", "finished"}: rows of metrics.jsonl from a byte offset on."""
        job = self._owned(owner, job_id)
        data, offset, at_end = await asyncio.to_thread(
            read_lines, Path(job.run_dir) / "metrics.jsonl", after, complete=self._quiet(job)
        )
        return {"rows": parse_rows(data), "next": offset, "finished": at_end and self._quiet(job)}

    async def cluster(self, owner: str) -> dict[str, Any]:
        """See `cluster_view`. Of others' jobs only administrators see more than the owner and the amounts."""
        nodes = await self._launcher.nodes()
        use = await self._gpu_use(nodes)
        servers = self._store.open_servers()
        queue = self._store.jobs(None, JobQuery(state=[JobState.QUEUED], limit=QUEUE_SHOWN), oldest_first=True)
        held = [(server, [job for p in policies if (job := self._store.job(p.job_id))]) for server, policies in servers]
        all_seen = owner == EVERYONE
        return cluster_view(
            nodes,
            held,
            queue[:QUEUE_SHOWN],
            self._store.counts(),
            use,
            self._reconciler.waiting_for,
            lambda job: all_seen or job.owner == owner,
        )

    async def exposition(self) -> str:
        """The scheduler's figures for Prometheus."""
        nodes = await self._launcher.nodes()
        use = await self._gpu_use(nodes)
        held = [Allocation(s.node_id, Demand(s.gpus, s.cpu_slots)) for s, _ in self._store.open_servers()]
        return self._reconciler.metrics.exposition(self._store.counts(), nodes, free_on(nodes, held), use)

    async def server_of(self, job_id: str, owner: str | None, token: str | None) -> dict[str, str]:
        """{"endpoint", "token"} of a job's server, for the proxy. The caller shows that the job is theirs by being its owner or
        by its policy's token.

        Raises:
            AuthenticationError: a token, and not this job's.
            NotFoundError: no such job of this owner.
            UnavailableError: the server is not up yet.
            ServerLostError, JobFailedError: the job has ended.
        """
        job = self._store.job(job_id)
        policy = next(iter(self._store.policies(job_id)), None)
        if owner is None:
            right = "" if policy is None else policy_token(self._secret, policy.id)
            if not token or not hmac.compare_digest(token.encode("utf-8", "replace"), right.encode()):
                raise unauthenticated()
        elif job is None or job.owner != owner:
            raise NotFoundError(f"no job {job_id!r}", hint="`opentinker ps` lists your jobs")
        assert job is not None
        if job.state.ended:
            kind = ServerLostError if job.state is JobState.FAILED else JobFailedError
            raise kind(f"job {job_id} is {job.state}{': ' if job.cause else ''}{job.cause}", hint="its server is gone")
        server = None if policy is None else self._store.server(policy.server_id)
        if policy is None or server is None or not server.endpoint:
            why = self._reconciler.waiting_for(job)
            raise UnavailableError(
                f"job {job_id} is {job.state}: it has no server yet", hint=f"it waits for {why}" if why else ""
            )
        return {"endpoint": server.endpoint, "token": policy_token(self._secret, policy.id)}

    async def shutdown(self) -> bool:
        """Cancel all jobs and wait for their processes to be gone; whether they are."""
        self._closing = True
        for job in self._store.live_jobs():
            self._reconciler.end(job, JobState.CANCELLED, "the cluster was stopped")
        clock = asyncio.get_running_loop().time
        deadline = clock() + SHUTDOWN_S
        while self._store.open_servers() and (left := deadline - clock()) > 0:
            await self._reconciler.wait_change(left)
        return not self._store.open_servers()

    async def _end(self, owner: str, job: Job, state: JobState, cause: str = "") -> dict[str, Any]:
        if job.state is not state:
            job = self._reconciler.end(job, state, cause)
        clock = asyncio.get_running_loop().time
        deadline = clock() + RELEASE_WAIT_S
        while not self._reconciler.released(job.id) and (left := deadline - clock()) > 0:
            await self._reconciler.wait_change(left)
        return self._view(self._owned(owner, job.id))

    async def _gpu_use(self, nodes: Sequence[Node]) -> dict[str, list[GpuUse]]:
        """Read at most once a second, however many ask."""
        if not any(node.gpus for node in nodes):
            return {}
        async with self._reading_gpus:
            if time.monotonic() >= self._gpu_use_until:
                # To Ray a node that is asked is a node at work: the autoscaler would never see an idle one.
                used = {s.node_id for s, _ in self._store.open_servers()} if self._settings.autoscale else None
                self._gpu_use_read = await self._launcher.gpu_use(used)
                self._gpu_use_until = time.monotonic() + GPU_USE_FRESH_S
            return self._gpu_use_read

    def _owned(self, owner: str, job_id: str) -> Job:
        job = self._store.job(job_id)
        if job is None or owner not in (job.owner, EVERYONE):
            raise NotFoundError(f"no job {job_id!r}", hint="`opentinker ps` lists your jobs")
        return job

    def _quiet(self, job: Job) -> bool:
        """Nobody writes to the job's files any more."""
        return job.state.ended and self._reconciler.released(job.id)

    def _hosts(self) -> dict[str, tuple[Server, Policy]]:
        """What serves each job now."""
        return {policy.job_id: (server, policy) for server, policies in self._store.open_servers() for policy in policies}

    def _view(
        self, job: Job, hosts: Mapping[str, tuple[Server, Policy]] | None = None, *, with_token: bool = True
    ) -> dict[str, Any]:
        """The job as the API shows it. `server` is there from the time it answers until its processes are gone."""
        host = (self._hosts() if hosts is None else hosts).get(job.id)
        server = None
        if host is not None and host[0].endpoint:
            server = _server_view(*host)
            server["proxy"] = f"/v1/jobs/{job.id}/server"
            if with_token and not job.state.ended:
                server["token"] = policy_token(self._secret, host[1].id)
        return {
            "id": job.id,
            "owner": job.owner,
            "name": job.name,
            "kind": job.kind,
            "state": job.state,
            "config": job.config,
            "cause": job.cause,
            "created_at": job.created_at,
            "started_at": job.started_at,
            "ended_at": job.ended_at,
            "waiting_for": self._reconciler.waiting_for(job),
            "lease_s": None if job.lease_expires_at is None else self._settings.lease_s,
            "run_dir": job.run_dir,
            "server": server,
        }


def _check_size(config: dict[str, Any]) -> None:
    try:
        size = len(json.dumps(config, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the config holds a text that is not Unicode") from error
    if size > MAX_CONFIG_BYTES:
        raise TooLargeError(
            f"the config has {size >> 10} KiB, more than {MAX_CONFIG_BYTES >> 10} KiB",
            hint="data belongs into the environment's folder or a dataset, not into the config",
        )


def _server_view(server: Server, policy: Policy) -> dict[str, Any]:
    return {
        "id": server.id,
        "state": server.state,
        "endpoint": server.endpoint,
        "policy": policy.id,
        "pid": server.worker_pid,
        "front_pid": server.front_pid,
        "base_model": server.base_model,
        "gpus": server.gpus,
        "cpu_slots": server.cpu_slots,
    }


def _default_name(config: JobConfig) -> str:
    """What a job is called whose user gave it no name: by what it trains on, or else by its model."""
    if isinstance(config, InteractiveJobConfig):
        return PurePath(config.base_model).name or config.base_model
    return config.environment.name.rpartition(":")[2]


def _same(earlier: Job, config: dict[str, Any], code: dict[str, str] | None) -> Job:
    """Raises: ConflictError when a repeated idempotency key comes with another job."""
    if (earlier.config, earlier.code_sha256) != (config, code["sha256"].lower() if code else None):
        raise ConflictError("this idempotency key was used for another job", hint="use a new key for each job")
    return earlier


def _prepare(run_dir: Path, code: dict[str, str] | None) -> None:
    """Make the job's folder, with its code in it. Nothing is left of it when the code is refused."""
    content = decode_zip(code["zip"], code["sha256"]) if code else None
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot create the run's folder {run_dir}: {error.strerror}") from error
    if content is not None:
        try:
            unpack(content, run_dir / "code")
        except BaseException:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
