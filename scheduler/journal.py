"""What happens to jobs is written down, logged, and told to whoever waits for it."""

import asyncio
import logging
from collections.abc import Callable

from opentinker.scheduler.records import Event, Job
from opentinker.scheduler.store import JobStore

MAX_TEXT = 2000

logger = logging.getLogger(__name__)


class Journal:
    """Lives on one event loop."""

    def __init__(self, store: JobStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._work = asyncio.Event()
        self._changed = asyncio.Event()

    def event(self, job_id: str, kind: str, detail: str = "") -> Event:
        """Something that happens to a job now, to be saved."""
        return Event(job_id, self._now(), kind, storable(detail))

    def record(self, job: Job, kind: str, detail: str = "") -> None:
        """Save the job as it is now, with why; announce it."""
        self._store.save(job, self.event(job.id, kind, detail))
        self.announce(job.id, kind, detail=detail)
        self.wake()

    def announce(self, job_id: str, kind: str, **fields: str) -> None:
        """Log it, and let those go on who wait for a change."""
        logger.info(
            "event=%s job=%s %s", kind, job_id, " ".join(f"{name}={value!r}" for name, value in fields.items() if value)
        )
        self._changed.set()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Something changed that may have to be acted on."""
        self._work.set()

    def awake(self) -> None:
        """All that changed so far is about to be looked at."""
        self._work.clear()

    async def wait_work(self, timeout_s: float) -> None:
        """Return when `wake` was called, or after the timeout."""
        await _wait(self._work, timeout_s)

    async def wait_change(self, timeout_s: float) -> None:
        """Return at the next change of any job or server, or after the timeout."""
        await _wait(self._changed, timeout_s)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


def storable(text: str) -> str:
    """A text from user code as every database can hold it: whole characters, no NUL, no more than a screenful."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")[:MAX_TEXT]
