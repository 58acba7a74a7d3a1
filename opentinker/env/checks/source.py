"""Where in an author's file the cause of a finding is."""

import ast
import inspect
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

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


def stack_line(environment: type[Environment], stack: Sequence[tuple[str, int]]) -> str:
    """The innermost line of a stack that is in the author's folder, or nothing."""
    file = source_file(environment)
    own = [f"{path}:{line}" for path, line in stack if file is not None and Path(path).parent == file.parent]
    return own[-1] if own else ""


def error_line(environment: type[Environment], error: BaseException) -> str:
    """The author's innermost line that an error passed, or else where it was raised."""
    stack = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return stack_line(environment, stack) or "{}:{}".format(*stack[-1])


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
