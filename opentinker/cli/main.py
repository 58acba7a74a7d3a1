"""The `opentinker` command."""

from typing import Any

import typer
from typer.core import TyperGroup

from opentinker.cli import (
    arena,
    cancel,
    checkpoint,
    checkpoints,
    demo,
    describe,
    down,
    env,
    events,
    logs,
    models,
    ps,
    secrets,
    stop,
    submit,
    top,
    train,
    up,
    users,
    wait,
)
from opentinker.cli.common import print_error
from opentinker.errors import ConfigError, OpenTinkerError

_EXTRAS = dict.fromkeys(
    ("ray", "fastapi", "uvicorn", "sqlalchemy", "psutil", "starlette", "torch", "transformers", "fsspec"), "cluster"
)
"""Which extra brings a package that the light client lacks."""


class _Commands(TyperGroup):
    """Turns OpenTinker's errors into one red line and an exit code: nobody sees a traceback for a mistake of theirs."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OpenTinkerError as error:
            print_error(error)
            raise typer.Exit(1) from None
        except ModuleNotFoundError as error:
            if (extra := _EXTRAS.get(str(error.name).partition(".")[0])) is None:
                raise
            print_error(
                ConfigError(f"this command needs the package '{error.name}'", hint=f"pip install 'opentinker[{extra}]'")
            )
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
for _module in (up, down, submit, train, ps, top, describe, logs, events, checkpoints, models, wait, stop, cancel, arena, demo):
    _name = _module.__name__.rpartition(".")[2]
    app.command(_name)(getattr(_module, _name))
app.add_typer(env.env, name="env")
app.add_typer(checkpoint.checkpoint, name="checkpoint")
app.add_typer(secrets.secrets, name="secrets")
app.add_typer(users.users, name="users")
app.add_typer(env.env, name="env")


def main() -> None:
    """Entry point of the console script."""
    app()
