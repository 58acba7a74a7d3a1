"""`opentinker env`: for those who write environments. A module per subcommand."""

import typer

from opentinker.cli import env_check, env_new, env_play, env_serve

env = typer.Typer(help="Write, check, play and host environments.", no_args_is_help=True)
env.command("new")(env_new.new)
env.command("check")(env_check.check)
env.command("play")(env_play.play)
env.command("serve")(env_serve.serve)
