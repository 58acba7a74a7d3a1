"""Ends user code that nobody waits for any more, by an exception raised in its thread.

CPython lets one thread have an exception raised in another (`PyThreadState_SetAsyncExc`), at the next Python instruction that
the other one executes. That must hit the abandoned call and nothing else: not the code that called it, nor the thread's next.
"""

import ctypes
import heapq
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
REPEATS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before an exception is raised again in a call that caught it, or lost it in a destructor. They grow, so that what
tidies up has time to."""

log = logging.getLogger(__name__)


class Abandoned(BaseException):
    """Raised in user code whose deadline has passed. Like KeyboardInterrupt it is no `Exception`, so that code which catches
    those does not catch this."""


def raise_in_thread(ident: int) -> None:
    """Have `Abandoned` raised in the thread with this identity."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Abandoned))


def stack_of(ident: int) -> list[tuple[str, int]]:
    """Files and lines that a thread is executing now, the innermost last; empty if there is no such thread."""
    frame = sys._current_frames().get(ident)
    lines: list[tuple[str, int]] = []
    while frame is not None:
        lines.insert(0, (frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines


class Door:
    """Lets exceptions into one thread while, and only while, it runs a given call.

    The lock is free while the thread is inside a call; whoever throws something in holds it meanwhile. `run` takes it when it
    leaves the call, so nothing is thrown from then on; what was thrown before is raised right there at the latest. No exception
    can come between the call and the taking: CPython raises them where a function begins, at backward jumps, and after calls,
    and there is none of these between the two.
    """

    def __init__(self, throw: Callable[[int], None] = raise_in_thread) -> None:
        self._throw = throw
        self._lock = threading.Lock()
        self._lock.acquire()
        self._ident = 0
        self._inside: object = None

    def run(self, ticket: object, function: Callable[[], T]) -> T:
        """Call `function` in this thread; `throw(ticket)` reaches it until it has returned.

        Raises:
            whatever `function` raises; Abandoned.
        """
        lock = self._lock
        self._ident, self._inside = threading.get_ident(), ticket
        try:
            lock.release()
            return function()
        finally:
            lock.acquire()
            self._inside = None

    def throw(self, ticket: object) -> bool:
        """Raise `Abandoned` in the ticket's call; False if the thread is not inside that call."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._inside is not ticket:
                return False
            self._throw(self._ident)
            return True
        finally:
            self._lock.release()


class Stopper:
    """Throws at calls again and again until they end or the pauses are used up. Its thread lives while there are any."""

    def __init__(self, repeats_s: Sequence[float] = REPEATS_S) -> None:
        self._repeats_s = repeats_s
        self._wake = threading.Condition()
        self._due: list[tuple[float, int, int, Door, object]] = []
        self._count = 0
        self._running = False

    def stop(self, door: Door, ticket: object) -> None:
        """Throw now, and again later for as long as the call goes on."""
        if door.throw(ticket):
            self._later(door, ticket, 0)

    def _later(self, door: Door, ticket: object, attempt: int) -> None:
        if attempt == len(self._repeats_s):
            log.warning(
                "environment_call_goes_on throws=%d hint=%r",
                attempt + 1,
                "it is in a blocking function or catches BaseException; execution = 'process' lets it be killed",
            )
            return
        with self._wake:
            self._count += 1  # keeps what cannot be compared out of comparisons
            heapq.heappush(self._due, (time.monotonic() + self._repeats_s[attempt], self._count, attempt, door, ticket))
            if self._running:
                self._wake.notify()
            else:
                self._running = True
                threading.Thread(target=self._run, name="opentinker-stopper", daemon=True).start()

    def _run(self) -> None:
        while (due := self._next()) is not None:
            door, ticket, attempt = due
            if door.throw(ticket):
                self._later(door, ticket, attempt + 1)

    def _next(self) -> tuple[Door, object, int] | None:
        """Waits for the next one that is due; None, and no thread any more, when there is none."""
        with self._wake:
            while self._due:
                left = self._due[0][0] - time.monotonic()
                if left <= 0:
                    _, _, attempt, door, ticket = heapq.heappop(self._due)
                    return door, ticket, attempt
                self._wake.wait(left)
            self._running = False
            return None
