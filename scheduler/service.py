"""What users can ask of the scheduler. Every question about a job checks that it is theirs."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from opentinker.config.job import InteractiveJobConfig, parse_job
from opentinker.errors import ConfigError, ConflictError, NotFoundError
from opentinker.scheduler.auth import key_digest, new_api_key, owner_of, policy_token
from opentinker.scheduler.driver import LOG_NAME
from opentinker.scheduler.imports import load
from opentinker.scheduler.launcher import Launcher
from opentinker.scheduler.placement import Allocation, Demand, Node, demand_of, free_on
from opentinker.scheduler.quotas import check_quota
from opentinker.scheduler.reconciler import Reconciler
from opentinker.scheduler.records import ApiKey, Event, Job, Policy, Server
from opentinker.scheduler.run_files import parse_rows, read_lines
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.state_dir import StateDir, write_secret
from opentinker.scheduler.states import JobState
from opentinker.scheduler.store import JobStore
from opentinker.scheduler.uploads import decode_zip, unpack

OWNER = "admin"
MAX_WAIT_S = 60.0
RELEASE_WAIT_S = 15.0
"""How long `cancel` and `complete` wait for the job's processes to be gone before they answer."""
SHUTDOWN_S = 30.0


class SchedulerService:
    """All methods run on one event loop; between two awaits, what was read from the store holds."""

    def __init__(
        self, settings: Settings, store: JobStore, launcher: Launcher, secret: str, now: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._store = store
        self._launcher = launcher
        self._secret = secret
        self._now = now
        self._submitting = asyncio.Lock()
        self._closing = False
        self._reconciler = Reconciler(store, launcher, settings, lambda policy_id: policy_token(secret, policy_id), now)

    def create_key(self) -> None:
        """Make sure that the key in the state folder's file is valid, whichever of file and store is new."""
        key = write_secret(StateDir(self._settings.state_dir).api_key, new_api_key)
        self._store.save(ApiKey("embedded", OWNER, key_digest(self._secret, key)))

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

    async def authenticate(self, key: str) -> str:
        """The key's owner.

        Raises:
            AuthenticationError: not a valid key.
        """
        return owner_of(self._secret, key, self._store.api_keys())

    async def submit(
        self, owner: str, config: dict[str, Any], idempotency_key: str | None = None, code: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Accept a job; `code` is {"zip": base64, "sha256": hex}. A repeat with the same key gets the first one's job.

        Raises:
            ConfigError: the config is wrong, or the job could never run here.
            UnknownModelError: the cluster does not know the base model.
            InvalidRequestError: the code is damaged, too large or unsafe.
            ConflictError: the key was used for another config, or the cluster is being stopped.
        """
        # One at a time, so that a retry that overtakes its first attempt still finds it.
        async with self._submitting:
            parsed = parse_job(config)
            resolved = parsed.model_dump(mode="json")
            if idempotency_key is not None:
                earlier = self._store.job_by_key(owner, idempotency_key)
                if earlier is not None:
                    if earlier.config != resolved:
                        raise ConflictError("this idempotency key was used for another job", hint="use a new key for each job")
                    return self._view(earlier)
            await asyncio.to_thread(load(self._settings.check_model), parsed.base_model)
            demand = demand_of(parsed.resources, await self._launcher.nodes())
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
                name=parsed.name or job_id,
                kind=parsed.kind,
                state=JobState.QUEUED,
                config=resolved,
                run_dir=str(run_dir),
                gpus=demand.gpus,
                cpu_slots=demand.cpu_slots,
                created_at=now,
                lease_expires_at=now + self._settings.lease_s if isinstance(parsed, InteractiveJobConfig) else None,
                idempotency_key=idempotency_key,
                code_sha256=code["sha256"] if code else None,
            )
            self._store.save(job, Event(job_id, now, "submitted"))
        self._reconciler.wake()
        return self._view(job)

    async def jobs(self, owner: str) -> list[dict[str, Any]]:
        """Newest first, without tokens."""
        hosts = self._hosts()
        return [self._view(job, hosts, with_token=False) for job in self._store.jobs(owner)]

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
            job = replace(job, lease_expires_at=self._now() + self._settings.lease_s)
            self._store.save(job)
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

    async def cancel(self, owner: str, job_id: str) -> dict[str, Any]:
        """End a job in any state; one that has ended stays as it is."""
        job = self._owned(owner, job_id)
        return await self._end(owner, job, job.state if job.state.ended else JobState.CANCELLED, "cancelled by its owner")

    async def logs(self, owner: str, job_id: str, offset: int = 0) -> dict[str, Any]:
        """{"text", "offset", "finished"}: the driver's log from a byte offset on."""
        job = self._owned(owner, job_id)
        data, offset, at_end = await asyncio.to_thread(
            read_lines, Path(job.run_dir) / LOG_NAME, offset, complete=self._quiet(job)
        )
        return {"text": data.decode(errors="replace"), "offset": offset, "finished": at_end and self._quiet(job)}

    async def metrics(self, owner: str, job_id: str, after: int = 0) -> dict[str, Any]:
        """{"rows", "next", "finished"}: rows of metrics.jsonl from a byte offset on."""
        job = self._owned(owner, job_id)
        data, offset, at_end = await asyncio.to_thread(
            read_lines, Path(job.run_dir) / "metrics.jsonl", after, complete=self._quiet(job)
        )
        return {"rows": parse_rows(data), "next": offset, "finished": at_end and self._quiet(job)}

    async def cluster(self) -> dict[str, Any]:
        """{"nodes": [{"id", "name", "gpus", "free_gpus", "cpu_slots", "free_cpu_slots"}], "queued", "running"}."""
        nodes = await self._launcher.nodes()
        held = [Allocation(s.node_id, Demand(s.gpus, s.cpu_slots)) for s, _ in self._store.open_servers()]
        free = free_on(nodes, held)
        live = self._store.live_jobs()
        queued = sum(job.state is JobState.QUEUED for job in live)
        return {"nodes": [_node_view(node, free[node.id]) for node in nodes], "queued": queued, "running": len(live) - queued}

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

    def _owned(self, owner: str, job_id: str) -> Job:
        job = self._store.job(job_id)
        if job is None or job.owner != owner:
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
            if with_token and not job.state.ended:
                server["token"] = policy_token(self._secret, host[1].id)
        return {
            "id": job.id,
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


def _node_view(node: Node, free: Demand) -> dict[str, Any]:
    return {
        "id": node.id,
        "name": node.name,
        "gpus": node.gpus,
        "free_gpus": free.gpus,
        "cpu_slots": node.cpu_slots,
        "free_cpu_slots": free.cpu_slots,
    }


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
        except Exception:
            run_dir.rmdir()
            raise
