"""`opentinker logs`: what a job's driver and environment printed."""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JobArgument,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    connected,
    err,
    out,
    print_json,
)
from opentinker.cli.patience import Patience
from opentinker.errors import ConfigError

POLL_S = 0.5


def logs(
    job_id: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
    server: Annotated[bool, typer.Option("--server", help="What the job's server wrote, not its driver.")] = False,
    name: Annotated[
        str,
        typer.Argument(
            metavar="SERVER",
            help="With --server: which of those that `servers` in its config names; else it is the job's own.",
            show_default=False,
        ),
    ] = "",
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Print a job's log, also of one that has ended. --json prints lines of {"text", "offset"}.

    With --server, and a name behind it, it is the log of one of the servers that the job has beside its own.
    With --follow it survives a restart of the scheduler: it reconnects for up to two minutes and goes on where it was.
    """
    if name and not server:
        raise ConfigError(
            f"'{name}' says which server, and --server is missing", hint=f"opentinker logs {job_id} --server {name}"
        )
    patience = Patience()
    with connected(url, key, state_dir) as client:
        job = patience.ask(lambda: client.job(job_id))
        _explain(job, follow)
        _print(partial(client.logs, job_id, source="server" if server else None, server=name), patience, follow, as_json)
        if follow:
            job = patience.ask(lambda: client.job(job_id))
            err.print(f"{job_id} {job['state']}" + (f": {job['cause']}" if job["cause"] else ""), soft_wrap=True, markup=False)


def _print(read: Callable[..., dict[str, Any]], patience: Patience, follow: bool, as_json: bool) -> None:
    offset = 0
    while True:
        at = offset
        answer = patience.ask(partial(read, offset=at))
        offset = answer["offset"]
        if offset > at:
            if as_json:
                print_json({"text": answer["text"], "offset": offset})
            else:
                out.out(answer["text"], end="", highlight=False)
        elif answer["finished"] or not follow:
            return
        else:
            time.sleep(POLL_S)


def _explain(job: dict[str, Any], follow: bool) -> None:
    """Why there may be nothing to see."""
    if job["lease_s"] is not None:
        err.print(f"{job['id']} is driven by a process of yours; this is what its server prints", markup=False)
    elif job["waiting_for"] and follow:
        err.print(f"{job['id']} is {job['state']}: {job['waiting_for']}", soft_wrap=True, markup=False)
