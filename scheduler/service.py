"""What users can ask of the scheduler. Every question about a job checks that it is theirs."""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from opentinker.config.job import KINDS, parse_job
from opentinker.errors import (
    ConflictError,
    InvalidRequestError,
    JobFailedError,
    NotFoundError,
    OpenTinkerError,
    ServerLostError,
    UnavailableError,
)
from opentinker.policy_tokens import parent_of
from opentinker.scheduler.auth import new_api_key, policy_token, without_details
from opentinker.scheduler.checkpoint_care import CheckpointCare
from opentinker.scheduler.checkpoint_views import checkpoint_views, no_job
from opentinker.scheduler.cluster_view import QUEUE_SHOWN, cluster_view
from opentinker.scheduler.driver import LOG_NAME
from opentinker.scheduler.gpu_use import GpuUseReader
from opentinker.scheduler.hosting import check_further, hosts_of, released, server_folder
from opentinker.scheduler.later_starts import LaterStarts
from opentinker.scheduler.launcher import Launcher
from opentinker.scheduler.layouts import held_by
from opentinker.scheduler.listing import FIRST_PAGE, JobQuery
from opentinker.scheduler.model_registry import ModelRegistry
from opentinker.scheduler.placement import free_on
from opentinker.scheduler.reconciler import Reconciler
from opentinker.scheduler.records import Job, Policy, Server
from opentinker.scheduler.run_files import LogSource, log_path, parse_rows, read_lines
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.state_dir import StateDir, write_secret
from opentinker.scheduler.states import JobState
from opentinker.scheduler.storage_calls import StorageCalls
from opentinker.scheduler.store import JobStore
from opentinker.scheduler.submission import Submissions, secrets_named
from opentinker.scheduler.users import EVERYONE, Caller, UserDirectory
from opentinker.scheduler.vault import Vault
from opentinker.storage import file_size, open_storage

MAX_WAIT_S = 60.0
RELEASE_WAIT_S = 15.0
"""How long `cancel` and `complete` wait for the job's processes to be gone before they answer."""
SHUTDOWN_S = 30.0
READ_S = 20.0
"""How long the storage may take to tell what is in a job's files."""
T = TypeVar("T")


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
        self._models = ModelRegistry(settings)
        self._storage = open_storage(settings.remote_storage, settings.runs_dir)
        self._storage_calls = StorageCalls()
        self.vault = Vault(store, secret, now)
        self._reconciler = Reconciler(
            store, launcher, settings, lambda policy_id: policy_token(secret, policy_id), now, steady, self._secrets_of
        )
        self.users = UserDirectory(store, secret, now, steady)
        self._gpu_use = GpuUseReader(store, launcher, settings)
        self._checkpoints = CheckpointCare(store, self._storage, self._storage_calls)
        self._submissions = Submissions(
            settings,
            store,
            launcher,
            self._models,
            self._storage,
            self._storage_calls,
            self.vault,
            self._reconciler,
            self._gpu_use,
            now,
            self._checkpoints,
        )
        self._later_starts = LaterStarts(store, launcher, self._submissions, self._checkpoints)

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
            self._storage_calls.close()
            self._store.close()

    async def ping(self) -> None:
        """Answers as long as the event loop turns."""

    async def authenticate(self, key: str, address: str = "") -> Caller:
        """Who presents this key; see `UserDirectory.authenticate`."""
        return self.users.authenticate(key, address)

    async def submit(
        self,
        owner: str,
        config: dict[str, Any],
        idempotency_key: str | None = None,
        code: dict[str, str] | None = None,
        may_name: str | None = None,
    ) -> dict[str, Any]:
        """Accept a job; `code` is {"zip": base64, "sha256": hex}. A repeat with the same key gets the first one's job.
        `may_name` is whose jobs `start_from` may name: the owner's by default, `EVERYONE` everybody's.

        Raises:
            ConfigError: the config is wrong, or the job could never run here.
            NotFoundError: there is no such job as `start_from` names for this caller.
            TooLargeError: the config is larger than `MAX_CONFIG_BYTES`.
            StorageError: the store's disk is full; nothing was accepted.
            UnknownModelError: the cluster does not know the base model.
            InvalidRequestError: the code is damaged, too large or unsafe.
            ConflictError: the key was used for another config, or the cluster is being stopped.
        """
        job = await self._submissions.accept(owner, config, idempotency_key, code, may_name)
        if not job.state.ended:
            self._reconciler.clocks.renew_lease(job.id)
        self._reconciler.journal.wake()
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
            await self._reconciler.journal.wait_change(left)
        return self._view(job)

    async def events(self, owner: str, job_id: str) -> list[dict[str, Any]]:
        self._owned(owner, job_id)
        return [{"at": event.at, "kind": event.kind, "detail": event.detail} for event in self._store.events(job_id)]

    async def heartbeat(self, owner: str, job_id: str) -> dict[str, Any]:
        """Renew a job's lease; for an ended job it only tells its state."""
        job = self._owned(owner, job_id)
        if job.lease_expires_at is None:
            raise ConflictError(f"job {job_id} holds no lease: it runs on the cluster by itself")
        if not job.state.ended:
            self._reconciler.clocks.renew_lease(job_id)
        return self._view(job)

    async def complete(self, owner: str, job_id: str) -> dict[str, Any]:
        """End a job well that the cluster does not drive.

        Raises:
            ConflictError: it is not RUNNING, or the cluster drives it.
        """
        job = self._owned(owner, job_id)
        if _driven(job):
            raise ConflictError(f"job {job_id} completes by itself", hint="cancel it to end it early")
        return await self._end(owner, job, JobState.COMPLETED)

    async def cancel(self, owner: str, job_id: str, by: Caller | None = None) -> dict[str, Any]:
        """End a job in any state; one that has ended stays as it is. `by` is who does it, if not the owner."""
        job = self._owned(owner, job_id)
        cause = self._by(job, by, "cancelled")
        return await self._end(owner, job, job.state if job.state.ended else JobState.CANCELLED, cause)

    async def stop(self, owner: str, job_id: str, by: Caller | None = None) -> dict[str, Any]:
        """End a job as `cancel` does, but after a checkpoint of its policy, `stopped`, if it has one to save. Answers when that
        is done, or after 15 s; the job is CANCELLED then, or later."""
        job = self._owned(owner, job_id)
        if job.state.ended:
            return await self._end(owner, job, job.state)
        self._reconciler.moves.stop(job, self._by(job, by, "stopped"))
        return await self._settled(owner, job_id)

    def _by(self, job: Job, by: Caller | None, what: str) -> str:
        """Who ended the job, for its cause. What others than the owner do to a job is noted."""
        if by is None or by.name == job.owner:
            return f"{what} by its owner"
        self.users.note(by, "job.stop" if what == "stopped" else "job.cancel", f"{job.owner}/{job.id}")
        return f"{what} by {by.name}"

    async def logs(
        self, owner: str, job_id: str, offset: int = 0, source: LogSource | None = None, server: str = ""
    ) -> dict[str, Any]:
        """{"text", "offset", "finished"}: a log of the job from a byte offset on; by default what `log_path` finds, and with
        `server` that of this one beside its own.

        Raises:
            NotFoundError: the job has no such server.
            InvalidRequestError: a driver's log is asked for of a server.
        """
        job = self._owned(owner, job_id)
        if server:
            check_further(job, server)
            if source == "driver":
                raise InvalidRequestError("a driver's log is the job's, and no server's", hint="leave `server` out")
            source = "server"
        run_dir = server_folder(Path(job.run_dir), server)
        here = self._all_here(job)
        find = partial(log_path, run_dir, source, has_driver=_driven(job), ended=job.state.ended, all_here=here)
        told = source is not None or not _driven(job) or not job.state.ended  # then no file has to be looked for
        path = await (asyncio.to_thread(find) if told else self._reading(job, run_dir / LOG_NAME, find))
        data, offset, at_end = await self._lines(job, path, offset)
        return {"text": data.decode(errors="replace"), "offset": offset, "finished": at_end and self._quiet(job)}

    async def metrics(self, owner: str, job_id: str, after: int = 0) -> dict[str, Any]:
        """{"rows", "next", "finished"}: rows of metrics.jsonl from a byte offset on."""
        job = self._owned(owner, job_id)
        data, offset, at_end = await self._lines(job, Path(job.run_dir) / "metrics.jsonl", after)
        return {"rows": parse_rows(data), "next": offset, "finished": at_end and self._quiet(job)}

    async def checkpoints(self, owner: str, job_id: str) -> list[dict[str, Any]]:
        """The job's whole checkpoints, newest first; see `checkpoint_views`."""
        job = self._owned(owner, job_id)
        if self._storage is None:
            return await asyncio.to_thread(checkpoint_views, job, None)
        return await self._storage_calls.run(partial(checkpoint_views, job, self._storage), READ_S)

    async def tag_checkpoint(self, owner: str, job_id: str, name: str, tag: str, by: Caller) -> dict[str, Any]:
        """Give a checkpoint another name; see `CheckpointCare.tag`."""
        job = self._owned(owner, job_id)
        view = await self._checkpoints.tag(job, name, tag)
        self.users.note(by, "checkpoint.tag", f"{view['ref']} {tag}"[:200])
        return view

    async def untag_checkpoint(self, owner: str, job_id: str, tag: str, by: Caller) -> None:
        job = self._owned(owner, job_id)
        await self._checkpoints.untag(job, tag)
        self.users.note(by, "checkpoint.untag", f"{job.owner}/{job.id} {tag}"[:200])

    async def delete_checkpoint(self, owner: str, job_id: str, name: str, by: Caller) -> None:
        """Delete a checkpoint for good; see `CheckpointCare.delete`."""
        ref = await self._checkpoints.delete(self._owned(owner, job_id), name)
        self.users.note(by, "checkpoint.delete", str(ref))

    async def name_checkpoints(self, owner: str, job_id: str, addresses: list[str]) -> list[str]:
        """Let the policies of an interactive job that runs load checkpoints that its config did not name: their exact
        addresses, which its config names from now on. They are not deleted while it is open.

        Raises:
            ConfigError: one does not fit the job, or is not there.
            NotFoundError: there is no such job for this caller.
            ConflictError: the job does not run, or is of another kind.
            ServerLostError, UnavailableError: its server, or the storage, does not answer.
        """
        return await self._later_starts.name(self._owned(owner, job_id).id, addresses, owner)

    async def _lines(self, job: Job, path: Path, offset: int) -> tuple[bytes, int, bool]:
        read = partial(read_lines, path, offset, complete=self._quiet(job), all_here=self._all_here(job))
        return await self._reading(job, path, read)

    async def _reading(self, job: Job, path: Path, read: Callable[..., T]) -> T:
        """What `read` finds in a file of the job. It is given the storage only where that can know more than this node."""
        if self._storage is None or (self._all_here(job) and (not job.state.ended or file_size(path) >= 0)):
            return await asyncio.to_thread(read)
        return await self._storage_calls.run(partial(read, storage=self._storage), READ_S)

    def _all_here(self, job: Job) -> bool:
        """Whether everything that ever ran for the job ran on the scheduler's node."""
        if self._storage is None:
            return True
        servers = [self._store.server(policy.server_id) for policy in self._store.policies(job.id)]
        return all(server is None or self._launcher.is_here(server.node_id) for server in servers)

    async def models(self) -> list[dict[str, Any]]:
        """The models that jobs can name, by name; see `ModelRegistry.listing`."""
        return await asyncio.to_thread(self._models.listing)

    async def cluster(self, owner: str) -> dict[str, Any]:
        """See `cluster_view`. Of others' jobs only administrators see more than the owner and the amounts."""
        nodes = await self._launcher.nodes()
        use = await self._gpu_use.read(nodes)
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
            self._reconciler.servers.unhealthy(),
        )

    async def exposition(self) -> str:
        """The scheduler's figures for Prometheus."""
        nodes = await self._launcher.nodes()
        use = await self._gpu_use.read(nodes)
        held = [allocation for server, _ in self._store.open_servers() for allocation in held_by(server)]
        return self._reconciler.metrics.exposition(self._store.counts(), nodes, free_on(nodes, held), use)

    async def server_of(self, job_id: str, owner: str | None, token: str | None, address: str = "") -> dict[str, str]:
        """{"endpoint", "token", "owner"} of a job's server, for the proxy. The caller shows that the job is theirs by being its
        owner or by the token of its policy, or of one that was created beside it, which the server then judges.

        Raises:
            AuthenticationError, RateLimitedError: a token, and not this job's; it counts as a wrong key of its address.
            NotFoundError: no such job of this owner.
            UnavailableError: the server is not up yet.
            ServerLostError, JobFailedError: the job has ended.
            ServerLostError: the token is that of an earlier server of the job, which was restarted.
        """
        try:
            job = self._store.job(job_id)
            hosts = hosts_of(self._store, job_id)
            # Once it was restarted, the earlier tokens still tell whose job it is: who holds one does not guess.
            known = self._store.policies(job_id) if owner is None else []
        except OpenTinkerError as error:
            raise error if owner is not None else without_details(error) from error
        presented = token
        if owner is None:
            right = [policy_token(self._secret, policy.id) for policy in known]
            token = parent_of(token or "", right) or token
            self.users.check_token(token or "", right, address)
        elif job is None or job.owner != owner:
            raise NotFoundError(f"no job {job_id!r}", hint="`opentinker ps` lists your jobs")
        assert job is not None
        if job.state.ended:
            kind = ServerLostError if job.state is JobState.FAILED else JobFailedError
            raise kind(f"job {job_id} is {job.state}{': ' if job.cause else ''}{job.cause}", hint="its server is gone")
        # Whose token it is tells which of the job's servers is meant; an API key opens its own.
        host = next((h for h in hosts if owner is not None or token == policy_token(self._secret, h[1].id)), None)
        if host is None and hosts:
            raise ServerLostError(
                f"job {job_id} was restarted: it has a new server; read the job again",
                hint=f"its record, `GET /v1/jobs/{job_id}`, has the new server's token and policy",
            )
        if host is None or not host[0].endpoint:
            why = self._reconciler.waiting_for(job)
            raise UnavailableError(
                f"job {job_id} is {job.state}: it has no server yet", hint=f"it waits for {why}" if why else ""
            )
        passed = presented if owner is None else policy_token(self._secret, host[1].id)
        return {"endpoint": host[0].endpoint, "token": passed or "", "owner": job.owner}

    async def shutdown(self) -> bool:
        """Cancel all jobs and wait for their processes to be gone; whether they are."""
        self._submissions.closed = True
        for job in self._store.live_jobs():
            self._reconciler.moves.end(job, JobState.CANCELLED, "the cluster was stopped")
        clock = asyncio.get_running_loop().time
        deadline = clock() + SHUTDOWN_S
        while self._store.open_servers() and (left := deadline - clock()) > 0:
            await self._reconciler.journal.wait_change(left)
        return not self._store.open_servers()

    async def _end(self, owner: str, job: Job, state: JobState, cause: str = "") -> dict[str, Any]:
        if job.state is not state:
            self._reconciler.moves.end(job, state, cause)
        return await self._settled(owner, job.id)

    async def _settled(self, owner: str, job_id: str) -> dict[str, Any]:
        """The job when it has ended and its processes are gone, or after `RELEASE_WAIT_S`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + RELEASE_WAIT_S
        while not self._quiet(self._owned(owner, job_id)) and (left := deadline - clock()) > 0:
            await self._reconciler.journal.wait_change(left)
        return self._view(self._owned(owner, job_id))

    def _secrets_of(self, job: Job) -> dict[str, tuple[str, str]]:
        """What the job's driver is given. Raises: ConfigError, see `Vault.values`."""
        return self.vault.values(job.owner, secrets_named(parse_job(job.config)))

    def _owned(self, owner: str, job_id: str) -> Job:
        job = self._store.job(job_id)
        if job is None or owner not in (job.owner, EVERYONE):
            raise no_job(job_id)
        return job

    def _quiet(self, job: Job) -> bool:
        """Nobody writes to the job's files any more."""
        return job.state.ended and released(self._store, job.id)

    def _hosts(self) -> dict[str, list[tuple[Server, Policy]]]:
        """What serves each job now."""
        hosts: dict[str, list[tuple[Server, Policy]]] = {}
        for server, policies in self._store.open_servers():
            for policy in policies:
                hosts.setdefault(policy.job_id, []).append((server, policy))
        return hosts

    def _view(
        self, job: Job, hosts: Mapping[str, list[tuple[Server, Policy]]] | None = None, *, with_token: bool = True
    ) -> dict[str, Any]:
        """The job as the API shows it. A server is there from the time it answers until its processes are gone."""
        servers: dict[str, dict[str, Any]] = {}
        for host, policy in (self._hosts() if hosts is None else hosts).get(job.id, ()):
            # One that is QUEUED again still has its earlier servers for a moment.
            if host.endpoint and job.state is not JobState.QUEUED:
                view = servers[host.name] = _server_view(host, policy)
                view["proxy"] = f"/v1/jobs/{job.id}/server"
                if with_token and not job.state.ended:
                    view["token"] = policy_token(self._secret, policy.id)
        server = servers.pop("", None)
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
            "servers": servers,
        }


def _driven(job: Job) -> bool:
    """The cluster runs a driver for it."""
    return KINDS[job.kind].driven


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
