"""`opentinker env new`: a starting point for an environment."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from opentinker.cli.common import out
from opentinker.env.new import class_name, write_environment


class Template(StrEnum):
    """What the environment is like."""

    SINGLE = "single"
    MULTI = "multi"
    DATASET = "dataset"
    TOOLS = "tools"


def new(
    name: Annotated[str, typer.Argument(help="Its name, such as my_game.", show_default=False)],
    template: Annotated[
        Template,
        typer.Option("--template", "-t", help="A single turn, several turns, tasks from a dataset's rows, or tools to call."),
    ] = Template.SINGLE,
    folder: Annotated[Path, typer.Option("--in", help="Where to make the folder.")] = Path(),
) -> None:
    """Write a starting point: a folder with an environment that works, its test, and a config to train on it."""
    files = write_environment(name, template.value, folder)
    made = files[0].parent
    for file in files:
        out.print(str(file), soft_wrap=True)
    out.print(f"\n{class_name(made.name)} works as it stands. Next:", soft_wrap=True)
    for command in (f"opentinker env play {made}", f"opentinker env check {made}", f"python -m pytest {made}"):
        out.print(f"  {command}", soft_wrap=True)
