"""The parent's side of a worker process: starts it, sends it requests, and ends it when it does not answer."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from opentinker.env.frames import (
    ERROR,
    HELLO,
    NAMES,
    NO_SESSION,
    RETIRE,
    FrameReader,
    batches,
    encode,
    error_of,
    pack,
    problem_body,
    unpack,
)
from opentinker.env.leader import BLOCKED
from opentinker.errors import DeadlineError, EnvironmentFailedError, EnvironmentLoadError, InvalidRequestError

START_S = 60.0
GRACE_S = 3.0
"""A shared worker ends late calls itself; one that did not this long after a deadline is stuck as a whole. Hundreds of busy
threads in it may hold its monitor up for a second."""
REAP_S = 0.01
REAP_TRIES = 1000

OnAnswer = Callable[[int, bytes], None]
"""Gets the kind of the answer and its body, once."""
logger = logging.getLogger(__name__)


class _Pending:
    __slots__ = ("deadline", "on_answer", "op", "timeout_s")

    def __init__(self, on_answer: OnAnswer, op: int, deadline: float, timeout_s: float) -> None:
        self.on_answer = on_answer
        self.op = op
        self.deadline = deadline
        self.timeout_s = timeout_s


class WorkerProcess(asyncio.Protocol):
    """One worker. `exclusive`: it has one session at a time, and a call that misses its deadline ends it; otherwise it
    enforces deadlines itself, and is only ended when it answers nobody any more.

    Its owner calls `sweep` several times a second, and is told by `on_end` when the process is gone.
    """

    def __init__(self, reference: Mapping[str, Any], *, exclusive: bool, on_end: Callable[["WorkerProcess"], None]) -> None:
        self.exclusive = exclusive
        self.sessions = 0
        """Kept by the owner."""
        self.retiring = False
        """It asked for no new sessions, because calls that missed their deadlines still use its processor time."""
        self.ended = False
        self.cause = ""
        self.info: dict[str, Any] = {}
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._reader = FrameReader()
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._reference = dict(reference)
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def pending(self) -> int:
        """Requests without an answer."""
        return len(self._pending)

    async def start(self) -> None:
        """Start the process and wait until it has loaded the class.

        Raises:
            EnvironmentLoadError: it cannot load it, or died over it.
            DeadlineError: it did not load it within `START_S`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {[p or os.getcwd() for p in sys.path]!r}; "
                f"from opentinker.env.worker import main; main({theirs.fileno()}, {os.getpid()})"
            )
            # Blocks for a millisecond or two; asyncio's own way costs a thread per process on Python 3.11.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
            )
        transport, _ = await self._loop.create_unix_connection(lambda: self, sock=ours)
        transport.write(encode(HELLO, 0, 0, 0, NO_SESSION, 0.0, pack(self._reference)))
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            await self.stop()
            raise DeadlineError(f"the environment's class did not load within {START_S:.0f} s") from None
        except BaseException:
            await self.stop()
            raise

    def call(self, op: int, session: bytes, index: int, timeout_s: float, body: bytes, on_answer: OnAnswer) -> None:
        """Send a request. Whatever happens, `on_answer` is called once, later."""
        number = next(self._numbers)
        self._pending[number] = _Pending(on_answer, op, time.monotonic() + timeout_s, timeout_s)
        if self._gone.done():
            self._loop.call_soon(self._fail_pending, 0.0)
        if self.ended:  # it is answered when it is known how the process ended
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(encode(op, 0, index, number, session, 0.0 if self.exclusive else timeout_s, body))

    async def request(self, op: int, session: bytes, index: int, timeout_s: float, body: bytes) -> tuple[int, bytes]:
        """Send a request and wait for its answer: kind and body."""
        future: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()

        def answered(kind: int, body: bytes) -> None:
            if not future.done():
                future.set_result((kind, body))

        self.call(op, session, index, timeout_s, body, answered)
        return await future

    def sweep(self, now: float) -> None:
        """Look for calls past their deadline, and for a process that died without closing its socket."""
        if self.ended:
            return
        if self._process is not None and self._process.poll() is not None:
            self._end()
            return
        if not self._pending:
            return
        grace_s = 0.0 if self.exclusive else GRACE_S
        late = [p for p in self._pending.values() if p.deadline + grace_s <= now]
        if late:
            what = "a call missed its deadline" if self.exclusive else "its worker process did not answer any more"
            self.kill(f"{what} ({late[0].timeout_s:.3g} s)")

    def kill(self, cause: str) -> None:
        """End the process and all that it started, at once. Calls past their deadline get a DeadlineError, others an
        EnvironmentFailedError that tells the cause."""
        if not self.ended:
            self.cause = self.cause or cause
            self._end()

    async def stop(self) -> None:
        """End the process and wait until it is gone."""
        self.kill("it was stopped")
        await self._gone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports derive from none of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except InvalidRequestError:
            self.kill("it wrote into the socket that it is controlled by")
            return
        pending = self._pending
        for frame in frames:
            waiting = pending.pop(frame.request, None)
            if waiting is not None:
                waiting.on_answer(frame.kind, frame.body)
            elif frame.op == HELLO:
                self._hello(frame.kind, frame.body)
            elif frame.op == RETIRE:
                self.retiring = True

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _hello(self, kind: int, body: bytes) -> None:
        if self._ready.done():
            return
        if kind == ERROR:
            self._ready.set_exception(error_of(body))
        else:
            self.info = unpack(body)
            self._ready.set_result(None)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self._transport.is_closing():
            for piece in batches(out, 2**20):
                self._transport.write(piece)

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self._transport is not None:
            self._transport.abort()
        self._kill_group()
        self._reap(REAP_TRIES)

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _reap(self, tries: int) -> None:
        """A killed process is gone in milliseconds; until then its calls wait, so that the error can tell how it ended."""
        if self._process is not None and self._process.poll() is None and tries:
            self._loop.call_later(REAP_S, self._reap, tries - 1)
            return
        self._kill_group()  # what it had started, if it died by itself
        if not self.cause:
            self.cause = f"its worker process {_ending(self._process.returncode if self._process else None)}"
        if not self._ready.done():
            self._ready.set_exception(
                EnvironmentLoadError(f"loading the environment's class failed: {self.cause}", hint="its output says why")
            )
            self._ready.exception()
        self._fail_pending(time.monotonic())
        if not self._gone.done():
            self._gone.set_result(None)
        self._on_end(self)

    def _fail_pending(self, now: float) -> None:
        pending, self._pending = self._pending, {}
        lost = problem_body(EnvironmentFailedError(f"the session was lost: {self.cause}"))
        for one in pending.values():
            body = lost
            if now and one.deadline <= now:
                what = f"{self.info.get('name', 'the environment')}.{NAMES.get(one.op, 'call')}"
                body = problem_body(DeadlineError(f"{what} did not return within {one.timeout_s:.3g} s"))
            one.on_answer(ERROR, body)


def _ending(code: int | None) -> str:
    if code is None:
        return "is gone"
    if code == BLOCKED:
        return "was ended: an async method blocked its event loop beyond its deadline"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
