"""`opentinker env`: check, host and play environments; one module per command."""

import typer

from opentinker.cli import env_serve

env = typer.Typer(help="Write, check and host environments.", no_args_is_help=True)
env.command("serve")(env_serve.serve)
