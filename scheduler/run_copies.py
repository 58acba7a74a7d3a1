"""Copies to the storage what the files of a job have grown by since its last server copied them, which ran on this machine."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from opentinker.scheduler.records import STARTING, Event, Job
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.store import JobStore
from opentinker.storage import FOLLOW_S, Mirror, open_storage

TRIES = 100
"""How often it is tried to copy a job's last lines."""
COPYING = "copying"
"""The kind of the event of a job whose last lines are to be copied; its detail is the machine that has them."""
COPIED = "copied"
NOT_COPIED = "not_copied"

logger = logging.getLogger(__name__)


class RunCopies:
    """What is to be copied is in the store from the end of the job's server until it is done, so that a crash loses none of it.
    A file that is copied again is the same."""

    def __init__(self, store: JobStore, settings: Settings, now: Callable[[], float]) -> None:
        self._store = store
        self._storage = open_storage(settings.remote_storage, settings.runs_dir)
        self._now = now
        self._machine = socket.gethostname()
        # A storage that hangs holds up these threads alone.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="copying")
        self._pending: dict[str, int] = {}
        """By job: how many servers it had had."""

    @property
    def pending(self) -> tuple[str, ...]:
        """The jobs that `copy` has to be called for."""
        return tuple(self._pending)

    def recover(self) -> None:
        """Take up what an earlier life of the scheduler on this machine left undone."""
        if self._storage is None:
            return
        for job_id in self._store.jobs_with_last_event(COPYING, among=(COPYING, COPIED, NOT_COPIED, STARTING)):
            if self._store.last_detail(job_id, COPYING) == self._machine:
                self._pending[job_id] = len(self._store.policies(job_id))

    def wanted(self, jobs: Sequence[Job]) -> list[Event]:
        """What to write down of jobs whose files are here, together with the end of their server; then `begin` it."""
        if self._storage is None:
            return []
        covered = [job for job in jobs if self._storage.covers(Path(job.run_dir))]
        return [Event(job.id, self._now(), COPYING, self._machine) for job in covered]

    def begin(self, events: Sequence[Event]) -> None:
        for event in events:
            self._pending[event.job_id] = len(self._store.policies(event.job_id))

    async def copy(self, job_id: str) -> None:
        """Copy a pending job's files; at the end it is pending no more. Its next server copies them itself, from wherever that
        is, and what is here may be older then."""
        job = self._store.job(job_id)
        assert job is not None
        assert self._storage is not None
        run_dir = Path(job.run_dir)
        attempt = partial(_attempt, Mirror(self._storage, run_dir), run_dir)
        for _ in range(TRIES):
            known = self._pending[job_id]
            if len(self._store.policies(job_id)) > known:
                del self._pending[job_id]
                return
            outcome = await asyncio.get_running_loop().run_in_executor(self._threads, attempt)
            if self._pending[job_id] > known:
                continue  # another server has come and gone here meanwhile
            if outcome is not None:
                self._done(job_id, *outcome)
                return
            await asyncio.sleep(FOLLOW_S)
        self._done(job_id, NOT_COPIED, f"tried {TRIES} times; is the storage reachable?")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, job_id: str, kind: str, detail: str = "") -> None:
        self._store.save(Event(job_id, self._now(), kind, detail))
        del self._pending[job_id]
        logger.log(logging.INFO if kind == COPIED else logging.ERROR, "event=%s job=%s %s", kind, job_id, detail)


def _attempt(mirror: Mirror, run_dir: Path) -> tuple[str, str] | None:
    """How it ended, as an event's kind and detail; None: try again later."""
    if not run_dir.is_dir():
        return NOT_COPIED, "its folder is gone"
    return (COPIED, "") if mirror.sync() else None
