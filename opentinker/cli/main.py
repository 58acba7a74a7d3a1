"""The `opentinker` command."""

from typing import Any

import typer
from typer.core import TyperGroup

from opentinker.cli import cancel, demo, describe, down, logs, ps, submit, train, up
from opentinker.cli.common import print_error
from opentinker.errors import OpenTinkerError


class _Commands(TyperGroup):
    """Turns OpenTinker's errors into one red line and an exit code: nobody sees a traceback for a mistake of theirs."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OpenTinkerError as error:
            print_error(error)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    help="Reinforcement learning as a service: train language models on your environments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _module in (up, down, submit, train, ps, describe, logs, cancel, demo):
    _name = _module.__name__.rpartition(".")[2]
    app.command(_name)(getattr(_module, _name))


def main() -> None:
    """Entry point of the console script."""
    app()
