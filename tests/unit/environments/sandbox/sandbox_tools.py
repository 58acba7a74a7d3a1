"""Calls of a sandbox, and code for its inside."""

import textwrap

import psutil

from opentinker.environments.sandbox import Execution, PythonSandbox

CTYPES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, *arguments):
    result = getattr(libc, name)(*arguments)
    print(name, os.strerror(ctypes.get_errno()) if result < 0 else f"SUCCEEDED {result}")
"""


def run(sandbox: PythonSandbox, code: str, timeout_s: float = 10.0) -> Execution:
    return sandbox.run(textwrap.dedent(code), timeout_s)


def works(sandbox: PythonSandbox) -> bool:
    return sandbox.run("print(6 * 7)", 10.0).output == "42\n"


def ours() -> set[int]:
    """The processes that this one started, with all below them."""
    return {p.pid for p in psutil.Process().children(recursive=True)}
