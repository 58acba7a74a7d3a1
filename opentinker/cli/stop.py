"""`opentinker stop`: end jobs with a checkpoint."""

import typer

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JobsArgument,
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
from opentinker.client.scheduler import ENDED
from opentinker.client.submitted import stop_failure
from opentinker.errors import CheckpointError, OpenTinkerError


def stop(
    job_ids: JobsArgument,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Stop jobs after a checkpoint, which is called `stopped`: the weights after the step in progress are kept.

    Waits until the checkpoint is written; Ctrl-C ends only the waiting. `opentinker cancel` ends jobs at once.

    Exits with 1 if a checkpoint could not be written, or a job has FAILED or could not be stopped.
    """
    failed = False
    with connected(url, key, state_dir) as client:
        for job_id in job_ids:
            try:
                job = client.stop(job_id)
                if job["state"] not in ENDED:
                    err.print(f"{job_id} writes its checkpoint")
                while job["state"] not in ENDED:
                    job = client.job(job_id, wait_s=20.0, state=job["state"])
            except OpenTinkerError as error:
                print_error(error)
                failed = True
                continue
            if why := stop_failure(job):
                hint = f"`opentinker checkpoints {job_id}` lists what it saved before"
                print_error(CheckpointError(why, hint=hint))
                failed = True
            if as_json:
                print_json(without_token(job))
            elif not why:
                out.print(f"{job['id']} {job['state']}{': ' if job['cause'] else ''}{job['cause']}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)
