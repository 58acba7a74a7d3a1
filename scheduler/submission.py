"""What becomes of a submit: what can be wrong with a job is said here, and nothing is left of one that is refused."""

import asyncio
import copy
import json
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from opentinker.checkpoints import parse_ref
from opentinker.config.job import JobConfig, RLJobConfig, parse_job
from opentinker.config.sinks import secrets_of
from opentinker.errors import ConfigError, ConflictError, InvalidRequestError, TooLargeError, UnavailableError
from opentinker.scheduler.checkpoint_care import CheckpointCare
from opentinker.scheduler.checkpoint_views import Start, pin, resolve_start, start_source
from opentinker.scheduler.gpu_use import GpuUseReader
from opentinker.scheduler.imports import load
from opentinker.scheduler.launcher import Launcher
from opentinker.scheduler.layouts import further_amounts, requests_of, total
from opentinker.scheduler.model_registry import ModelRegistry
from opentinker.scheduler.packages import requirements_of
from opentinker.scheduler.quotas import check_quota
from opentinker.scheduler.reconciler import Reconciler
from opentinker.scheduler.records import Event, Job
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.states import JobState
from opentinker.scheduler.storage_calls import StorageCalls
from opentinker.scheduler.store import JobStore
from opentinker.scheduler.uploads import decode_zip, unpack
from opentinker.scheduler.users import EVERYONE
from opentinker.scheduler.vault import Vault
from opentinker.storage import Storage

MAX_CONFIG_BYTES = 256 * 2**10
STORAGE_S = 60.0
"""How long a submit may wait for the storage."""
NAME_LENGTH = 200
"""What the store has room for."""


class Submissions:
    def __init__(
        self,
        settings: Settings,
        store: JobStore,
        launcher: Launcher,
        models: ModelRegistry,
        storage: Storage | None,
        storage_calls: StorageCalls,
        vault: Vault,
        reconciler: Reconciler,
        gpu_use: GpuUseReader,
        now: Callable[[], float],
        checkpoints: CheckpointCare,
    ) -> None:
        self._checkpoints = checkpoints
        self._settings = settings
        self._store = store
        self._launcher = launcher
        self._models = models
        self._storage = storage
        self._storage_calls = storage_calls
        self._vault = vault
        self._reconciler = reconciler
        self._gpu_use = gpu_use
        self._now = now
        self._under_way: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By owner and idempotency key, as long as anybody holds it."""
        self.closed = False
        """Nothing is accepted any more."""

    async def accept(
        self,
        owner: str,
        config: dict[str, Any],
        idempotency_key: str | None,
        code: dict[str, str] | None,
        may_name: str | None,
    ) -> Job:
        """The new job, or the one that the key stands for; see `SchedulerService.submit`."""
        if idempotency_key is None:
            return await self._accept(owner, config, None, code, may_name)
        # A retry that overtakes its first attempt waits for it and finds it. Nobody else waits: it may be uploading.
        async with self._under_way.setdefault((owner, idempotency_key), asyncio.Lock()):
            return await self._accept(owner, config, idempotency_key, code, may_name)

    async def _accept(
        self,
        owner: str,
        config: dict[str, Any],
        idempotency_key: str | None,
        code: dict[str, str] | None,
        may_name: str | None,
    ) -> Job:
        _check_size(config)
        parsed = parse_job(config)
        resolved = parsed.model_dump(mode="json")
        if idempotency_key is not None:
            earlier = self._store.job_by_key(owner, idempotency_key)
            if earlier is not None:
                return _same(earlier, resolved, code)
        for part in parsed.parts.values():
            await asyncio.to_thread(self._models.check, part, load(self._settings.check_model))
        starts = [await self.find_start(where, address, parsed, owner, may_name) for where, address in parsed.starts.items()]
        for start in starts:
            pin(resolved, start.where, str(start.ref))
        nodes = await self._launcher.nodes()
        requests = requests_of(parsed, nodes, self._reconciler.node_types)
        demand = total([demand for request in requests.values() for demand in request])
        use = await self._gpu_use.read(nodes)
        for server, part in parsed.parts.items():
            await asyncio.to_thread(self._models.check_memory, part, requests[server][0], use)
        self._vault.check(owner, secrets_named(parsed).values())
        check_quota(self._reconciler.quota_of(owner), demand, parsed.scheduling.priority)
        job_id = f"job-{secrets.token_hex(5)}"
        run_dir = self._settings.run_root / owner / job_id
        uploaded = self._storage if code else None
        await self._prepare(run_dir, code, uploaded, parsed)
        if starts:
            try:
                await self._checkpoints.hold(job_id, starts, parsed)
            except BaseException:
                await self._drop(run_dir, uploaded)
                raise
        if self.closed:
            await self._checkpoints.accepted(job_id, starts, failed=True)
            await self._drop(run_dir, uploaded)
            raise ConflictError("the cluster is being stopped")
        now = self._now()
        job = Job(
            id=job_id,
            owner=owner,
            name=(parsed.name or parsed.default_name())[:NAME_LENGTH],
            kind=parsed.kind,
            state=JobState.QUEUED,
            config=resolved,
            run_dir=str(run_dir),
            gpus=demand.gpus,
            cpu_slots=demand.cpu_slots,
            created_at=now,
            lease_expires_at=now + self._settings.lease_s if parsed.leased else None,
            idempotency_key=idempotency_key,
            code_sha256=code["sha256"].lower() if code else None,
            rollout_gpus=total(requests[""][1:]).gpus,
            rollout_cpu_slots=total(requests[""][1:]).cpu_slots,
            further=further_amounts(requests),
        )
        try:
            accepted = self._store.accept(job, Event(job_id, now, "submitted"))
        except Exception:
            await self._checkpoints.accepted(job_id, starts, failed=True)
            await self._drop(run_dir, uploaded)
            raise
        if accepted.id != job_id:  # another scheduler's answer to the same request
            await self._checkpoints.accepted(job_id, starts, failed=True)
            await self._drop(run_dir, uploaded)
            return _same(accepted, resolved, code)
        await self._checkpoints.accepted(job_id, starts, failed=False)
        return job

    async def find_start(
        self, where: tuple[str, ...], address: str, config: JobConfig, owner: str, may_name: str | None
    ) -> Start:
        """A checkpoint that the config names. What the name means now is what it means for good, however often the server
        starts.

        Raises:
            ConfigError: it does not fit the job, or is not there.
            NotFoundError: there is no such job for this caller.
            UnavailableError: the storage does not answer.
        """
        ref = parse_ref(address)
        named = Start(where, ref, start_source(ref, self._store.job(ref.job), None if may_name == EVERYONE else owner))
        resolve = partial(resolve_start, named, config, self._storage)
        asked = asyncio.to_thread(resolve) if self._storage is None else self._storage_calls.run(resolve, STORAGE_S)
        return replace(named, ref=await asked)

    async def _prepare(self, run_dir: Path, code: dict[str, str] | None, uploaded: Storage | None, config: JobConfig) -> None:
        """Make the job's folder, and upload what `uploaded` is to have of it: that alone waits for the storage."""
        await _finished(partial(_make_folder, run_dir, code, config), partial(_discard, run_dir, None))
        if uploaded is None:
            return
        upload, undo = partial(_upload, run_dir, uploaded), partial(_discard, run_dir, uploaded)
        try:  # for a driver on another node
            await self._storage_calls.run(upload, STORAGE_S, undo)
        except BaseException:  # an upload that is still at it fails over this, and cleans up
            await self._drop(run_dir, None)
            raise

    async def _drop(self, run_dir: Path, uploaded: Storage | None) -> None:
        """Leave nothing of a job that was not accepted; what `uploaded` has of it goes when the storage gets to it."""
        await asyncio.to_thread(shutil.rmtree, run_dir, ignore_errors=True)
        if uploaded is not None:
            self._storage_calls.later(partial(uploaded.remove_folder, run_dir))


def secrets_named(config: JobConfig) -> dict[str, str]:
    """Environment variable of the driver -> name of a secret of the job's owner."""
    return config.secrets if isinstance(config, RLJobConfig) else secrets_of(getattr(config, "sinks", ()))


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


def _same(earlier: Job, config: dict[str, Any], code: dict[str, str] | None) -> Job:
    """Raises: ConflictError when a repeated idempotency key comes with another job."""
    config, pinned = copy.deepcopy(config), parse_job(earlier.config).starts
    for where, address in parse_job(config).starts.items():
        if (meant := pinned.get(where)) and parse_ref(address).may_mean(parse_ref(meant)):
            pin(config, where, meant)
    if (earlier.config, earlier.code_sha256) != (config, code["sha256"].lower() if code else None):
        raise ConflictError("this idempotency key was used for another job", hint="use a new key for each job")
    return earlier


async def _finished(work: Callable[[], None], undo: Callable[[], None]) -> None:
    """Run local `work` in a thread. If nobody waits any more when it is done, `undo` is run after it."""
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        loop = asyncio.get_running_loop()
        working.add_done_callback(lambda done: done.cancelled() or done.exception() or loop.run_in_executor(None, undo))
        raise


def _make_folder(run_dir: Path, code: dict[str, str] | None, config: JobConfig) -> None:
    """Make the job's folder, with its code in it. Nothing is left of it when the code is refused, or what it requires."""
    content = decode_zip(code["zip"], code["sha256"]) if code else None
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot create the run's folder {run_dir}: {error.strerror}") from error
    if content is not None:
        try:
            unpack(content, run_dir / "code")
            requirements_of(config, run_dir / "code")
        except BaseException:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise


def _upload(run_dir: Path, storage: Storage) -> None:
    """Copy the job's code to the storage. Nothing is left of the job when that fails."""
    try:
        storage.put_folder(run_dir / "code")
    except BaseException:
        with suppress(UnavailableError):
            _discard(run_dir, storage)
        raise


def _discard(run_dir: Path, storage: Storage | None) -> None:
    """Remove what was made for a job that was not accepted; `storage` has its code."""
    shutil.rmtree(run_dir, ignore_errors=True)
    if storage is not None:
        storage.remove_folder(run_dir)
