"""Answers judged in processes that can be killed: a hostile one costs its deadline, and the next is judged as ever."""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from opentinker.errors import ConfigError, OpenTinkerError

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checker_process.py")
_START_TIMEOUT_S = 120.0
_WALL_FACTOR = 10.0
"""A process gets its deadline as processor time, so that a busy machine fails no honest answer; and this many times as long
by the clock, should it wait for something."""
_REMEMBERED = 4096
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")


Status = Literal["right", "wrong", "timeout", "error", "bad_gold"]


@dataclass(frozen=True)
class Verdict:
    """`timeout` and `error` say nothing about the answer; `bad_gold`: math-verify cannot read the right answer."""

    status: Status
    detail: str = ""


class _Process:
    """One checker. It ends when its input closes, and in the middle of a computation when that has had its time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._ready = False

    def check(self, gold: str, answer: str, timeout_s: float) -> Verdict:
        """Raises ConfigError if the checker does not start."""
        if not self._ready:
            reply = self._read(_START_TIMEOUT_S)
            if reply is None or reply["status"] != "ready":
                self.kill()
                raise ConfigError(
                    f"the checker of answers does not start: {(reply or {}).get('detail', 'it died')}",
                    hint="pip install 'opentinker[environments]'",
                )
            self._ready = True
        request = {"gold": gold, "answer": answer, "timeout_s": timeout_s}
        with suppress(BrokenPipeError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        reply = self._read(timeout_s * _WALL_FACTOR)
        if reply is not None:
            return Verdict(cast(Status, reply["status"]), reply.get("detail", ""))
        late = self._process.poll() is None and not self._ended_within(0.1)
        self.kill()
        if late or self._process.returncode == -signal.SIGPROF:
            return Verdict("timeout", f"it took more than {timeout_s:g} s")
        return Verdict("error", f"the checker died ({self._process.returncode})")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self, timeout_s: float) -> dict[str, str] | None:
        """The next line; None if it is late or the process is gone."""
        poll, line, end = select.poll(), b"", time.monotonic() + timeout_s
        poll.register(self._replies, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return None
            data = os.read(self._replies.fileno(), 65536)
            if not data:
                return None
            line += data
        found: dict[str, str] = json.loads(line)
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._requests, self._replies):
            with suppress(OSError):
                stream.close()


class AnswerChecker:
    """At most `size` processes, started when they are needed and then kept. For any number of threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._known: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._closed = False

    def check(self, gold: str, answer: str, timeout_s: float = 1.0) -> Verdict:
        """Whether `answer` is mathematically the same as `gold`; both LaTeX or plain text.

        Raises:
            ConfigError: the checker cannot be started.
        """
        key = (gold, answer)
        with self._changed:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        process = self._take()
        try:
            verdict = process.check(gold, answer, timeout_s)
        except OpenTinkerError:
            self._put(None, process)
            raise
        except BaseException:  # an interrupt: the process would answer the wrong question next
            process.kill()
            self._put(None, process)
            raise
        self._put(process if process.alive else None, process)
        # On a busy machine a right answer may run out of time: that says nothing about the next time.
        if verdict.status not in ("error", "timeout"):
            with self._changed:
                self._known[key] = verdict
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        return verdict

    def _take(self) -> _Process:
        with self._changed:
            while not self._idle and len(self._all) >= self._size and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ConfigError("the checker of answers was closed")
            process = self._idle.pop() if self._idle else _Process()
            self._all.add(process)
            return process

    def _put(self, usable: _Process | None, taken: _Process) -> None:
        with self._changed:
            if usable is None:
                self._all.discard(taken)
            elif self._closed:
                usable.kill()
            else:
                self._idle.append(usable)
            if usable is None and taken._ready and not self._closed:
                # Another one loads its libraries meanwhile; it is the last to be taken.
                fresh = _Process()
                self._all.add(fresh)
                self._idle.insert(0, fresh)
            self._changed.notify()

    def close(self) -> None:
        """End all processes, those that are busy too."""
        with self._changed:
            self._closed = True
            processes, self._all, self._idle = self._all, set(), []
            self._changed.notify_all()
        for process in processes:
            process.kill()


def shared_checker() -> AnswerChecker:
    """The checker that all environments of this process use."""
    return _shared(os.getpid())


@functools.cache
def _shared(pid: int) -> AnswerChecker:
    """Per process: a fork must not talk to its parent's checkers."""
    checker = AnswerChecker(size=max(2, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)))
    atexit.register(lambda: checker.close() if os.getpid() == pid else None)
    return checker
