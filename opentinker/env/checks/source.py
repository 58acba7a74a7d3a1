"""Where in an author's file the cause of a finding is."""

import ast
import inspect
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

from opentinker.env.environment import Environment

_LOCATION = re.compile(r"\(([^()\n]+:\d+)\)\s*$")
_UNSEEDED = {
    "random": {"betavariate", "choice", "choices", "gauss", "getrandbits", "randbytes", "randint", "random", "randrange"}
    | {"sample", "shuffle", "triangular", "uniform"},
    "np.random": {"choice", "normal", "permutation", "rand", "randint", "randn", "random", "shuffle", "uniform"},
    "time": {"time", "time_ns", "monotonic", "perf_counter"},
    "uuid": {"uuid1", "uuid4"},
    "os": {"urandom"},
    "secrets": {"choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe"},
}
_ALIASES = {"numpy.random": "np.random"}
_GENERATORS = {"random.Random", "Random", "np.random.default_rng", "default_rng"}


def source_file(environment: type[Environment]) -> Path | None:
    """The file that defines a class, if there is one."""
    try:
        found = inspect.getsourcefile(environment)
    except TypeError:
        return None
    return Path(found) if found else None


def location_in(text: str) -> str:
    """The `path:line` at the end of an error's text, or nothing."""
    found = _LOCATION.search(text)
    return found[1] if found else ""


def method_line(environment: type[Environment], method: str) -> str:
    """Where a method begins, or nothing for one that is not the author's."""
    code = _code(environment, method)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and code is not _code(Environment, method) else ""


def _code(environment: type[Environment], method: str) -> CodeType | None:
    function = getattr(environment, method, None)
    function = getattr(function, "__func__", function)
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None


def thread_line(environment: type[Environment], frame: FrameType | None) -> str:
    """The deepest line of a running thread that is in the author's folder, or else the deepest one."""
    return stack_line(environment, traceback.extract_stack(frame)) if frame is not None else ""


def stack_line(environment: type[Environment], stack: Iterable[traceback.FrameSummary]) -> str:
    """As `thread_line`, of a stack that was taken before."""
    file = source_file(environment)
    frames = list(stack)
    own = [f for f in frames if file is not None and Path(f.filename).parent == file.parent]
    chosen = (own or frames)[-1:]
    return f"{chosen[0].filename}:{chosen[0].lineno}" if chosen else ""


def current_frame(ident: int | None) -> FrameType | None:
    """What a thread is executing now."""
    return sys._current_frames().get(ident or 0)


def unseeded_lines(environment: type[Environment]) -> list[str]:
    """Lines of the author's file that use the clock or a source of chance that no task determines: `path:line (call)`."""
    file = source_file(environment)
    if file is None:
        return []
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)):
            module, _, function = name.rpartition(".")
            module = _ALIASES.get(module, module)
            if function in _UNSEEDED.get(module, ()) or (name in _GENERATORS and not node.args and not node.keywords):
                found.append((node.lineno, f"{file}:{node.lineno} ({name})"))
    return [text for _, text in sorted(found)]
