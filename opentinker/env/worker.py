"""The main program of a worker process, which hosts environments of one class for the process that started it."""

import ctypes
import importlib
import inspect
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from opentinker.env.environment import Environment
from opentinker.env.frames import ERROR, HELLO, NO_SESSION, OK, Frame, FrameReader, encode, pack, problem_body, unpack
from opentinker.env.hosted import Host
from opentinker.env.leader import Call, Executor
from opentinker.env.load import load_environment
from opentinker.errors import EnvironmentLoadError, OpenTinkerError

RECEIVE_BYTES = 256 * 2**10
_SET_PARENT_DEATH_SIGNAL = 1


def main(descriptor: int, parent: int) -> None:
    """Serve the socket until its other end is closed."""
    _die_with(parent)
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    reader = FrameReader()

    def read() -> list[Frame]:
        while True:
            try:
                data = connection.recv(RECEIVE_BYTES)
            except OSError:
                data = b""
            if not data:
                os._exit(0)
            if frames := reader.feed(data):
                return frames

    sending = threading.Lock()

    def send(data: bytes) -> None:
        with sending:
            try:
                connection.sendall(data)
            except OSError:
                os._exit(0)  # the parent is gone

    (first,) = read()
    reference = unpack(first.body)
    try:
        environment = load_reference(reference)
        _check_arguments(environment, reference.get("args") or {})
    except OpenTinkerError as error:
        send(_hello(ERROR, problem_body(error)))
        return
    host: Host

    def begin(frame: Frame) -> Call | None:
        return host.begin(frame)

    executor = Executor(read, send, begin, lambda: host.retire())
    host = Host(environment, executor, reference.get("args"))
    try:
        ready = pack(host.info())
    except OpenTinkerError as error:
        send(_hello(ERROR, problem_body(EnvironmentLoadError(f"{environment.__name__}: {error.detail}"))))
        return
    send(_hello(OK, ready))
    executor.start()
    threading.Event().wait()


def load_reference(reference: dict[str, Any]) -> type[Environment]:
    """The class that `opentinker.env.reference` wrote down.

    Raises:
        EnvironmentLoadError: it cannot be loaded here.
    """
    if name := reference.get("name"):
        return load_environment(str(name), Path(str(reference["base_dir"])) if reference.get("base_dir") else None)
    module, qualname = str(reference["module"]), str(reference["qualname"])
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise EnvironmentLoadError(
            f"a process of its own cannot load {module}.{qualname}: {type(error).__name__}: {error}",
            hint="put the class into a module or file that can be imported by itself",
        ) from error
    return load_environment(found)


def _check_arguments(environment: type[Environment], args: dict[str, Any]) -> None:
    """A server that could not construct anything must not start."""
    try:
        inspect.signature(environment).bind_partial(**args)
    except TypeError as error:
        raise EnvironmentLoadError(f"--args: {environment.__name__} does not take them: {error}") from None


def _hello(kind: int, body: bytes) -> bytes:
    return encode(HELLO, kind, 0, 0, NO_SESSION, 0.0, body)


def _die_with(parent: int) -> None:
    """End with the parent, even when user code holds the interpreter so that the closed socket is not noticed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
