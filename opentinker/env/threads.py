"""Threads for plain (not async) user code: reused while it returns, stopped when nobody waits for it any more."""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from opentinker.env.stopping import Door, Stopper, stack_of

T = TypeVar("T")


class _Call:
    """One call of user code, and who waits for its end."""

    __slots__ = ("abandoned", "ended", "function", "future", "loop")

    def __init__(
        self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: "asyncio.Future[tuple[Any, Any]]"
    ) -> None:
        self.function = function
        self.loop = loop
        self.future = future
        self.abandoned = self.ended = False

    def run(self) -> Any:
        # Whoever abandons a call says so before it looks for it behind the door: it has not begun, or it is found there.
        return None if self.abandoned else self.function()


class _Worker:
    """One daemon thread; it goes back to the idle list by itself after each call, unless the call was abandoned."""

    def __init__(self, pool: "UserThreads") -> None:
        self._pool = pool
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self.door = Door()
        self._thread = threading.Thread(target=self._run, name="opentinker-environment", daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        return self._thread.ident or 0

    def submit(self, call: _Call) -> None:
        self._calls.put(call)

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            value, error = None, None
            try:
                value = self.door.run(call, call.run)
            except BaseException as raised:  # user code; even SystemExit must not end the thread silently
                error = raised
            if not self._pool.release(self, call):
                self.stop()
            try:
                call.loop.call_soon_threadsafe(_resolve, call.future, value, error)
            except RuntimeError:  # the loop is closed: nobody waits for a late answer
                return
            del call, value, error


def _resolve(future: "asyncio.Future[tuple[Any, BaseException | None]]", value: Any, error: BaseException | None) -> None:
    if not future.done():
        future.set_result((value, error))


class UserThreads:
    """A pool without an upper size, whose caller bounds the number of calls.

    A call that nobody waits for any more is stopped by an exception raised in it, however deep in Python code; one that is
    in a blocking C function gets it when that returns. Until then it costs its thread and nothing else: the next call gets
    another one. Threads are daemons, so a hung one does not keep the process alive. As a context manager it stops its idle
    threads on leaving, busy ones once they return.
    """

    def __init__(self, stopper: Stopper | None = None) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._left: set[_Call] = set()
        self._closed = False
        self._busy: dict[Callable[[], Any], _Worker] = {}
        self._stopper = stopper or Stopper()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()

    @property
    def abandoned(self) -> int:
        """Calls that nobody waits for and that have not ended yet."""
        with self._lock:
            return len(self._left)

    def stack(self, function: Callable[[], Any]) -> list[tuple[str, int]]:
        """Files and lines that a running call is executing now, the innermost last; empty if it is not running."""
        worker = self._busy.get(function)
        return stack_of(worker.ident) if worker is not None else []

    def release(self, worker: _Worker, call: _Call) -> bool:
        """A worker has ended a call; False tells it to stop."""
        with self._lock:
            call.ended = True
            self._left.discard(call)
            keep = not (self._closed or call.abandoned)
            if keep:
                self._idle.append(worker)
            return keep

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in a thread. Cancelling the wait abandons the call: it is stopped, and what it still does is ignored.

        Raises:
            whatever `function` raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[T, BaseException | None]] = loop.create_future()
        call = _Call(function, loop, future)
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self)
        worker.submit(call)
        self._busy[function] = worker
        try:
            value, error = await future
        except BaseException:
            self._abandon(worker, call)
            raise
        finally:
            del self._busy[function]
        if error is not None:
            raise error
        return value

    def _abandon(self, worker: _Worker, call: _Call) -> None:
        with self._lock:
            call.abandoned = True
            if call.ended:
                return
            self._left.add(call)
        self._stopper.stop(worker.door, call)
