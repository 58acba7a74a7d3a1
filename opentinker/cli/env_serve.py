"""`opentinker env serve`: host an environment over HTTP."""

import logging
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from opentinker.cli.common import err, out
from opentinker.cli.env_arguments import EnvironmentArgument, constructor_arguments, environment_name
from opentinker.client.local import API_KEY_VARIABLE
from opentinker.errors import ConfigError


class IsolationChoice(StrEnum):
    """What a session shares with others."""

    THREAD = "thread"
    PROCESS = "process"


def serve(
    name: EnvironmentArgument,
    args: Annotated[
        list[str] | None,
        typer.Option(
            help="Constructor arguments: KEY=VALUE (may be repeated), or one JSON object. Those that the class keeps for its "
            "host (`host_args`) are set here only; others are defaults, which clients may change.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8790,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; with --isolation process, how many are kept ready.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions at once; one more is answered 429.")] = 1024,
    isolation: Annotated[
        IsolationChoice | None,
        typer.Option(
            help="'thread': a worker hosts many sessions. 'process': one each. Default: what the class says (`execution`)."
        ),
    ] = None,
    idle_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a request after which a session is closed.")
    ] = 900.0,
    call_timeout: Annotated[float, typer.Option(min=0.1, help="Longest seconds for one call of the environment.")] = 300.0,
    drain: Annotated[float, typer.Option(min=0.0, help="Seconds that open sessions may go on after SIGTERM or Ctrl-C.")] = 30.0,
    max_body: Annotated[
        int, typer.Option(min=1, max=32 * 2**20, help="Largest task or action, in bytes; one that is larger is answered 413.")
    ] = (4 * 2**20),
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token that clients must show. Default: a new one, which is printed.")
    ] = None,
) -> None:
    """Host an environment for other processes and machines, until Ctrl-C.

    Configs name it by its address: `environment: {name: "http://HOST:PORT"}`, with the token in OPENTINKER_ENV_TOKEN.
    """
    from opentinker.environments.hosting.auth import Token

    try:
        from opentinker.environments.hosting.serve import EnvironmentServer, run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"hosting an environment needs the package '{error.name}'", hint="pip install 'opentinker[environments]'"
        ) from None
    from opentinker.environments.hosting.settings import HostSettings

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.pop(API_KEY_VARIABLE, None)  # none of the environment's business
    name, arguments = environment_name(name), constructor_arguments(args)
    shown = ""
    if token_file is not None:
        token = Token.from_file(token_file)
    else:
        token, shown = Token.generate()
    settings = HostSettings(
        workers=workers or max(1, (os.cpu_count() or 2)),
        max_sessions=max_sessions,
        isolation=isolation.value if isolation else None,
        idle_timeout_s=idle_timeout,
        call_timeout_s=call_timeout,
        max_body_bytes=max_body,
        drain_s=drain,
    )
    server = EnvironmentServer({"name": name, "base_dir": str(Path.cwd())}, settings, token, host, port, arguments)

    def ready(started: EnvironmentServer) -> None:
        out.print(f"{started.hub.info['name']} is hosted at [bold]{started.url}[/bold]", soft_wrap=True)
        if shown:
            out.print(f"token: {shown}", soft_wrap=True)
            out.print("clients give it as OPENTINKER_ENV_TOKEN; it is not shown again", soft_wrap=True)
        shared = f"{settings.workers} worker processes"
        each = "a process for each session" if started.hub.pool.exclusive else shared
        out.print(f"up to {max_sessions} sessions, {each}; Ctrl-C stops it", soft_wrap=True)

    def drains(sessions: int) -> None:
        if sessions and drain:
            err.print(
                f"stopping; {sessions} open sessions have {drain:.0f} s to end; Ctrl-C again ends them at once", soft_wrap=True
            )
        else:
            err.print("stopping")

    run(server, ready, drains)
