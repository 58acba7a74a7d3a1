"""Tasks from a file (.jsonl, .json, .parquet, .csv) or from a dataset of the `datasets` library, by name."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker.config.base import nearest
from opentinker.env.rows import JsonRows
from opentinker.env.tasks import ListTasks
from opentinker.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_INSTALL = "pip install 'opentinker[environments]'"


def load_tasks(
    name: str,
    *,
    split: str = "train",
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    shuffle: bool = True,
    base_dir: Path | None = None,
    required: Sequence[str] = (),
) -> ListTasks:
    """The rows of a file or dataset as tasks (dicts of JSON values; an image is a data URL).

    `columns` maps a task's key to the column that it is taken from; other columns keep their names. `split` and `subset` are
    for datasets by name; a file is one split. Relative paths start at `base_dir` (the working directory).

    Raises:
        ConfigError: it does not exist, cannot be read, is empty, or lacks a column.
    """
    suffix = Path(name).suffix
    path = (base_dir or Path()) / Path(name).expanduser()
    rows = _file_rows(path) if suffix in SUFFIXES else _dataset_rows(name, path, split, subset)
    if not len(rows):
        raise ConfigError(f"the tasks of {name} are empty", hint="a split needs at least one row")
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows)))) if hasattr(rows, "select") else rows[:limit]
    renamed = {key: key for key in required} | dict(columns or {})
    there = list(rows.column_names) if hasattr(rows, "column_names") else _common_keys(name, rows)
    for key, column in renamed.items():
        if column not in there:
            raise ConfigError(
                f"the tasks of {name} have no column '{column}'{f' for {key!r}' if key != column else ''}: "
                f"they have {', '.join(there) or 'none'}",
                hint=f"{nearest(column, there)}; columns={{'{key}': ...}} takes '{key}' from another column",
            )
    if hasattr(rows, "column_names"):
        rows = JsonRows(rows)
    return ListTasks(_Renamed(rows, renamed) if any(k != c for k, c in renamed.items()) else rows, shuffle=shuffle)


class _Renamed(Sequence[Any]):
    """Rows with keys of the tasks' own; made when they are read, so that a large dataset stays on disk."""

    def __init__(self, rows: Any, columns: Mapping[str, str]) -> None:
        self._rows = rows
        self._columns = columns
        self._taken = {column for key, column in columns.items() if key != column}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        kept = {name: value for name, value in row.items() if name not in self._taken}
        return kept | {key: row[column] for key, column in self._columns.items()}


def _file_rows(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"the tasks' file {path} does not exist", hint=f"a file ends in {', '.join(SUFFIXES)}")
    try:
        match path.suffix:
            case ".jsonl":
                return _json_lines(path)
            case ".json":
                rows = json.loads(path.read_text(encoding="utf-8"))
            case ".csv":
                with path.open(newline="", encoding="utf-8") as file:
                    rows = list(csv.DictReader(file))
            case _:
                return _parquet(path)
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"the tasks' file {path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"the tasks' file {path} must hold a list of objects")
    return rows


def _json_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: a task must be an object, not {type(row).__name__}")
            rows.append(row)
    return rows


def _parquet(path: Path) -> Any:
    library = _library()
    try:
        return library.Dataset.from_parquet(str(path), cache_dir=None, keep_in_memory=True)
    except Exception as error:  # pyarrow's and datasets' errors have no common base
        raise ConfigError(f"the tasks' file {path} cannot be read: {type(error).__name__}: {error}") from error


def _dataset_rows(name: str, path: Path, split: str, subset: str | None) -> Any:
    library = _library()
    try:
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = library.load_from_disk(str(path))
        else:
            return library.load_dataset(str(path) if path.is_dir() else name, subset, split=split)
    except Exception as error:  # hub, network, builder and file errors have no common base
        raise ConfigError(
            f"the dataset {name} (split '{split}') cannot be loaded: {type(error).__name__}: {error}",
            hint=f"name a dataset that `datasets` can load, or a file that ends in {', '.join(SUFFIXES)}",
        ) from error
    if not isinstance(loaded, dict):
        return loaded
    if split not in loaded:
        raise ConfigError(f"the dataset {name} has no split '{split}'", hint=f"it has {', '.join(loaded)}")
    return loaded[split]


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("tasks from parquet files and datasets need the `datasets` library", hint=_INSTALL) from error
    return datasets


def _common_keys(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that every row has, so that a missing one is found now and not in the middle of a run."""
    first = list(rows[0])
    others = {key for row in rows for key in first if key not in row}
    return [key for key in first if key not in others]
