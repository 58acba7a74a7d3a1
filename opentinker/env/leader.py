"""Runs an environment's plain code in a worker process: calls that return at once cost no thread switch, one that hangs stalls
nobody.

One thread at a time leads: it reads requests and runs their calls itself, one after the other. A monitor looks at it every few
milliseconds. When it finds the leader in the same call as the last time, it gives the lead, with what waits, to another thread,
and the call goes on alone. A kind of call that turns out to be slow gets a thread of its own from the start.
"""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from opentinker.env.frames import Frame
from opentinker.env.stopping import Abandoned, Door, Stopper

TICK_S = 0.004
"""How often the monitor looks, and so about how long a slow call holds up those behind it."""
CALM_TICK_S = 0.01
"""The same while the leader is in no call."""
IDLE_TICKS = 50
SLOW_S = 0.001
"""Calls of a kind that takes longer than this on average get threads."""
PROBE_EVERY = 64
"""Of a slow kind, one in so many is tried as if it were fast, to find out that it became so."""
FLUSH_S = 0.001
"""Finished answers wait no longer than this for the next ones."""
HUNG_CHECK_S = 1.0
DEAF_S = 10.0
"""An event loop that does not even notice a cancellation for so long is blocked, by whatever it is."""
MAX_HUNG = 32
"""Calls that still run although their deadline is over, before a worker asks to be replaced."""


_ENDED = object()
BLOCKED = 70
"""Exit code of a worker whose event loop is blocked for good by a call that missed its deadline."""


class Call:
    """One run of user code. `run` gives what is to be answered; `expire` is what is answered when the deadline comes first.
    Whichever is first calls `settle`, the other is ignored."""

    __slots__ = (
        "abandoned",
        "blocks",
        "cpu_s",
        "deadline",
        "door",
        "expire",
        "finished",
        "key",
        "late_since",
        "native",
        "on_loop",
        "run",
        "settle",
    )

    def __init__(
        self,
        key: int,
        run: Callable[[], Any],
        settle: Callable[[Any], bytes],
        expire: Callable[[], Any],
        timeout_s: float,
    ) -> None:
        self.key = key
        self.run = run
        self.settle = settle
        self.expire = expire
        self.deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
        self.finished = self.abandoned = self.on_loop = False
        self.door: Door | None = None
        """The way into its thread."""
        self.native = 0
        """The system's number of its thread."""
        self.late_since = 0.0
        self.blocks = False
        self.cpu_s = 0.0


class Executor:
    """Owns the threads of a worker process. `begin` turns a frame into a call, or None if there is nothing to run; it and every
    `settle` are called under `lock`."""

    def __init__(
        self,
        read: Callable[[], list[Frame]],
        send: Callable[[bytes], None],
        begin: Callable[[Frame], Call | None],
        retire: Callable[[], bytes],
    ) -> None:
        self.lock = threading.Lock()
        self._read = read
        self._send = send
        self._begin = begin
        self._retire = retire
        self._queue: deque[Frame] = deque()
        self._out: list[bytes] = []
        self._term = 0
        self._current: Call | None = None
        self._leader = (Door(), 0)
        self._stopper = Stopper()
        self._running: set[Call] = set()
        self._hung: list[Call] = []
        self._retired = False
        self._cost_s: dict[int, float] = {}
        self._count = itertools.count()
        self._idle: list[SimpleQueue[Callable[[], bool]]] = []
        self._wake = threading.Event()
        self._monitor_sleeps = False

    def start(self) -> None:
        """Begin to lead and to watch."""
        self._spawn(lambda: self._lead(0))
        threading.Thread(target=self._watch, name="monitor", daemon=True).start()

    def emit(self, answer: bytes) -> None:
        """Send an answer with the next ones; under `lock`."""
        if answer:
            self._out.append(answer)

    def track(self, call: Call) -> None:
        """A call that runs elsewhere (on an event loop) is watched for its deadline; under `lock`."""
        self._running.add(call)
        self._rouse()

    def finish(self, call: Call, outcome: Any) -> None:
        """What a tracked call gave, to be flushed soon; ignored when its deadline was first."""
        with self.lock:
            self._conclude(call, outcome)

    def flush(self) -> None:
        """Send what is finished."""
        if self._out:
            with self.lock:
                out, self._out = self._out, []
            if out:
                self._send(b"".join(out))

    def _lead(self, term: int) -> bool:
        """The leader's life. False: the thread has nothing left to do and may take other work."""
        queue = self._queue
        clock = time.perf_counter
        door = Door()
        self._leader = (door, threading.get_native_id())
        flushed = clock()
        while True:
            if not queue:
                self.flush()
                queue.extend(self._read())
                if self._monitor_sleeps:
                    self._wake.set()
                flushed = clock()
                continue
            frame = queue.popleft()
            with self.lock:
                call = self._begin(frame)
                if call is None:
                    continue
                if self._is_slow(call.key):
                    self._running.add(call)
                else:
                    self._current = call
            if self._current is not call:
                self._spawn(lambda call=call: self._alone(call))  # type: ignore[misc]
                continue
            began = clock()
            outcome = _outcome(door, call)
            ended = clock()
            if outcome is not None:  # None: it goes on elsewhere
                call.finished = True
            with self.lock:
                self._learn(call.key, ended - began)
                if self._term != term:
                    self._conclude(call, outcome)
                    break
                self._current = None
                if outcome is not None:
                    self._out.append(call.settle(outcome))
            if ended - flushed > FLUSH_S:
                self.flush()
                flushed = ended
        self.flush()
        return not call.abandoned

    def _alone(self, call: Call) -> bool:
        call.door, call.native = Door(), threading.get_native_id()
        began = time.perf_counter()
        outcome = _outcome(call.door, call)
        if outcome is not None:
            call.finished = True
        with self.lock:
            self._learn(call.key, time.perf_counter() - began)
            self._conclude(call, outcome)
        self.flush()
        return not call.abandoned

    def _conclude(self, call: Call, outcome: Any) -> None:
        if outcome is not None and call in self._running:
            self._running.discard(call)
            self._out.append(call.settle(outcome))

    def _is_slow(self, key: int) -> bool:
        return self._cost_s.get(key, 0.0) > SLOW_S and next(self._count) % PROBE_EVERY != 0

    def _learn(self, key: int, seconds: float) -> None:
        before = self._cost_s.get(key, 0.0)
        self._cost_s[key] = before + 0.2 * (min(seconds, 10 * SLOW_S) - before)

    def _spawn(self, work: Callable[[], bool]) -> None:
        try:
            self._idle.pop().put(work)
        except IndexError:
            inbox: SimpleQueue[Callable[[], bool]] = SimpleQueue()
            inbox.put(work)
            threading.Thread(target=self._serve, args=(inbox,), name="environment", daemon=True).start()

    def _serve(self, inbox: "SimpleQueue[Callable[[], bool]]") -> None:
        while inbox.get()():
            self._idle.append(inbox)

    def _watch(self) -> None:
        seen: Call | None = None
        idle, checked = 0, time.monotonic()
        while True:
            time.sleep(TICK_S if seen is not None else CALM_TICK_S)
            current = self._current
            if current is not None and current is seen:
                self._depose(current)
            seen = current
            now = time.monotonic()
            if self._running:
                self._expire(now)
            if self._hung and now - checked > HUNG_CHECK_S:
                checked = now
                self._look_at_hung(now)
            self.flush()
            idle = 0 if current is not None or self._running or self._hung else idle + 1
            if idle > IDLE_TICKS:
                self._monitor_sleeps = True
                if self._current is None and not self._running:
                    self._wake.wait()
                self._monitor_sleeps = False
                self._wake.clear()
                idle = 0

    def _rouse(self) -> None:
        if self._monitor_sleeps:
            self._wake.set()

    def _depose(self, call: Call) -> None:
        """The leader is in this call since the last look: somebody else leads, and the call goes on alone."""
        with self.lock:
            if self._current is not call:
                return
            self._current = None
            self._term += 1
            term = self._term
            if not call.on_loop:
                call.door, call.native = self._leader
            self._cost_s[call.key] = max(self._cost_s.get(call.key, 0.0), 2 * SLOW_S)
            self._running.add(call)
        self._spawn(lambda: self._lead(term))

    def _expire(self, now: float) -> None:
        with self.lock:
            late = [call for call in self._running if call.deadline <= now]
            for call in late:
                self._running.discard(call)
                call.abandoned = True
                self._out.append(call.settle(call.expire()))
                if not call.finished:
                    self._hung.append(call)
                    call.late_since = now
                    call.cpu_s = _cpu_s(call.native)
                    if call.door is not None:
                        self._stopper.stop(call.door, call)

    def _look_at_hung(self, now: float) -> None:
        with self.lock:
            self._hung = [call for call in self._hung if not call.finished]
            busy = False
            for call in self._hung:
                if now - call.late_since < HUNG_CHECK_S:
                    continue
                if call.on_loop:
                    self._look_at_loop(call, now)
                else:
                    before, call.cpu_s = call.cpu_s, _cpu_s(call.native)
                    busy = busy or call.cpu_s - before > 0.1 * HUNG_CHECK_S
            if not self._retired and (busy or len(self._hung) > MAX_HUNG):
                self._retired = True
                self._out.append(self._retire())

    def _look_at_loop(self, call: Call, now: float) -> None:
        """A late coroutine that does not let the event loop go on ends the process: all others there are stuck with it."""
        inside = call.door is not None and call.door.throw(call)
        if (inside and call.blocks) or now - call.late_since > DEAF_S:
            os._exit(BLOCKED)
        call.blocks = inside


def _outcome(door: Door, call: Call) -> Any:
    """What the call gives. One that was ended by force was answered before."""
    try:
        return door.run(call, call.run)
    except Abandoned:
        return _ENDED


def _cpu_s(native_thread: int) -> float:
    """Processor time of one of this process's threads; 0 where the system does not tell."""
    try:
        text = Path(f"/proc/self/task/{native_thread}/stat").read_text()
    except OSError:
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
