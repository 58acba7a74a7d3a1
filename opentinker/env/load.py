"""Finds an environment's class: a built-in name, `path/to/file.py:Class`, the URL of a server, or what an adapter adapts."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from opentinker.config.base import nearest
from opentinker.env.environment import Environment
from opentinker.errors import ConfigError, EnvironmentLoadError
from opentinker.multiagent.environment import MultiAgentEnvironment
from opentinker.multiagent.protocol import check_seats
from opentinker.multiagent.shared import SharedEnvironment, shared

ADAPTERS = (
    "gymnasium",
    "openenv",
    "pettingzoo",
    "pettingzoo_aec",
    "pettingzoo_parallel",
    "reasoning_gym",
    "textarena",
    "verifiers",
)
"""Other ecosystems; each has a module in `opentinker.env.adapters`."""

_names: "WeakKeyDictionary[type[Environment], tuple[str, Path]]" = WeakKeyDictionary()


def load_environment(
    name: str | type[Environment] | type[MultiAgentEnvironment], base_dir: Path | None = None
) -> type[Environment]:
    """The class that `name` stands for; a class stands for itself, one for several agents behind the interface of one
    (`opentinker.multiagent.shared`). Relative paths start at `base_dir` (the working directory).

    The file's folder joins `sys.path`, as for a script, so that the file can import its neighbours.

    Raises:
        EnvironmentLoadError: the name is unknown, the file or class is missing, the import fails, or the class is not an
            Environment.
    """
    found = _checked(_named(name, base_dir) if isinstance(name, str) else name, str(name))
    if isinstance(name, str):
        _names[found] = (name, (base_dir or Path()).resolve())
    return found


def load_for_one(name: str | type[Environment], base_dir: Path | None = None) -> type[Environment]:
    """As `load_environment`, for those who play one agent's episodes.

    Raises:
        EnvironmentLoadError: also when the environment is for several agents.
    """
    found = load_environment(name, base_dir)
    if issubclass(found, SharedEnvironment):
        raise EnvironmentLoadError(
            f"{found.__name__} is for {len(found.played.agents)} agents, and here is one",
            hint="a job with `agents` plays it; docs/multiagent.md shows how to try it",
        )
    return found


def name_of(environment: type[Environment]) -> tuple[str, Path] | None:
    """By what name, relative to which folder, a class was loaded; None if it was given as a class."""
    return _names.get(environment)


def load_function(name: str, base_dir: Path | None = None) -> Callable[..., Any]:
    """The function that `path/to/file.py:function` names.

    Raises:
        EnvironmentLoadError: the file or the function is missing, or the import fails.
    """
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise EnvironmentLoadError(f"'{name}' names no function", hint="name it path/to/file.py:function")
    file = ((base_dir or Path()) / Path(path).expanduser()).resolve()
    if not file.is_file():
        raise EnvironmentLoadError(f"the file {file} does not exist", hint="name it path/to/file.py:function")
    found = getattr(_import(file), attribute, None)
    if not callable(found):
        raise EnvironmentLoadError(f"{file} has no function '{attribute}'")
    function: Callable[..., Any] = found
    return function


def _named(name: str, base_dir: Path | None) -> object:
    prefix, colon, spec = name.partition(":")
    if prefix in ("http", "https"):
        found: object = importlib.import_module("opentinker.env.remote").remote_environment(name.split(","))
        return found
    if colon and prefix in ADAPTERS:
        adapted: object = importlib.import_module(f"opentinker.env.adapters.{prefix}").environment_class(spec)
        return adapted
    path, colon, class_name = name.rpartition(":")
    if not colon:
        return _built_in(name)
    if not path.endswith(".py"):
        raise EnvironmentLoadError(
            f"'{name}' names no environment",
            hint=f"your own is named path/to/file.py:Class; adapters are {', '.join(f'{a}:NAME' for a in ADAPTERS)}",
        )
    return _from_file((base_dir or Path()) / Path(path).expanduser(), class_name)


def _built_in(name: str) -> object:
    registry = importlib.import_module("opentinker.environments.registry")
    known: dict[str, str] = registry.BUILT_IN | registry.FOR_AGENTS
    if name not in known:
        hint = f"{nearest(name, known)}; your own is named path/to/file.py:Class"
        raise EnvironmentLoadError(f"there is no built-in environment '{name}'", hint=hint)
    module, _, attribute = known[name].partition(":")
    found: object = getattr(importlib.import_module(module), attribute)
    return found


def _from_file(path: Path, class_name: str) -> object:
    path = path.resolve()
    if not path.is_file():
        raise EnvironmentLoadError(f"the environment's file {path} does not exist", hint="name it path/to/file.py:Class")
    module = _import(path)
    if not hasattr(module, class_name):
        there = [n for n, v in vars(module).items() if _is_environment(v) and v not in (Environment, MultiAgentEnvironment)]
        hint = nearest(class_name, there) if there else "it defines no subclass of opentinker.Environment"
        raise EnvironmentLoadError(f"{path} has no class '{class_name}'", hint=hint)
    found: object = getattr(module, class_name)
    return found


def _import(path: Path) -> ModuleType:
    name = f"opentinker_user_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnvironmentLoadError(f"{path} is not a Python file", hint="name it path/to/file.py:Class")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise EnvironmentLoadError(
            f"importing {path} failed: {type(error).__name__}: {error}{_line(error, path)}",
            hint="packages that it needs are listed in environment.requirements" if isinstance(error, ImportError) else "",
        ) from error
    return module


def _line(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its text ends with file and line
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f" ({path}:{own[-1].lineno})" if own else ""


def _is_environment(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Environment | MultiAgentEnvironment)


def _checked(value: object, name: str) -> type[Environment]:
    if inspect.isclass(value) and issubclass(value, MultiAgentEnvironment):
        return shared(_checked_agents(value))  # type: ignore[arg-type]  # mypy takes a class's own __hash__ for its instances'
    if not (inspect.isclass(value) and issubclass(value, Environment)):
        raise EnvironmentLoadError(f"'{name}' is not an environment", hint="derive the class from opentinker.Environment")
    missing = [method for method in ("reset", "step") if getattr(value, method) is getattr(Environment, method)]
    if missing:
        raise EnvironmentLoadError(f"{value.__name__} defines no {' and no '.join(missing)}")
    _check_attributes(value)
    return value


def _checked_agents(value: type[MultiAgentEnvironment]) -> type[MultiAgentEnvironment]:
    if value.reset is MultiAgentEnvironment.reset:
        raise EnvironmentLoadError(f"{value.__name__} defines no reset")
    if value.step is MultiAgentEnvironment.step and value.step_together is MultiAgentEnvironment.step_together:
        raise EnvironmentLoadError(f"{value.__name__} defines no step", hint="or step_together, for simultaneous actions")
    try:
        check_seats(value.protocol, value.agents)
    except ConfigError as error:
        raise EnvironmentLoadError(f"{value.__name__}: {error.detail}", hint=error.hint) from error
    _check_attributes(value)
    return value


def _check_attributes(value: type[Environment] | type[MultiAgentEnvironment]) -> None:
    if isinstance(value.host_args, str):
        raise EnvironmentLoadError(f"{value.__name__}.host_args is a text", hint=f"it is a tuple: ({value.host_args!r},)")
    if value.execution not in ("thread", "process"):
        raise EnvironmentLoadError(f"{value.__name__}.execution is {value.execution!r}", hint="it is 'thread' or 'process'")
