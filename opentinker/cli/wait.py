"""`opentinker wait`: until a job has ended, or has come so far."""

import time
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
    print_error,
    print_json,
    without_token,
)
from opentinker.cli.patience import RECONNECT_S, Patience
from opentinker.cli.ps import State
from opentinker.client.scheduler import ENDED, SchedulerClient
from opentinker.errors import OpenTinkerError

POLL_S = 20.0
EXIT_CODES = {"COMPLETED": 0, "FAILED": 1, "CANCELLED": 2}
OTHER_END = 3
TIMED_OUT = 124
"""As `timeout` of the coreutils has it."""
COULD_NOT_WAIT = 125
_WAY = ("QUEUED", "STARTING", "RUNNING", "COMPLETED")


def wait(
    job_id: JobArgument,
    timeout_s: Annotated[float | None, typer.Option("--timeout", min=0.0, help="Seconds. Default: for ever.")] = None,
    until: Annotated[
        State | None, typer.Option("--for", case_sensitive=False, help="Wait for this state instead of the end.")
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Wait until a job has ended, or with --for until it is in a state or past it.

    The exit code tells how it went: 0 the job COMPLETED, or is where --for wanted it; 1 it FAILED; 2 it was CANCELLED; 3 it
    COMPLETED and --for wanted another end; 124 the timeout passed; 125 the job could not be waited for.
    """
    try:
        with connected(url, key, state_dir) as client:
            job = await_job(client, job_id, until, timeout_s)
    except OpenTinkerError as error:
        print_error(error)
        raise typer.Exit(COULD_NOT_WAIT) from None
    code = exit_code(job["state"], until)
    if as_json:
        print_json(without_token(job))
    else:
        out.print(f"{job['id']} {job['state']}" + (f": {job['cause']}" if job["cause"] else ""), soft_wrap=True, markup=False)
        if code == TIMED_OUT and job["waiting_for"]:
            err.print(f"waiting: {job['waiting_for']}", soft_wrap=True, markup=False)
    raise typer.Exit(code)


def reached(state: str, until: str | None) -> bool:
    """Whether there is nothing more to wait for. A job that has COMPLETED was in every state before."""
    if state in ENDED:
        return True
    return until in _WAY and state in _WAY and _WAY.index(state) >= _WAY.index(until)


def exit_code(state: str, until: str | None) -> int:
    """Of `wait`, when the job was last seen in `state`."""
    if not reached(state, until):
        return TIMED_OUT
    if state == until or (until in _WAY and state in _WAY):
        return 0
    return OTHER_END if state == "COMPLETED" and until is not None else EXIT_CODES[state]


def await_job(client: SchedulerClient, job_id: str, until: str | None, timeout_s: float | None) -> dict[str, Any]:
    """The job when there is nothing more to wait for, or the time has passed.

    Raises:
        OpenTinkerError: there is no such job, or the cluster is away for too long.
    """
    patience = Patience()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    job = patience.ask(lambda: client.job(job_id))
    while not reached(job["state"], until):
        left_s = POLL_S if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            break
        state, wait_s = job["state"], min(left_s, POLL_S)
        within_s = RECONNECT_S if deadline is None else left_s
        job = patience.ask(lambda: client.job(job_id, wait_s=wait_s, state=state), within_s=within_s)  # noqa: B023
    return job
