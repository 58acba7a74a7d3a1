"""A job that was submitted and left to the cluster, as Python sees it."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from opentinker.client.policy import PolicyClient
from opentinker.client.reach import Connect, choose_endpoint
from opentinker.client.scheduler import ENDED, SchedulerClient
from opentinker.client.sync import SyncRunner
from opentinker.config.job import JobConfig
from opentinker.errors import CheckpointError, ConflictError, DeadlineError, JobFailedError

T = TypeVar("T")
POLL_S = 20.0
NOT_SAVED = "no checkpoint could be written"
"""In the cause of a job that was to be stopped after one."""


def stop_failure(job: dict[str, Any]) -> str:
    """Why a job that was stopped and has ended did not end as asked, with a checkpoint where there was something to save; empty
    if it did."""
    if job["state"] == "FAILED" or NOT_SAVED in job["cause"]:
        return f"job {job['id']} is {job['state']}: {job['cause'] or 'no cause is known'}"
    return ""


class SubmittedJob:
    """A job that does not need this process: it goes on when the client is closed. Not for concurrent callers."""

    def __init__(
        self, scheduler: SchedulerClient, config: JobConfig, record: dict[str, Any], *, connect: Connect = "auto"
    ) -> None:
        self.config = config
        """As it was sent."""
        self.id: str = record["id"]
        self._scheduler = scheduler
        self._record = record
        self._connect: Connect = connect
        self._sync: SyncRunner | None = None
        self._policy: PolicyClient | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The job as the scheduler describes it now."""
        if self._record["state"] not in ENDED:
            self._record = self._scheduler.job(self.id)
        return self._record

    @property
    def state(self) -> str:
        """The job's state now."""
        return str(self.record["state"])

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The job's record once it is COMPLETED.

        Raises:
            JobFailedError: it FAILED or was CANCELLED.
            DeadlineError: it has not ended after `timeout_s`; it goes on.
        """
        return self._until(lambda state: state == "COMPLETED", timeout_s)

    def logs(self) -> str:
        """What its driver and environment printed so far, or its server where it has no driver."""
        text, offset = "", 0
        while True:
            answer = self._scheduler.logs(self.id, offset=offset)
            if answer["offset"] <= offset:
                return text
            text, offset = text + answer["text"], answer["offset"]

    def cancel(self) -> None:
        """End it at once, as CANCELLED. Does nothing on a job that has ended."""
        self._record = self._scheduler.cancel(self.id)

    def stop(self) -> None:
        """End it after a checkpoint, `stopped`, where it has something to save; returns when it has ended.

        Raises:
            CheckpointError: the checkpoint could not be written; the job has ended all the same.
            JobFailedError: it FAILED, now or before.
        """
        self._record = self._scheduler.stop(self.id)
        while self._record["state"] not in ENDED:
            self._record = self._scheduler.job(self.id, wait_s=POLL_S, state=self._record["state"])
        if why := stop_failure(self._record):
            kind = JobFailedError if self._record["state"] == "FAILED" else CheckpointError
            raise kind(why, hint=f"`opentinker checkpoints {self.id}` lists what it saved before")

    def run(self, work: Callable[[PolicyClient], Awaitable[T]], *, start_timeout_s: float = 1800.0) -> T:
        """Run async work on the policy of an inference job from synchronous code, once its server is up. After a restart of the
        job, the next call reaches its new server.

        Raises:
            ConflictError: the job has a driver, which its policy belongs to.
            JobFailedError: it has ended.
            DeadlineError: its server is not up after `start_timeout_s`; the job waits on.
        """
        if self.config.driven:
            raise ConflictError(f"job {self.id} is driven by the cluster, and its policy with it")
        server = self._until(lambda state: state == "RUNNING", start_timeout_s)["server"]
        if self._sync is None:
            self._sync = SyncRunner()
        if self._policy is None or self._policy.policy != server["policy"]:
            endpoint = choose_endpoint(server, self._scheduler.url, self._connect)
            earlier, self._policy = self._policy, None
            self._sync.run(_closed(earlier))
            self._policy = PolicyClient(endpoint, server["token"], server["policy"])
        return self._sync.run(_called(work, self._policy))

    def close(self) -> None:
        """Close the connection to its policy; the job goes on."""
        if self._sync is not None:
            self._sync.run(_closed(self._policy))
            self._sync.close()
            self._sync = self._policy = None

    def _until(self, reached: Callable[[str], bool], timeout_s: float | None) -> dict[str, Any]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        record = self.record
        while not reached(record["state"]):
            if record["state"] in ENDED:
                raise JobFailedError(
                    f"job {self.id} is {record['state']}: {record['cause'] or 'no cause is known'}",
                    hint=f"`opentinker logs {self.id}` has more",
                )
            left_s = POLL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                waiting = record.get("waiting_for")
                raise DeadlineError(
                    f"job {self.id} is {record['state']} after {timeout_s:g} s", hint=f"waiting: {waiting}" if waiting else ""
                )
            record = self._record = self._scheduler.job(self.id, wait_s=min(left_s, POLL_S), state=record["state"])
        return record


async def _called(work: Callable[[PolicyClient], Awaitable[T]], policy: PolicyClient) -> T:
    return await work(policy)


async def _closed(policy: PolicyClient | None) -> None:
    if policy is not None:
        await policy.close()
