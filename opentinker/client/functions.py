"""Functions of the user's own that a job's config names, as `path/to/file.py:function`: found beside it, loaded once, sent."""

from collections.abc import Mapping
from pathlib import Path

from opentinker.client.task_files import found_file
from opentinker.config.algorithms import CustomConfig
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Environment
from opentinker.env.load import ADAPTERS, load_function
from opentinker.errors import ConfigError
from opentinker.multiagent.shared import SharedEnvironment

FIELD = "algorithm.function"
ADAPTER_ARGUMENTS = ("codec", "opponent")
"""Arguments of adapters that may name a function or class in a file."""


def algorithm_file(config: RLJobConfig, *folders: Path) -> dict[str, Path]:
    """The file of the algorithm's function, by its field: of the first folder that has it; none if it has no function.

    Raises:
        EnvironmentLoadError: it names no function.
        ConfigError: no folder has the file.
    """
    if not isinstance(config.algorithm, CustomConfig):
        return {}
    path, _, _ = config.algorithm.function.rpartition(":")
    if not path.endswith(".py"):
        load_function(config.algorithm.function)  # says what is wrong
    return {FIELD: found_file(FIELD, path, *folders)}


def with_algorithm_file(config: RLJobConfig, names: Mapping[str, str]) -> RLJobConfig:
    """The config with another name for that file."""
    if FIELD not in names or not isinstance(config.algorithm, CustomConfig):
        return config
    function = f"{names[FIELD]}:{config.algorithm.function.rpartition(':')[2]}"
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"function": function})})


def check_algorithm(config: RLJobConfig, files: Mapping[str, Path]) -> None:
    """Load the algorithm's function once, so that a missing one is found before anything waits in a queue.

    Raises:
        EnvironmentLoadError: the file cannot be imported, or has no such function.
    """
    if FIELD in files and isinstance(config.algorithm, CustomConfig):
        load_function(f"{files[FIELD]}:{config.algorithm.function.rpartition(':')[2]}")


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
