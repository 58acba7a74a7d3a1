"""The scheduler as a named, detached Ray actor, and the client side that forwards to it."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from ray._private.ray_constants import RAY_WORKER_NICENESS
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from opentinker.config.base import parse_config
from opentinker.errors import DeadlineError, OpenTinkerError, UnavailableError
from opentinker.scheduler.auth import new_server_secret
from opentinker.scheduler.listing import JobQuery
from opentinker.scheduler.ray_launcher import RayLauncher
from opentinker.scheduler.ray_tools import NAMESPACE
from opentinker.scheduler.run_files import LogSource
from opentinker.scheduler.service import MAX_WAIT_S, SchedulerService
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.state_dir import StateDir, write_secret
from opentinker.scheduler.store import SqlStore, sqlite_url
from opentinker.scheduler.users import Caller

NAME = "scheduler"
MAX_CALLS = 1000
"""Calls in progress, most of them waiting for something to change."""
THREADS = 128
CALL_S = MAX_WAIT_S + 30.0
LOG_FORMAT = "%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"
RETRY_S = 2.0
"""Pause after a restart that failed, such as for a store that is away."""
T = TypeVar("T")

logger = logging.getLogger(__name__)


class SchedulerActor(SchedulerService):
    """When Ray restarts it after a crash, it takes over from the store."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, force=True)
        try:
            self._open(settings)
        except Exception:
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                raise  # whoever starts the cluster is told
            # Ray restarts a process that died, but not one that says why it cannot start; jobs wait for this one.
            logger.exception("event=restart_failed retry_s=%g", RETRY_S)
            time.sleep(RETRY_S)
            os._exit(1)

    def _open(self, settings: Mapping[str, Any]) -> None:
        parsed = parse_config(Settings, settings)
        state = StateDir(parsed.state_dir)
        state.create()
        secret = write_secret(state.server_secret, new_server_secret)
        store = SqlStore.open(parsed.database_url or sqlite_url(state.database))
        super().__init__(parsed, store, RayLauncher(parsed), secret)
        self.create_key()
        self.recover()
        loop = asyncio.get_running_loop()
        # Ray's own default is a few threads, which waits for placement groups and dying processes could use up.
        loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="scheduler"))
        self._loop = loop.create_task(self.run())

    async def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    async def manage_users(self, method: str, *arguments: Any) -> Any:
        """What `RemoteUsers` asks for."""
        return await getattr(self.users, method)(*arguments)

    async def manage_secrets(self, method: str, *arguments: Any) -> Any:
        """What `RemoteSecrets` asks for."""
        return await getattr(self.vault, method)(*arguments)


def create_scheduler(settings: Settings) -> Any:
    """The handle of this Ray cluster's scheduler, which is created if there is none. It outlives the caller.

    It stays on the caller's node while that lives: others may be removed again, and its state folder is there.
    """
    actor = ray.remote(SchedulerActor).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=MAX_CALLS,
        # Ray adds 15 to a worker's niceness when it is up, and workers that are still importing have none: users would
        # wait for answers whenever a job starts.
        runtime_env={"env_vars": {RAY_WORKER_NICENESS: "0"}},
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
    )
    return actor.remote(settings.model_dump(mode="json"))


class RemoteScheduler:
    """The methods of a `SchedulerService`, called through its actor's handle.

    Raises (all methods): the service's own errors; UnavailableError, DeadlineError when the actor does not answer.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.users = RemoteUsers(handle)
        self.vault = RemoteSecrets(handle)

    async def ping(self) -> None:
        await _answer(self._handle.ping.remote())

    async def authenticate(self, key: str, address: str = "") -> Caller:
        return await _answer(self._handle.authenticate.remote(key, address))

    async def submit(
        self,
        owner: str,
        config: dict[str, Any],
        idempotency_key: str | None,
        code: dict[str, str] | None,
        may_name: str | None = None,
    ) -> dict[str, Any]:
        return await _answer(self._handle.submit.remote(owner, config, idempotency_key, code, may_name))

    async def jobs(self, owner: str, query: JobQuery) -> dict[str, Any]:
        return await _answer(self._handle.jobs.remote(owner, query))

    async def job(self, owner: str, job_id: str, state: str | None, wait_s: float) -> dict[str, Any]:
        return await _answer(self._handle.job.remote(owner, job_id, state, wait_s))

    async def events(self, owner: str, job_id: str) -> list[dict[str, Any]]:
        return await _answer(self._handle.events.remote(owner, job_id))

    async def heartbeat(self, owner: str, job_id: str) -> dict[str, Any]:
        return await _answer(self._handle.heartbeat.remote(owner, job_id))

    async def complete(self, owner: str, job_id: str) -> dict[str, Any]:
        return await _answer(self._handle.complete.remote(owner, job_id))

    async def cancel(self, owner: str, job_id: str, by: Caller | None = None) -> dict[str, Any]:
        return await _answer(self._handle.cancel.remote(owner, job_id, by))

    async def stop(self, owner: str, job_id: str, by: Caller | None = None) -> dict[str, Any]:
        return await _answer(self._handle.stop.remote(owner, job_id, by))

    async def logs(self, owner: str, job_id: str, offset: int, source: LogSource | None, server: str = "") -> dict[str, Any]:
        return await _answer(self._handle.logs.remote(owner, job_id, offset, source, server))

    async def metrics(self, owner: str, job_id: str, after: int) -> dict[str, Any]:
        return await _answer(self._handle.metrics.remote(owner, job_id, after))

    async def checkpoints(self, owner: str, job_id: str) -> list[dict[str, Any]]:
        return await _answer(self._handle.checkpoints.remote(owner, job_id))

    async def tag_checkpoint(self, owner: str, job_id: str, name: str, tag: str, by: Caller) -> dict[str, Any]:
        return await _answer(self._handle.tag_checkpoint.remote(owner, job_id, name, tag, by))

    async def untag_checkpoint(self, owner: str, job_id: str, tag: str, by: Caller) -> None:
        await _answer(self._handle.untag_checkpoint.remote(owner, job_id, tag, by))

    async def delete_checkpoint(self, owner: str, job_id: str, name: str, by: Caller) -> None:
        await _answer(self._handle.delete_checkpoint.remote(owner, job_id, name, by))

    async def name_checkpoints(self, owner: str, job_id: str, addresses: list[str]) -> list[str]:
        return await _answer(self._handle.name_checkpoints.remote(owner, job_id, addresses))

    async def models(self) -> list[dict[str, Any]]:
        return await _answer(self._handle.models.remote())

    async def cluster(self, owner: str) -> dict[str, Any]:
        return await _answer(self._handle.cluster.remote(owner))

    async def exposition(self) -> str:
        return await _answer(self._handle.exposition.remote())

    async def server_of(self, job_id: str, owner: str | None, token: str | None, address: str = "") -> dict[str, str]:
        return await _answer(self._handle.server_of.remote(job_id, owner, token, address))


class RemoteUsers:
    """The `Users` of a scheduler, called through its actor's handle; raises as `RemoteScheduler` does."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def add(self, by: Caller, name: str, scopes: list[str], limits: dict[str, Any]) -> dict[str, Any]:
        return await self._one("add", by, name, scopes, limits)

    async def users(self) -> list[dict[str, Any]]:
        return await self._many("users")

    async def change(self, by: Caller, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        return await self._one("change", by, name, changes)

    async def keys(self, name: str) -> list[dict[str, Any]]:
        return await self._many("keys", name)

    async def add_key(self, by: Caller, name: str, label: str, scopes: list[str] | None) -> dict[str, Any]:
        return await self._one("add_key", by, name, label, scopes)

    async def revoke_key(self, by: Caller, name: str, key_id: str) -> dict[str, Any]:
        return await self._one("revoke_key", by, name, key_id)

    async def rotate_key(self, by: Caller, name: str, key_id: str) -> dict[str, Any]:
        return await self._one("rotate_key", by, name, key_id)

    async def audit(self, limit: int) -> list[dict[str, Any]]:
        return await self._many("audit", limit)

    async def _one(self, method: str, *arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await _answer(self._handle.manage_users.remote(method, *arguments))
        return answer

    async def _many(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = await _answer(self._handle.manage_users.remote(method, *arguments))
        return answer


class RemoteSecrets:
    """The `Secrets` of a scheduler, called through its actor's handle; raises as `RemoteScheduler` does."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def put(self, by: Caller, name: str, value: str) -> dict[str, Any]:
        answer: dict[str, Any] = await _answer(self._handle.manage_secrets.remote("put", by, name, value))
        return answer

    async def names(self, owner: str) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = await _answer(self._handle.manage_secrets.remote("names", owner))
        return answer

    async def remove(self, by: Caller, name: str) -> None:
        await _answer(self._handle.manage_secrets.remote("remove", by, name))


async def _answer(reference: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(CALL_S):
            return await reference
    except TimeoutError as error:
        raise DeadlineError(f"the scheduler did not answer within {CALL_S:g} s") from error
    except RayActorError as error:
        raise UnavailableError("the scheduler is down or restarting") from error
    except RayTaskError as error:
        # Ray raises a mixture of its own class and the original's; the API wants the original.
        if isinstance(error.cause, OpenTinkerError):
            raise error.cause from None
        raise
