"""`opentinker stop`: end jobs with a checkpoint."""

from typing import Any

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
    print_json,
    without_token,
)
from opentinker.cli.each_job import for_each_job
from opentinker.client.scheduler import ENDED, SchedulerClient
from opentinker.client.submitted import stop_failure
from opentinker.errors import CheckpointError


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
    with connected(url, key, state_dir) as client:

        def end(job_id: str) -> None:
            job = _stopped(client, job_id)
            why = stop_failure(job)
            if as_json:
                print_json(without_token(job))
            elif not why:
                out.print(
                    f"{job['id']} {job['state']}{': ' if job['cause'] else ''}{job['cause']}", soft_wrap=True, markup=False
                )
            if why:
                raise CheckpointError(why, hint=f"`opentinker checkpoints {job_id}` lists what it saved before")

        for_each_job(job_ids, end)


def _stopped(client: SchedulerClient, job_id: str) -> dict[str, Any]:
    """The job, once its checkpoint is written and it has ended."""
    job = client.stop(job_id)
    if job["state"] not in ENDED:
        err.print(f"{job_id} writes its checkpoint")
    while job["state"] not in ENDED:
        job = client.job(job_id, wait_s=20.0, state=job["state"])
    return job
