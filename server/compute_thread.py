"""A thread that computes behind a thread-safe inbox and outbox, as a server's worker and the engine of a split server do."""

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

import torch

from opentinker.errors import DeadlineError, OpenTinkerError, ServerLostError

log = logging.getLogger(__name__)
BuiltT = TypeVar("BuiltT")
WorkT = TypeVar("WorkT")
AnswerT = TypeVar("AnswerT")


class ComputeThread(ABC, Generic[BuiltT, WorkT, AnswerT]):
    """Its subclass says what the thread does. Other threads put work into `_inbox` and take answers by `collect`.

    `build` makes what it computes with; it runs in the thread, because models keep per-thread state.
    """

    role: ClassVar[str]
    """What the server calls it."""
    loads: ClassVar[str]
    """What `build` makes."""

    def __init__(self, build: Callable[[], BuiltT]) -> None:
        self._build = build
        self._changed = threading.Condition()
        """Held by whoever uses the boxes or says how the thread is; told of every change."""
        self._inbox: deque[WorkT] = deque()
        self._outbox: list[AnswerT] = []
        self._ready = threading.Event()
        self._stopping = False
        self._ended = False
        self._error: BaseException | None = None
        self._build_s = 0.0
        """How long `build` took."""
        self._thread = threading.Thread(target=self._run, name=self.role, daemon=True)

    def collect(self, timeout_s: float) -> list[AnswerT]:
        """Answers since the last call; waits up to `timeout_s` for the first.

        Raises:
            ServerLostError: the thread has stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._ended or self._error is not None, timeout_s)
            if not self._outbox:
                self._check()
            answers, self._outbox = self._outbox, []
            return answers

    def stop(self, timeout_s: float = 60.0) -> None:
        """End the thread after what it does now; idempotent.

        Raises:
            DeadlineError: it is still busy after `timeout_s`.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the server's {self.role} did not end within {timeout_s:.0f} s")

    def _await_built(self, timeout_s: float) -> None:
        """Start the thread, once, and wait until it takes work.

        Raises:
            DeadlineError: it took longer than `timeout_s`.
            Whatever `build` raises.
        """
        if self._thread.ident is None:
            self._thread.start()
        if not self._ready.wait(timeout_s):
            raise DeadlineError(f"{self.loads} did not load within {timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def _check(self) -> None:
        """Raises: ServerLostError when there is nobody who would answer."""
        if isinstance(self._error, ServerLostError):
            raise self._error
        if self._error is not None:
            raise ServerLostError(f"the server's {self.role} failed: {self._error!r}")
        if self._stopping:
            raise ServerLostError(f"the server's {self.role} was stopped")

    def _give(self, answers: Sequence[AnswerT]) -> None:
        if answers:
            with self._changed:
                self._outbox.extend(answers)
                self._changed.notify_all()

    def _run(self) -> None:
        # OMP_NUM_THREADS is this process's share of the cores, if whoever started it gave it one.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
        started = time.monotonic()
        try:
            built = self._build()
            self._build_s = time.monotonic() - started
            self._take(built)
        except BaseException as error:
            log.exception("%s did not load", self.loads)
            self._error = error
            self._ready.set()
            return
        self._ready.set()
        try:
            self._work()
        except BaseException as error:
            log.exception("the thread of the server's %s failed", self.role)
            self._error = error
        finally:
            try:
                self._close()
            finally:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()

    @abstractmethod
    def _take(self, built: BuiltT) -> None:
        """Get ready to work with what was built."""

    @abstractmethod
    def _work(self) -> None:
        """Work until `_stopping`."""

    @abstractmethod
    def _close(self) -> None:
        """Close what was built."""


def explained(error: Exception, kind: type[OpenTinkerError], what: str) -> OpenTinkerError:
    """Errors of ours as they are; anything else is logged and wrapped."""
    if isinstance(error, OpenTinkerError):
        return error
    log.error("%s", what, exc_info=error)
    return kind(f"{what}: {error!r}", hint="the server's log has the traceback: `opentinker logs JOB --server`")
