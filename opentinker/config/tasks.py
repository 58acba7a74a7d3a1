"""Files and datasets as a config names them."""

from typing import Annotated

from pydantic import Field

from opentinker.config.base import Config


class TasksConfig(Config):
    """Rows of a file or a dataset: tasks for any environment, or examples to learn from."""

    name: str
    """A .jsonl, .json, .parquet or .csv file, which travels with a submitted job, or a dataset that the `datasets` library can
    load. With an environment of your own the file has to be in its folder."""
    split: str = "train"
    """Split of a dataset; a file is one split."""
    subset: str | None = None
    """Configuration of a dataset that has several, such as `main` of gsm8k."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Key that is expected of a row -> column to take it from."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Only this many rows, from the first."""
    shuffle: bool = True
    """Another order in each epoch, determined by `training.seed`; False keeps the rows' own order."""
