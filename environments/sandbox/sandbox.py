"""A Python interpreter behind walls: it keeps its variables between calls, and nothing that it does reaches the machine."""

import base64
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from opentinker.environments.sandbox.layout import GUEST, PACKAGES, bubblewrap_arguments, layout
from opentinker.environments.sandbox.seccomp import filter_program
from opentinker.errors import ConfigError

logger = logging.getLogger(__name__)

Walls = Literal["auto", "namespaces", "bubblewrap", "unsafe_none"]
"""'auto' takes namespaces, or bubblewrap where only that may make them; 'unsafe_none' gives the code this user's rights."""
WALLS: tuple[Walls, ...] = ("auto", "namespaces", "bubblewrap", "unsafe_none")
_HERE = os.path.dirname(os.path.abspath(__file__))
_START_TIMEOUT_S = 30.0
_GRACE_S = 0.5
"""After its time, code first gets an exception, which keeps its variables; this much later the sandbox is killed."""
_TAIL_BYTES = 1000
_FLOOD_BYTES = 16 << 20
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/nowhere",
    # Threads of numeric libraries would each reserve memory for as many cores as the machine has.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class SandboxLimits:
    """What the code of one sandbox may use. There is one process in it (threads are allowed), so these are totals."""

    memory_bytes: int = 512 << 20
    """Address space."""
    cpu_s: int = 60
    """Processor time of all calls together."""
    tmp_bytes: int = 16 << 20
    """Size of /tmp, the only place that can be written to; it is memory."""
    tmp_files: int = 256
    """Files in /tmp (namespaces only: bubblewrap cannot limit it)."""
    threads: int = 32
    open_files: int = 64
    output_bytes: int = 16_000
    """Output of one call that is kept; the rest is dropped as it comes."""
    code_bytes: int = 100_000
    """Longest code of one call."""


@dataclass(frozen=True)
class Execution:
    """What a call did.

    `outcome` is 'ok', 'error' (an exception, shown in `output`), 'timeout' (stopped, its variables are kept), 'killed' (it
    would not stop) or 'died' (the interpreter ended, by a limit or by itself). After the last two all variables are gone.
    """

    output: str
    outcome: Literal["ok", "error", "timeout", "killed", "died"]
    seconds: float
    truncated: bool = False


class PythonSandbox:
    """One interpreter, started by the first call and again after it was lost. Close it; its owner's death closes it, too.

    Not for several threads at once, except `close`.

    Raises:
        ConfigError: there is no sandbox to be had on this machine.
    """

    def __init__(self, walls: Walls = "auto", limits: SandboxLimits | None = None, packages: Sequence[str] = ()) -> None:
        self._limits = limits or SandboxLimits()
        self._walls = usable_walls(walls)
        self._packages = tuple(packages)
        layout(self._packages)
        self._guest: _Guest | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, code: str, timeout_s: float = 5.0) -> Execution:
        """Execute `code`; the value of a last expression is printed, as in a notebook.

        Raises:
            ConfigError: the sandbox does not start, or was closed.
        """
        start = time.monotonic()
        if len(code.encode(errors="replace")) > self._limits.code_bytes:
            return Execution(f"the code is longer than {self._limits.code_bytes:,} bytes", "error", 0.0)
        if self._guest is None:
            if self._closed:
                raise ConfigError("the sandbox was closed")
            self._guest = _Guest(self._walls, self._limits, self._packages)
            if self._closed:  # meanwhile, by another thread
                self.close()
                raise ConfigError("the sandbox was closed")
        guest = self._guest
        output = _Output(self._limits.output_bytes)
        reply = guest.ask({"code": code, "timeout_s": timeout_s}, output, timeout_s + _GRACE_S)
        outcome: Any = reply["outcome"] if reply and "outcome" in reply else None
        if outcome not in ("ok", "error", "timeout"):
            outcome = "killed" if reply is None else "died"
            guest.close()
            self._guest = None
        return Execution(output.text(), outcome, time.monotonic() - start, output.dropped > 0)

    def close(self) -> None:
        """End whatever runs in it. Returns when it is gone."""
        self._closed = True
        guest, self._guest = self._guest, None
        if guest is not None:
            guest.close()


class _Output:
    """The first bytes of a stream and its last ones, however many there are."""

    def __init__(self, limit: int) -> None:
        self._limit, self._head, self._tail, self.dropped = limit, bytearray(), b"", 0

    def add(self, data: bytes) -> None:
        room = max(0, self._limit - _TAIL_BYTES - len(self._head))
        self._head += data[:room]
        rest = self._tail + data[room:]
        self._tail = rest[-_TAIL_BYTES:]
        self.dropped += len(rest) - len(self._tail)

    def text(self) -> str:
        gap = f"\n[... {self.dropped:,} bytes dropped ...]\n".encode() if self.dropped else b""
        return (bytes(self._head) + gap + self._tail).decode(errors="replace")


class _Guest:
    """The processes of one sandbox, and the pipes to them."""

    def __init__(self, walls: Walls, limits: SandboxLimits, packages: tuple[str, ...]) -> None:
        where = layout(packages)
        system_calls = b"" if walls == "unsafe_none" else filter_program()
        replies, told = os.pipe()
        folder = tempfile.mkdtemp(prefix="opentinker-unsafe-") if walls == "unsafe_none" else None
        try:
            guest = [where.python, "-I", "-S", "-B", GUEST if folder is None else f"{_HERE}/guest.py", str(told)]
            config: dict[str, Any] = {
                "walls": "none" if folder else walls,
                "replies": told,
                "guest": guest,
                "environment": _ENVIRONMENT if folder is None else {**_ENVIRONMENT, "HOME": folder},
                "binds": where.binds,
                "covered": where.covered,
                "links": where.links,
                "tmp_bytes": limits.tmp_bytes,
                "tmp_files": limits.tmp_files,
                "folder": folder,
            }
            if walls == "bubblewrap":
                config["bwrap"] = bubblewrap_arguments(where, _ENVIRONMENT, guest, limits.tmp_bytes)
            self._process = subprocess.Popen(
                [where.python, "-I", "-S", "-B", f"{_HERE}/warden.py", json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(told,),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(replies)
            raise
        finally:
            os.close(told)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._output, self._replies = self._process.stdin, self._process.stdout, replies
        self._unread, self._calls, self._lock = b"", 0, threading.Lock()
        for descriptor in (self._requests.fileno(), self._output.fileno(), replies):
            os.set_blocking(descriptor, False)
        self._finalizer = weakref.finalize(self, _end, self._process, replies, folder)
        said = _Output(2000)
        settings = {
            "limits": _rlimits(limits, walled=folder is None),
            "nice": 5,
            "filter": base64.b64encode(system_calls).decode(),
            "paths": [PACKAGES] if folder is None else [p for p in sys.path if p.endswith("-packages")],
        }
        reply = self.ask(settings, said, _START_TIMEOUT_S)
        if not reply or "ready" not in reply:
            self.close()
            cause = reply.get("refused") if reply else None
            late = f"it did not start within {_START_TIMEOUT_S:g} s"
            raise ConfigError(
                f"no sandbox by {walls}: {cause or said.text().strip() or (late if reply is None else 'it died')}"
            )

    def ask(self, request: dict[str, Any], output: _Output, timeout_s: float) -> dict[str, Any] | None:
        """Send a request, collect output until its answer comes. None: too late; {}: the guest is gone, or talks nonsense."""
        with self._lock:
            return {} if self._requests.closed else self._ask(request, output, timeout_s)

    def _ask(self, request: dict[str, Any], output: _Output, timeout_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        number, self._calls = self._calls, self._calls + 1
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._replies, select.POLLIN)
        poll.register(self._requests, select.POLLOUT)
        left = memoryview(json.dumps({"call": number, **request}).encode() + b"\n")
        while (remaining := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(remaining * 1000):
                if descriptor == self._requests.fileno():
                    try:
                        left = left[os.write(descriptor, left) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        poll.unregister(descriptor)
                elif descriptor == self._output.fileno():
                    if not self._drain(output, once=True):
                        poll.unregister(descriptor)
                else:
                    data = os.read(descriptor, 4096)
                    *lines, self._unread = (self._unread + data).split(b"\n")
                    answers = [_decoded(line) for line in lines]
                    # An answer to an earlier call is what is left of one that the code had forged.
                    current = [a for a in answers if a.get("call") == number]
                    nonsense = not data or {} in answers or len(self._unread) > 4096
                    if current or nonsense:
                        self._drain(output)
                        return {} if nonsense else current[0]
        return None

    def _drain(self, output: _Output, once: bool = False) -> bool:
        """Take what the pipe holds, and no more than it can hold, so that a flood ends. False: it is closed."""
        for _ in range(1 if once else 32):
            try:
                data = os.read(self._output.fileno(), 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            output.add(data)
        if output.dropped > _FLOOD_BYTES:  # it may block on a full pipe rather than keep this process busy
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """End it, and by that an `ask` in another thread."""
        self._process.terminate()
        with self._lock:
            self._finalizer()


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # the code wrote it
        return {}
    return value if isinstance(value, dict) else {}


def _end(process: "subprocess.Popen[bytes]", replies: int, folder: str | None) -> None:
    """The warden kills all inside when its input closes; should it not, its own death does."""
    assert process.stdin is not None
    assert process.stdout is not None
    for stream in (process.stdin, process.stdout):
        stream.close()
    os.close(replies)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _rlimits(limits: SandboxLimits, walled: bool) -> dict[str, int]:
    found = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_FSIZE": limits.tmp_bytes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_NPROC": limits.threads,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NICE": 0,
        "RLIMIT_RTPRIO": 0,
    }
    if not walled:  # it would count all processes of this user
        del found["RLIMIT_NPROC"]
    return found


_warned = threading.Event()
_trying, _working = threading.Lock(), set[Walls]()
_HINT = (
    "install bubblewrap, or allow user namespaces: sysctl user.max_user_namespaces above 0, and for a container "
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined (see environments/sandbox/README.md); "
    "sandbox='unsafe_none' runs the policy's code with all rights of your user"
)


def usable_walls(walls: Walls = "auto") -> Walls:
    """The walls that `walls` comes to on this machine, tried by starting a sandbox once per process.

    Raises:
        ConfigError: none works, or there are none of that name; the hint says how to get some.
    """
    if walls not in WALLS:
        raise ConfigError(f"there are no walls '{walls}'", hint=f"take one of {', '.join(WALLS)}")
    if walls == "unsafe_none":
        if not _warned.is_set():
            _warned.set()
            text = "NO SANDBOX: code that the policy writes runs with all rights of this user, its files and keys included"
            logger.warning(text)
            print(f"warning: {text} (sandbox='unsafe_none')", file=sys.stderr, flush=True)
        return walls
    causes = []
    candidates: tuple[Walls, ...] = ("namespaces", "bubblewrap") if walls == "auto" else (walls,)
    for candidate in candidates:
        cause = _tried(candidate)
        if cause is None:
            return candidate
        causes.append(cause)
    raise ConfigError("; ".join(causes), hint=_HINT)


def _tried(walls: Walls) -> str | None:
    """Why a sandbox with these walls does not start; None if it does. What worked once is not tried again."""
    if sys.platform != "linux":
        return f"no sandbox by {walls}: it needs Linux"
    with _trying:
        if walls not in _working:
            try:
                _Guest(walls, SandboxLimits(), ()).close()
            except ConfigError as error:
                return error.detail
            _working.add(walls)
    return None
