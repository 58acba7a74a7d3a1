"""Files of tasks that a job's config names: found beside it, checked, and sent along."""

from collections.abc import Mapping
from pathlib import Path

from opentinker.config.job import RLJobConfig, TasksConfig
from opentinker.env.datasets import SUFFIXES, load_tasks
from opentinker.env.environment import Environment
from opentinker.errors import ConfigError

FIELDS = ("train_tasks", "held_out_tasks")


def task_files(config: RLJobConfig, *folders: Path) -> dict[str, Path]:
    """The file of each field of the config's environment that names one, from the first folder that has it.

    Raises:
        ConfigError: no folder has the file.
    """
    found = {}
    for field, tasks in _given(config).items():
        if Path(tasks.name).suffix not in SUFFIXES:
            continue
        candidates = [folder / Path(tasks.name).expanduser() for folder in folders]
        file = next((c.resolve() for c in candidates if c.is_file()), None)
        if file is None:
            looked = " and ".join(str(f) for f in dict.fromkeys(c.parent.resolve() for c in candidates))
            raise ConfigError(f"environment.{field}: there is no file {tasks.name}", hint=f"looked in {looked}")
        found[field] = file
    return found


def named(config: RLJobConfig, names: Mapping[str, str]) -> RLJobConfig:
    """The config with other names for its files of tasks."""
    changed = {
        field: tasks.model_copy(update={"name": names.get(field, tasks.name)}) for field, tasks in _given(config).items()
    }
    return config.model_copy(update={"environment": config.environment.model_copy(update=changed)})


def travelling(files: Mapping[str, Path], folder: Path | None) -> dict[str, str]:
    """Their names in what travels: within the environment's folder, or in folders of their own if nothing else travels.

    Raises:
        ConfigError: the environment's folder travels, and a file is not in it.
    """
    names = {}
    for field, file in files.items():
        if folder is not None and not file.is_relative_to(folder.resolve()):
            raise ConfigError(
                f"environment.{field}: {file} is not in the environment's folder {folder}, which is all that travels",
                hint="move it there, or `opentinker train`",
            )
        names[field] = f"{field}/{file.name}" if folder is None else file.relative_to(folder.resolve()).as_posix()
    return names


def check_task_files(config: RLJobConfig, files: Mapping[str, Path], environment: type[Environment]) -> None:
    """Read them once, so that a missing column is found before anything waits in a queue.

    Raises:
        ConfigError: a file cannot be read, is empty, or lacks a column.
    """
    for field, tasks in _given(config).items():
        if field in files:
            load_tasks(str(files[field]), columns=tasks.columns, required=environment.task_columns)


def _given(config: RLJobConfig) -> dict[str, TasksConfig]:
    return {field: tasks for field in FIELDS if (tasks := getattr(config.environment, field)) is not None}
