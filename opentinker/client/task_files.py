"""Files of tasks or examples that a job's config names: found beside it, checked, and sent along."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from opentinker.config.job import JobConfig, PreferenceJobConfig, RLJobConfig, SFTJobConfig
from opentinker.config.tasks import TasksConfig
from opentinker.env.datasets import SUFFIXES, load_tasks
from opentinker.env.environment import Environment
from opentinker.errors import ConfigError
from opentinker.training.conversations import read_rows
from opentinker.training.preferences import read_comparisons

C = TypeVar("C", bound=JobConfig)


def task_files(config: JobConfig, *folders: Path) -> dict[str, Path]:
    """The file of each field of the config that names one, from the first folder that has it.

    Raises:
        ConfigError: no folder has the file.
    """
    found = {}
    for field, tasks in _given(config).items():
        if Path(tasks.name).suffix not in SUFFIXES:
            continue
        found[field] = found_file(field, tasks.name, *folders)
    return found


def found_file(field: str, name: str, *folders: Path) -> Path:
    """The file that a field of the config names, from the first folder that has it.

    Raises:
        ConfigError: no folder has the file.
    """
    candidates = [folder / Path(name).expanduser() for folder in folders]
    file = next((c.resolve() for c in candidates if c.is_file()), None)
    if file is None:
        looked = " and ".join(str(f) for f in dict.fromkeys(c.parent.resolve() for c in candidates))
        raise ConfigError(f"{field}: there is no file {name}", hint=f"looked in {looked}")
    return file


def named(config: C, names: Mapping[str, str]) -> C:
    """The config with other names for its files."""
    for field, tasks in _given(config).items():
        section, _, key = field.partition(".")
        changed = getattr(config, section).model_copy(
            update={key: tasks.model_copy(update={"name": names.get(field, tasks.name)})}
        )
        config = config.model_copy(update={section: changed})
    return config


def travelling(files: Mapping[str, Path], folder: Path | None) -> dict[str, str]:
    """Their names in what travels: within the environment's folder, or in folders of their own if nothing else travels.

    Raises:
        ConfigError: the environment's folder travels, and a file is not in it.
    """
    names = {}
    for field, file in files.items():
        if folder is not None and not file.is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{field}: {file} is not in the environment's folder {folder}, which is all that travels",
                hint="move it there, or `opentinker train`",
            )
        within = f"{field.partition('.')[2]}/{file.name}"
        names[field] = within if folder is None else file.relative_to(folder.resolve()).as_posix()
    return names


def check_task_files(config: RLJobConfig, files: Mapping[str, Path], environment: type[Environment]) -> None:
    """Read them once, so that a missing column is found before anything waits in a queue.

    Raises:
        ConfigError: a file cannot be read, is empty, or lacks a column.
        UnavailableError, AuthenticationError: the environment is on a server that cannot be asked from here.
    """
    for field, tasks in _given(config).items():
        if field in files:
            required = environment.required_columns(config.environment.args)
            load_tasks(str(files[field]), columns=tasks.columns, required=required)


def check_example_files(config: SFTJobConfig | PreferenceJobConfig, files: Mapping[str, Path]) -> None:
    """As `check_task_files`, for conversations and comparisons.

    Raises:
        ConfigError: a file cannot be read, is empty, or holds no examples.
    """
    for field, source in _given(config).items():
        if field in files:
            there = source.model_copy(update={"name": str(files[field])})
            if isinstance(config, PreferenceJobConfig):
                read_comparisons(there, unusable=config.data.unusable)
            else:
                read_rows(there)


def _given(config: JobConfig) -> dict[str, TasksConfig]:
    """Dotted path of the field -> what it names."""
    match config:
        case RLJobConfig(environment=environment):
            named = {
                "environment.train_tasks": environment.train_tasks,
                "environment.held_out_tasks": environment.held_out_tasks,
            }
        case SFTJobConfig(data=data) | PreferenceJobConfig(data=data):
            named = {"data.train": data.train, "data.held_out": data.held_out}
        case _:
            named = {}
    return {field: tasks for field, tasks in named.items() if tasks is not None}
