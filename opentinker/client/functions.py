"""Functions of the user's own that a job's config names, as `path/to/file.py:function`: found beside it, loaded once, sent."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from opentinker.client.task_files import found_file
from opentinker.config.algorithms import CustomConfig
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Environment
from opentinker.env.load import ADAPTERS, load_function
from opentinker.errors import ConfigError
from opentinker.multiagent.shared import SharedEnvironment

A = TypeVar("A")
ADAPTER_ARGUMENTS = ("codec", "opponent")
"""Arguments of adapters that may name a function or class in a file."""
REFERENCES = "arena.references"


def algorithm_file(config: RLJobConfig, *folders: Path) -> dict[str, Path]:
    """The files of the algorithm's function, of agents' algorithms and scripts, and of an arena's reference players, by their
    fields: each of the first folder that has it.

    Raises:
        EnvironmentLoadError: one names no function.
        ConfigError: no folder has the file.
    """
    found = {}
    for field, function in _functions(config).items():
        path, _, _ = function.rpartition(":")
        if not path.endswith(".py"):
            load_function(function)  # says what is wrong
        found[field] = found_file(field, path, *folders)
    return found


def with_algorithm_file(config: RLJobConfig, names: Mapping[str, str]) -> RLJobConfig:
    """The config with other names for those files."""
    agents = {}
    for name, agent in config.agents.items():
        script = _renamed(agent.script, names.get(f"agents.{name}.script"))
        algorithm = _with_file(agent.algorithm, names.get(f"agents.{name}.algorithm.function"))
        agents[name] = agent.model_copy(update={"script": script, "algorithm": algorithm})
    algorithm = _with_file(config.algorithm, names.get("algorithm.function"))
    arena = config.arena
    if arena is not None and arena.references is not None:
        players = tuple(_renamed(name, names.get(f"{REFERENCES}.{i}")) for i, name in enumerate(arena.references))
        arena = arena.model_copy(update={"references": players})
    return config.model_copy(update={"algorithm": algorithm, "agents": agents, "arena": arena})


def check_algorithm(config: RLJobConfig, files: Mapping[str, Path]) -> None:
    """Load these functions once, so that a missing one is found before anything waits in a queue.

    Raises:
        EnvironmentLoadError: a file cannot be imported, or has no such function.
    """
    for field, function in _functions(config).items():
        if field in files:
            load_function(_renamed(function, str(files[field])))


def _functions(config: RLJobConfig) -> dict[str, str]:
    """The functions that the config names, by their fields."""
    algorithms = {"algorithm.function": config.algorithm}
    found = {}
    for name, agent in config.agents.items():
        if agent.script:
            found[f"agents.{name}.script"] = agent.script
        if agent.algorithm is not None:
            algorithms[f"agents.{name}.algorithm.function"] = agent.algorithm
    references = (config.arena.references if config.arena is not None else None) or ()
    found |= {f"{REFERENCES}.{i}": name for i, name in enumerate(references) if ":" in name}  # others the environment brings
    return found | {field: one.function for field, one in algorithms.items() if isinstance(one, CustomConfig)}


def _with_file(algorithm: A, file: str | None) -> A:
    if not isinstance(algorithm, CustomConfig):
        return algorithm
    return algorithm.model_copy(update={"function": _renamed(algorithm.function, file)})


def _renamed(function: str, file: str | None) -> str:
    return function if file is None else f"{file}:{function.rpartition(':')[2]}"


def refuse_adapter_functions(config: RLJobConfig, environment: type[Environment] | None = None) -> None:
    """Raises: ConfigError when an adapter's argument names a file, which does not travel with a submitted job."""
    for key, function in _adapter_functions(config, environment).items():
        raise ConfigError(
            f"environment.args.{key}: the file of {function} does not travel with a submitted job",
            hint=f"derive a class in a file of yours that gives the {key} itself (docs/adapters.md), or `opentinker train`",
        )


def with_adapter_functions(config: RLJobConfig, environment: type[Environment], *folders: Path) -> RLJobConfig:
    """The config with the whole paths of files that an adapter's arguments name, each from the first folder that has it.

    Raises:
        EnvironmentLoadError: a file cannot be imported, or has no such function.
        ConfigError: no folder has the file.
    """
    found = {}
    for key, function in _adapter_functions(config, environment).items():
        path, _, name = function.rpartition(":")
        found[key] = f"{found_file(f'environment.args.{key}', path, *folders)}:{name}"
        load_function(found[key])
    args = {**config.environment.args, **found}
    return config.model_copy(update={"environment": config.environment.model_copy(update={"args": args})})


def _adapter_functions(config: RLJobConfig, environment: type[Environment] | None) -> dict[str, str]:
    authors = environment.played if environment is not None and issubclass(environment, SharedEnvironment) else environment
    adapted = config.environment.name.partition(":")[0] in ADAPTERS or (
        authors is not None and any(base.__module__.startswith("opentinker.env.adapters.") for base in authors.__mro__)
    )
    given = {key: config.environment.args.get(key) for key in ADAPTER_ARGUMENTS} if adapted else {}
    return {key: value for key, value in given.items() if isinstance(value, str) and value.rpartition(":")[0].endswith(".py")}
