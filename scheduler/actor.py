"""The scheduler as a named, detached Ray actor, and the client side that forwards to it."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from opentinker.config.base import parse_config
from opentinker.errors import DeadlineError, OpenTinkerError, UnavailableError
from opentinker.scheduler.auth import new_server_secret
from opentinker.scheduler.ray_launcher import NAMESPACE, RayLauncher
from opentinker.scheduler.service import MAX_WAIT_S, SchedulerService
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.state_dir import StateDir, write_secret
from opentinker.scheduler.store import SqlStore

NAME = "scheduler"
MAX_CALLS = 1000
"""Calls in progress, most of them waiting for something to change."""
CALL_S = MAX_WAIT_S + 30.0
LOG_FORMAT = "%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"
T = TypeVar("T")


class SchedulerActor(SchedulerService):
    """When Ray restarts it after a crash, it takes over from the store."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s", force=True
        )
        parsed = parse_config(Settings, settings)
        state = StateDir(parsed.state_dir)
        state.create()
        secret = write_secret(state.server_secret, new_server_secret)
        super().__init__(parsed, SqlStore.open_sqlite(state.database), RayLauncher(parsed), secret)
        self.create_key()
        self.recover()
        self._loop = asyncio.get_running_loop().create_task(self.run())

    async def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}


def create_scheduler(settings: Settings) -> Any:
    """The handle of this Ray cluster's scheduler, which is created if there is none. It outlives the caller."""
    actor = ray.remote(SchedulerActor).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=MAX_CALLS,
    )
    return actor.remote(settings.model_dump(mode="json"))


class RemoteScheduler:
    """The methods of a `SchedulerService`, called through its actor's handle.

    Raises (all methods): the service's own errors; UnavailableError, DeadlineError when the actor does not answer.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def authenticate(self, key: str) -> str:
        return await _answer(self._handle.authenticate.remote(key))

    async def submit(
        self, owner: str, config: dict[str, Any], idempotency_key: str | None, code: dict[str, str] | None
    ) -> dict[str, Any]:
        return await _answer(self._handle.submit.remote(owner, config, idempotency_key, code))

    async def jobs(self, owner: str) -> list[dict[str, Any]]:
        return await _answer(self._handle.jobs.remote(owner))

    async def job(self, owner: str, job_id: str, state: str | None, wait_s: float) -> dict[str, Any]:
        return await _answer(self._handle.job.remote(owner, job_id, state, wait_s))

    async def events(self, owner: str, job_id: str) -> list[dict[str, Any]]:
        return await _answer(self._handle.events.remote(owner, job_id))

    async def heartbeat(self, owner: str, job_id: str) -> dict[str, Any]:
        return await _answer(self._handle.heartbeat.remote(owner, job_id))

    async def complete(self, owner: str, job_id: str) -> dict[str, Any]:
        return await _answer(self._handle.complete.remote(owner, job_id))

    async def cancel(self, owner: str, job_id: str) -> dict[str, Any]:
        return await _answer(self._handle.cancel.remote(owner, job_id))

    async def logs(self, owner: str, job_id: str, offset: int) -> dict[str, Any]:
        return await _answer(self._handle.logs.remote(owner, job_id, offset))

    async def metrics(self, owner: str, job_id: str, after: int) -> dict[str, Any]:
        return await _answer(self._handle.metrics.remote(owner, job_id, after))

    async def cluster(self) -> dict[str, Any]:
        return await _answer(self._handle.cluster.remote())


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
