"""Work that waits for the storage, on threads of its own and with a deadline: a storage that hangs stalls nothing else."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from opentinker.errors import UnavailableError

THREADS = 8
T = TypeVar("T")

logger = logging.getLogger(__name__)


class StorageCalls:
    """A few threads. Work that hangs keeps its thread; what waits for one is given up at its deadline, and never begins."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="storage")

    async def run(self, work: Callable[[], T], within_s: float, undo: Callable[[], object] | None = None) -> T:
        """The result of `work`. If nobody waits any more when it succeeds, `undo` is run after it.

        Raises:
            UnavailableError: it takes too long.
            Whatever `work` raises.
        """
        future = self._threads.submit(work)
        try:
            async with asyncio.timeout(within_s) as deadline:
                return await asyncio.wrap_future(future)
        except BaseException as error:
            if undo is not None:
                future.add_done_callback(lambda done: self._undo(done, undo))
            if isinstance(error, TimeoutError) and deadline.expired():
                raise UnavailableError(
                    f"the storage did not answer within {within_s:g} s", hint="try again; is it reachable from the scheduler?"
                ) from error
            raise

    def later(self, work: Callable[[], object]) -> None:
        """Run `work` some time; that it fails is only logged."""
        self._threads.submit(_logged, work)

    def close(self) -> None:
        """What has not begun never will."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _undo(self, done: Future[T], undo: Callable[[], object]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.later(undo)


def _logged(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        logger.warning("event=storage_call_failed error=%s", error)
