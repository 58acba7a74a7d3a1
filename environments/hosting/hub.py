"""Routes requests to the workers that host their sessions. Bodies pass through unread."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from opentinker.env.frames import (
    CLOSE,
    ERROR,
    FINALIZE,
    INFO,
    NO_SESSION,
    OK,
    RESET,
    STEP,
    TASKS,
    Frame,
    check_size,
    error_of,
    pack,
    problem_body,
)
from opentinker.env.worker_process import WorkerProcess
from opentinker.environments.hosting.pool import WorkerPool
from opentinker.environments.hosting.settings import HostSettings
from opentinker.environments.hosting.stats import Counts, Statistics
from opentinker.errors import (
    ConflictError,
    DeadlineError,
    EnvironmentFailedError,
    InvalidRequestError,
    NotFoundError,
    OpenTinkerError,
    RateLimitedError,
    UnavailableError,
)

REAP_EVERY_S = 1.0
ORPHAN_S = 60.0
"""A client's sessions end this long after its last stream broke."""
CLOSE_S = 5.0
MAX_ENDED = 10_000
RETRY_AFTER_S = 1.0

Reply = Callable[[int, bytes], None]
"""Gets the kind of the answer and its body."""
logger = logging.getLogger(__name__)


class HostedSession:
    """Where a session is."""

    __slots__ = ("client", "counts", "job", "pending", "started", "turns", "used", "worker")

    def __init__(self, worker: WorkerProcess | None, job: str, client: str, counts: Counts) -> None:
        self.worker = worker
        self.job = job
        self.client = client
        self.counts = counts
        self.pending = self.turns = 0
        self.started = False
        self.used = time.monotonic()


class Hub:
    """The sessions of one server."""

    def __init__(self, reference: dict[str, Any], settings: HostSettings) -> None:
        self.settings = settings
        self.statistics = Statistics()
        self.info: dict[str, Any] = {}
        self.draining = False
        self.pool = WorkerPool(reference, settings, self._lost)
        self._sessions: dict[bytes, HostedSession] = {}
        self._ended: OrderedDict[bytes, bytes] = OrderedDict()
        """Problem bodies of sessions that ended without their client's doing."""
        self._clients: dict[str, int] = {}
        self._left: dict[str, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    async def start(self) -> None:
        """Start the workers.

        Raises:
            EnvironmentLoadError: the class cannot be loaded.
        """
        info = await self.pool.start()
        isolation = "process" if self.pool.exclusive else "thread"
        self.info = {**info, "isolation": isolation, "max_sessions": self.settings.max_sessions}
        self._task(self._reap())

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no new sessions, let those that are open go on for up to `drain_s`, then close them and end all workers."""
        self.draining = True
        ends = time.monotonic() + drain_s
        while self._sessions and time.monotonic() < ends:  # noqa: ASYNC110 - sessions end in many ways
            await asyncio.sleep(0.05)
        closing = [asyncio.ensure_future(self._closed(key)) for key in list(self._sessions)]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for task in (*self._tasks, *closing):
            task.cancel()
        await asyncio.gather(*self._tasks, *closing, return_exceptions=True)
        await self.pool.stop()

    def connected(self, client: str) -> None:
        """A client opened a stream."""
        self._clients[client] = self._clients.get(client, 0) + 1
        self._left.pop(client, None)

    def disconnected(self, client: str) -> None:
        """One of a client's streams ended."""
        left = self._clients.get(client, 0) - 1
        if left > 0:
            self._clients[client] = left
        else:
            self._clients.pop(client, None)
            self._left[client] = time.monotonic()

    def next_turn(self, session: bytes) -> int:
        """The index of a session's next step; 0 if it is not known."""
        found = self._sessions.get(session)
        return found.turns if found is not None else 0

    async def ask(self, op: int, session: bytes, index: int, timeout_s: float, body: bytes, job: str) -> tuple[int, bytes]:
        """As `handle`, and waits for the answer: kind and body."""
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def reply(kind: int, answer: bytes) -> None:
            if not future.done():
                future.set_result((kind, answer))

        self.handle(Frame(op, 0, index, 0, session, timeout_s, body), job, "", reply)
        return await future

    def handle(self, frame: Frame, job: str, client: str, reply: Reply) -> None:
        """Answer a request, now or later, once."""
        try:
            if frame.op == STEP or frame.op == FINALIZE:
                self._forward(frame, reply)
            elif frame.op == RESET:
                self._reset(frame, job, client, reply)
            elif frame.op == CLOSE:
                self._close(frame, reply)
            elif frame.op == TASKS:
                self._forward_any(frame, reply)
            elif frame.op == INFO:
                reply(OK, pack(self.info))
            else:
                raise InvalidRequestError(f"there is no operation {frame.op}")
        except OpenTinkerError as error:
            counts = self.statistics.of(job)
            counts.refused += 1
            self.statistics.total.refused += 1
            reply(ERROR, problem_body(error))

    def _forward(self, frame: Frame, reply: Reply) -> None:
        session = self._sessions.get(frame.session)
        if session is None:
            if (problem := self._ended.get(frame.session)) is not None:
                reply(ERROR, problem)
                return
            raise NotFoundError("there is no such session", hint="it was closed, or is another server's")
        check_size(frame.body, self.settings.max_body_bytes, "an action")
        if session.worker is None:
            raise ConflictError("the session's reset is still running")
        session.pending += 1
        is_step = frame.op == STEP
        turn = frame.turn if is_step else session.turns

        def answered(kind: int, body: bytes) -> None:
            session.pending -= 1
            session.used = time.monotonic()
            if kind == ERROR:
                self._count_error(session, body)
            elif turn < session.turns:
                pass  # an answer that was repeated
            elif is_step:
                session.turns = turn + 1
                session.counts.steps += 1
                self.statistics.total.steps += 1
            else:
                session.counts.finalized += 1
                self.statistics.total.finalized += 1
            reply(kind, body)

        session.worker.call(frame.op, frame.session, frame.turn, self._timeout(frame), frame.body, answered)

    def _reset(self, frame: Frame, job: str, client: str, reply: Reply) -> None:
        if (problem := self._ended.get(frame.session)) is not None:
            reply(ERROR, problem)
            return
        check_size(frame.body, self.settings.max_body_bytes, "a task")
        session = self._sessions.get(frame.session)
        if session is not None:
            if session.worker is None:
                self._task(self._reset_joined(session, frame, reply))
            else:
                self._send_reset(session, frame, reply)
            return
        if frame.session == NO_SESSION:
            raise InvalidRequestError("a session's id must not be zero")
        if self.draining:
            raise UnavailableError("the server is shutting down", hint="another server has to take the session")
        if len(self._sessions) >= self.settings.max_sessions:
            raise RateLimitedError(
                f"all {self.settings.max_sessions} sessions are in use",
                hint="close sessions, wait, or start the server with a larger --max-sessions",
                retry_after_s=RETRY_AFTER_S,
            )
        counts = self.statistics.of(job)
        for one in (counts, self.statistics.total):
            one.sessions += 1
        session = self._sessions[frame.session] = HostedSession(self.pool.pick(), job, client, counts)
        if session.worker is not None:
            self._send_reset(session, frame, reply)
        else:
            self._task(self._reset_later(session, frame, reply))

    async def _reset_later(self, session: HostedSession, frame: Frame, reply: Reply) -> None:
        try:
            session.worker = await self.pool.wait_for_one(self._timeout(frame))
        except UnavailableError as error:
            self._sessions.pop(frame.session, None)
            reply(ERROR, problem_body(error))
            return
        if self._sessions.get(frame.session) is session:
            self._send_reset(session, frame, reply)
        else:
            self.pool.release(session.worker, clean=True)
            reply(ERROR, problem_body(ConflictError("the session was closed")))

    async def _reset_joined(self, session: HostedSession, frame: Frame, reply: Reply) -> None:
        """A repeated reset, while the first one waits for its worker."""
        while session.worker is None and self._sessions.get(frame.session) is session:  # noqa: ASYNC110 - rare
            await asyncio.sleep(0.05)
        if session.worker is not None:
            self._send_reset(session, frame, reply)
        else:
            reply(ERROR, self._ended.get(frame.session) or problem_body(ConflictError("the session was closed")))

    def _send_reset(self, session: HostedSession, frame: Frame, reply: Reply) -> None:
        session.pending += 1
        worker = session.worker
        assert worker is not None

        def answered(kind: int, body: bytes) -> None:
            session.pending -= 1
            session.used = time.monotonic()
            if kind == ERROR:
                self._count_error(session, body)
                if not session.started:
                    self._end(frame.session, body)
            elif not session.started:
                session.started = True
                session.counts.resets += 1
                self.statistics.total.resets += 1
            reply(kind, body)

        worker.call(RESET, frame.session, frame.turn, self._timeout(frame), frame.body, answered)

    def _close(self, frame: Frame, reply: Reply) -> None:
        self._ended.pop(frame.session, None)
        session = self._sessions.pop(frame.session, None)
        if session is None or session.worker is None:
            reply(OK, b"")
            return
        self._close_in_worker(frame.session, session, self._timeout(frame), reply)

    def _close_in_worker(self, key: bytes, session: HostedSession, timeout_s: float, reply: Reply) -> None:
        worker = session.worker
        assert worker is not None
        busy = session.pending > 0

        def answered(kind: int, body: bytes) -> None:
            self.pool.release(worker, clean=kind == OK and not busy)
            reply(kind, body)

        worker.call(CLOSE, key, 0, timeout_s, b"", answered)

    async def _closed(self, key: bytes) -> None:
        await self.ask(CLOSE, key, 0, CLOSE_S, b"", "")

    def _forward_any(self, frame: Frame, reply: Reply) -> None:
        check_size(frame.body, self.settings.max_body_bytes, "a request")
        self._task(self._tasks_made(frame, reply))

    async def _tasks_made(self, frame: Frame, reply: Reply) -> None:
        """Where the worker ends over it, whoever's fault that is, another one is asked, once."""
        ends = time.monotonic() + self._timeout(frame)
        answer = problem_body(UnavailableError("the server is shutting down"))
        try:
            for _ in range(2):
                worker = await self.pool.for_tasks(ends - time.monotonic())
                left_s = max(0.001, ends - time.monotonic())
                try:
                    kind, answer = await worker.request(frame.op, frame.session, frame.turn, left_s, frame.body)
                finally:
                    self.pool.tasks_done(worker)
                if kind != ERROR:
                    reply(kind, answer)
                    return
                if not worker.ended or isinstance(error_of(answer), DeadlineError):
                    break
                answer = problem_body(EnvironmentFailedError(f"the worker that was asked for tasks was lost: {worker.cause}"))
        except UnavailableError as error:
            answer = problem_body(error)
        except asyncio.CancelledError:
            reply(ERROR, answer)
            raise
        reply(ERROR, answer)

    def _end(self, key: bytes, problem: bytes) -> None:
        """The session ends without its client's doing; the next request learns why."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self._ended[key] = problem
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if session.worker is not None and not session.worker.ended:
            self._close_in_worker(key, session, CLOSE_S, lambda kind, body: None)

    def _lost(self, worker: WorkerProcess) -> None:
        problem = problem_body(EnvironmentFailedError(f"the session was lost: {worker.cause}"))
        for key in [key for key, session in self._sessions.items() if session.worker is worker]:
            session = self._sessions[key]
            for one in (session.counts, self.statistics.total):
                one.lost += 1
            self._end(key, problem)

    def _count_error(self, session: HostedSession, body: bytes) -> None:
        error = error_of(body)
        for one in (session.counts, self.statistics.total):
            if isinstance(error, DeadlineError):
                one.deadlines += 1
            elif isinstance(error, EnvironmentFailedError):
                one.environment_errors += 1
            else:
                one.refused += 1

    def _timeout(self, frame: Frame) -> float:
        longest = self.settings.call_timeout_s
        return min(frame.timeout_s, longest) if frame.timeout_s > 0 else longest

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            now, idle_s = time.monotonic(), self.settings.idle_timeout_s
            for client in [c for c, since in self._left.items() if now - since > 10 * ORPHAN_S]:
                del self._left[client]
            for key, session in list(self._sessions.items()):
                if session.pending or session.worker is None:
                    continue
                why = ""
                if now - session.used > idle_s:
                    why = f"the session was closed: it got no request for {idle_s:.0f} s"
                elif now - max(session.used, self._left.get(session.client, now)) > ORPHAN_S:
                    why = "the session was closed: its client was gone"
                if why:
                    for one in (session.counts, self.statistics.total):
                        one.idle_closed += 1
                    self._end(key, problem_body(EnvironmentFailedError(why, hint="env serve --idle-timeout sets this time")))

    def _task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
