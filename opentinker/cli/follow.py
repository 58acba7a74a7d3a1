"""Watch a submitted job until it ends."""

import time
from typing import Any

from opentinker.cli.patience import Patience
from opentinker.client.scheduler import ENDED, SchedulerClient
from opentinker.errors import JobFailedError
from opentinker.training.progress import Progress

POLL_S = 0.5


def follow(client: SchedulerClient, job_id: str, progress: Progress) -> dict[str, Any]:
    """Show the job's state and metrics as they come; the job, once it is COMPLETED.

    Raises:
        JobFailedError: it FAILED or was CANCELLED.
    """
    after = 0
    patience = Patience()
    while True:
        job = patience.ask(lambda: client.job(job_id))  # before the rows: a job that has ended writes no more of them
        at = after
        answer = patience.ask(lambda: client.metrics(job_id, after=at))  # noqa: B023
        after = answer["next"]
        for row in answer["rows"]:
            progress(row)
        if answer["rows"]:
            continue
        if job["state"] in ENDED:
            break
        if not after:
            progress.status(_status(job))
        time.sleep(POLL_S)
    if job["state"] != "COMPLETED":
        raise JobFailedError(
            f"job {job_id} is {job['state']}: {job['cause'] or 'no cause is known'}",
            hint=f"`opentinker logs {job_id}` has more",
        )
    return job


def _status(job: dict[str, Any]) -> str:
    waiting = job.get("waiting_for")
    return f"{job['state'].lower()}" + (f", {waiting}" if waiting else "")
