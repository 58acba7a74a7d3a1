"""Run coroutines from synchronous code, always on the same event loop."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class SyncRunner:
    """An event loop that is driven by whoever calls `run`: the caller's thread, or, where a loop already runs in it
    (a notebook), a thread of its own. Not for concurrent callers."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._thread: ThreadPoolExecutor | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Ctrl-C cancels it, waits for its clean-up and raises KeyboardInterrupt."""
        if not _loop_runs_here():
            return self._runner.run(work)
        return self._run_in_thread(work)

    def _run_in_thread(self, work: Coroutine[Any, Any, T]) -> T:
        started: list[asyncio.Task[Any]] = []

        async def tracked() -> T:
            task = asyncio.current_task()
            assert task is not None
            started.append(task)
            return await work

        future = self._own_thread().submit(self._runner.run, tracked())
        try:
            return future.result()
        except KeyboardInterrupt:
            if started:
                self._runner.get_loop().call_soon_threadsafe(started[0].cancel)
            future.exception()
            raise

    def close(self) -> None:
        """Cancel what is left and close the loop; idempotent."""
        if _loop_runs_here():
            self._own_thread().submit(self._runner.close).result()
        else:
            self._runner.close()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _own_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="opentinker-loop")
        return self._thread


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
