"""The event loop of a worker process, in a thread of its own: async environments run there."""

import asyncio
import threading
import types
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any

from opentinker.env.execution import reported
from opentinker.env.frames import ERROR, problem_body
from opentinker.env.leader import Call, Executor
from opentinker.env.stopping import Door
from opentinker.errors import EnvironmentFailedError, OpenTinkerError


@types.coroutine
def _through(door: Door, call: Call, value: Awaitable[Any]) -> Generator[Any, Any, Any]:
    """Awaits, and lets exceptions in from outside while the user's code runs, not while it waits."""
    steps = value.__await__()
    sent: Any = None
    thrown: BaseException | None = None
    while True:
        try:
            if thrown is not None:
                yielded = door.run(call, partial(steps.throw, thrown))
            elif sent is None:
                yielded = door.run(call, partial(next, steps))
            else:
                yielded = door.run(call, partial(steps.send, sent))
        except StopIteration as end:
            return end.value
        sent, thrown = None, None
        try:
            sent = yield yielded
        except BaseException as error:  # the awaiting side's, for the code that waits
            thrown = error


class Coroutines:
    """Starts with the first coroutine."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door = Door()
        self._native = 0
        self._lock = threading.Lock()
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self._flushing = False

    def start(
        self,
        call: Call,
        value: Awaitable[Any],
        what: str,
        function: Callable[..., Any],
        convert: Callable[[Any], tuple[int, bytes]],
    ) -> None:
        """Run what a plain call returned to its end, and finish the call with what `convert` makes of it."""
        loop = self._running_loop()
        with self._executor.lock:
            if call.abandoned:
                return
            call.on_loop = True
            call.door, call.native = self._door, self._native
            self._executor.track(call)
        loop.call_soon_threadsafe(self._begin, call, value, what, function, convert)

    def cancel(self, call: Call) -> None:
        """End a call that missed its deadline. It counts as finished once the loop gets round to this."""
        loop = self._loop
        assert loop is not None

        def cancelled() -> None:
            call.finished = True
            task = self._tasks.pop(call, None)
            if task is not None:
                task.cancel()

        loop.call_soon_threadsafe(cancelled)

    def _begin(self, call: Call, *rest: Any) -> None:
        if not call.finished:
            assert self._loop is not None
            self._tasks[call] = self._loop.create_task(self._run(call, *rest))

    async def _run(
        self,
        call: Call,
        value: Awaitable[Any],
        what: str,
        function: Callable[..., Any],
        convert: Callable[[Any], tuple[int, bytes]],
    ) -> None:
        outcome = (ERROR, b"")
        try:
            with reported(what, function):
                answer = await _through(self._door, call, value)
            outcome = convert(answer)
        except asyncio.CancelledError:
            outcome = ERROR, problem_body(EnvironmentFailedError(f"{what} raised CancelledError"))
        except OpenTinkerError as error:
            outcome = ERROR, problem_body(error)
        except Exception as error:  # in what was answered
            outcome = ERROR, problem_body(EnvironmentFailedError(f"{what}: {type(error).__name__}: {error}"))
        self._tasks.pop(call, None)
        call.finished = True
        self._executor.finish(call, outcome)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._executor.flush()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                started = threading.Event()

                def run(loop: asyncio.AbstractEventLoop) -> None:
                    self._native = threading.get_native_id()
                    asyncio.set_event_loop(loop)
                    started.set()
                    loop.run_forever()

                threading.Thread(target=run, args=(self._loop,), name="coroutines", daemon=True).start()
                started.wait()
            return self._loop
