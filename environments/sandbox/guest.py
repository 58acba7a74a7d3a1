"""Runs inside the sandbox: locks itself down, then executes the code it is sent, with one set of variables for all of it.

A program of its own with nothing but the standard library: the sandbox sees no other file of ours. It is trusted until it
executes the first code; what it answers after that may have been written by that code.
"""

import ast
import base64
import builtins
import ctypes
import json
import linecache
import os
import resource
import signal
import sys
import traceback
from types import FrameType
from typing import Any, BinaryIO

_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER_MODE = 38, 22, 2
_SIGNALLED_EVERY_S = 0.2


class OutOfTimeError(BaseException):
    """The call's time is up. Not an Exception, so that `except Exception` does not keep it."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def lock_down(settings: dict[str, Any]) -> None:
    """Give up, for good, what the code must not have. Raises OSError where the kernel refuses.

    `limits` holds (resource, amount) by name; `filter` the seccomp program, or nothing where the caller wants none.
    """
    for name, amount in settings["limits"].items():
        number = getattr(resource, name, None)
        if number is not None:
            hard = resource.getrlimit(number)[1]
            value = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
            resource.setrlimit(number, (value, value))
    os.nice(settings["nice"])
    program = base64.b64decode(settings["filter"])
    if program:
        libc = ctypes.CDLL(None, use_errno=True)
        steps = ctypes.create_string_buffer(program, len(program))
        whole = _Program(len(program) // 8, ctypes.cast(steps, ctypes.c_void_p))
        for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER_MODE, ctypes.byref(whole), 0, 0)):
            if libc.prctl(*arguments) != 0:
                raise OSError(ctypes.get_errno(), f"prctl({arguments[0]}): {os.strerror(ctypes.get_errno())}")


class Interpreter:
    """Executes one piece of code after another; names that one defines are there for the next."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        for name in ("exit", "quit"):  # the `site` module, which would define them, is not loaded
            setattr(builtins, name, sys.exit)
        self._calls = 0
        self._armed = False
        signal.signal(signal.SIGALRM, self._on_alarm)

    def run(self, code: str, timeout_s: float) -> str:
        """Execute `code` and print the value of its last expression. Gives 'ok', 'error' or 'timeout'."""
        self._calls += 1
        name = f"<call {self._calls}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        outcome = "ok"
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, timeout_s, _SIGNALLED_EVERY_S)
            try:
                self._execute(code, name)
            finally:
                self._disarm()
        except OutOfTimeError:
            outcome = "timeout"
            self._disarm()
        except SystemExit as error:
            if error.code not in (None, 0):
                outcome = "error"
                print(error.code if isinstance(error.code, str) else f"SystemExit: {error.code}", file=sys.stderr)
        except BaseException as error:
            outcome = "error"
            self._show(error, name)
        return outcome

    def _execute(self, code: str, name: str) -> None:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._names)
            if value is not None:
                self._names["_"] = value
                print(repr(value))

    def _disarm(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            raise OutOfTimeError

    def _show(self, error: BaseException, name: str) -> None:
        """The traceback from the first frame of the policy's own code on."""
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<call "):
            trace = trace.tb_next
        try:
            text = "".join(traceback.format_exception(type(error), error.with_traceback(trace), trace, limit=-8))
        except BaseException:  # an exception whose own text raises
            text = f"{type(error).__name__}\n"
        print(text, end="", file=sys.stderr)


def serve(requests: BinaryIO, replies: int) -> None:
    """Execute one JSON line after another until there are no more."""
    interpreter = Interpreter()
    for line in requests:
        request = json.loads(line)
        outcome = interpreter.run(request["code"], request["timeout_s"])
        for name, number in (("stdout", 1), ("stderr", 2)):
            try:
                getattr(sys, name).flush()
            except BaseException:  # the code closed or replaced it
                setattr(sys, name, os.fdopen(number, "w", closefd=False, errors="replace"))
        os.write(replies, json.dumps({"call": request["call"], "outcome": outcome}).encode() + b"\n")


def main() -> None:
    """The settings are the first line of standard input, the code follows; replies go to the descriptor of argument 1."""
    replies = int(sys.argv[1])
    requests = os.fdopen(os.dup(0), "rb")
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)  # `input()` finds the end of the file, not the next request
    os.close(nothing)
    settings = json.loads(requests.readline())
    sys.path.extend(settings["paths"])
    for name, number in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, os.fdopen(number, "w", closefd=False, errors="replace"))
    try:
        lock_down(settings)
    except OSError as error:
        os.write(replies, json.dumps({"call": 0, "refused": f"lock-down: {error}"}).encode() + b"\n")
        return
    os.write(replies, b'{"call": 0, "ready": true}\n')
    serve(requests, replies)
    os._exit(0)  # whatever threads the code left behind


if __name__ == "__main__":
    main()
