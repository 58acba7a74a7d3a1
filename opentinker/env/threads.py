"""Threads for plain (not async) user code: reused while it returns, abandoned when it hangs."""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class _Worker:
    """One daemon thread; it goes back to the idle list by itself after each call."""

    def __init__(self, pool: "UserThreads") -> None:
        self._pool = pool
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]] | None] = (
            SimpleQueue()
        )
        threading.Thread(target=self._run, name="opentinker-environment", daemon=True).start()

    def submit(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]") -> None:
        self._calls.put((call, loop, future))

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, loop, future = item
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:  # user code; even SystemExit must not end the thread silently
                error = raised
            if not self._pool.release(self):
                self.stop()
            try:
                loop.call_soon_threadsafe(_resolve, future, value, error)
            except RuntimeError:  # the loop is closed: nobody waits for a late answer
                return
            del call, future, value, error, item


def _resolve(future: "asyncio.Future[tuple[Any, BaseException | None]]", value: Any, error: BaseException | None) -> None:
    if not future.done():
        future.set_result((value, error))


class UserThreads:
    """A pool without an upper size, whose caller bounds the number of calls.

    A call that never returns costs its thread and nothing else: the next call gets another one. Threads are daemons, so a hung
    one does not keep the process alive. As a context manager it stops its idle threads on leaving, busy ones once they return.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()

    def release(self, worker: _Worker) -> bool:
        """A worker is free again; False tells it to stop."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
            return not self._closed

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in a thread. Cancelling the wait abandons the thread, and what it still does is ignored.

        Raises:
            whatever `function` raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[T, BaseException | None]] = loop.create_future()
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        (worker or _Worker(self)).submit(function, loop, future)
        value, error = await future
        if error is not None:
            raise error
        return value
