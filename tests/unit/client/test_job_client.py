"""The client against the scheduler's real HTTP API, over a scheduler that only remembers."""

import asyncio
import base64
import io
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from opentinker.client import client as client_module
from opentinker.client.client import Client
from opentinker.client.scheduler import SchedulerClient
from opentinker.client.sync import SyncRunner
from opentinker.errors import (
    AuthenticationError,
    ConflictError,
    DeadlineError,
    JobFailedError,
    NotFoundError,
    RateLimitedError,
    ServerLostError,
    UnavailableError,
)
from opentinker.scheduler.api import create_app
from opentinker.scheduler.listing import JobQuery
from opentinker.scheduler.records import Scope
from opentinker.scheduler.users import Caller

KEY = "right"


class Memory:
    """One job at a time; tests set its state."""

    def __init__(self) -> None:
        self.job_view: dict[str, Any] = {}
        self.next_state = "RUNNING"
        self.endpoint = "http://127.0.0.1:9"
        self.told: list[str] = []
        self.heartbeats = 0
        self.stalls_at = 0
        self.lease_s = 0.3
        self.code: dict[str, str] | None = None
        self.fail_calls = 0
        self.retry_after_s: list[float] = []
        self.proxied = False
        self.pages = 1
        self.queries: list[JobQuery] = []

    async def ping(self) -> None:
        return

    async def authenticate(self, key: str, address: str = "") -> Caller:
        if self.retry_after_s:
            raise RateLimitedError("too many", retry_after_s=self.retry_after_s.pop())
        if self.fail_calls:
            self.fail_calls -= 1
            raise UnavailableError("restarting")
        if key != KEY:
            raise AuthenticationError("the API key is not valid")
        return Caller("owner", frozenset(Scope), address)

    async def submit(
        self, owner: str, config: dict[str, Any], idempotency_key: str | None, code: Any, may_name: str
    ) -> dict[str, Any]:
        assert idempotency_key
        self.code = code
        self.job_view = {
            "id": "job-1",
            "owner": "owner",
            "name": config.get("name", ""),
            "state": "QUEUED",
            "cause": "",
            "waiting_for": "a free slot",
            "lease_s": self.lease_s,
            "config": config,
            "server": None,
        }
        return self.job_view

    async def jobs(self, owner: str, query: JobQuery) -> dict[str, Any]:
        self.queries.append(query)
        at = int(query.cursor or 0)
        return {"jobs": [{"id": f"job-{at}"}], "next": str(at + 1) if at + 1 < self.pages else None}

    async def server_of(self, job_id: str, owner: str | None, token: str | None, address: str = "") -> dict[str, str]:
        return {"endpoint": self.endpoint, "token": "t", "owner": "ann"}

    async def job(self, owner: str, job_id: str, state: str | None, wait_s: float) -> dict[str, Any]:
        if job_id != "job-1":
            raise NotFoundError(f"no job {job_id}")
        if self.job_view["state"] == "QUEUED":
            if self.next_state == "QUEUED":
                await asyncio.sleep(min(wait_s, 0.1))
            self.move(self.next_state)
        return self.job_view

    def move(self, state: str, cause: str = "") -> None:
        server = {"endpoint": self.endpoint, "policy": "policy-1", "token": "t"} if state == "RUNNING" else None
        if server and self.proxied:
            server["proxy"] = "/v1/jobs/job-1/server"
        self.job_view = {**self.job_view, "state": state, "cause": cause, "server": server}

    async def heartbeat(self, owner: str, job_id: str) -> dict[str, Any]:
        self.heartbeats += 1
        if self.heartbeats == self.stalls_at:
            await asyncio.sleep(5.0)
        return self.job_view

    async def complete(self, owner: str, job_id: str) -> dict[str, Any]:
        self.told.append("complete")
        if self.job_view["state"] == "FAILED":
            raise ConflictError("it has failed")
        self.move("COMPLETED")
        return self.job_view

    async def cancel(self, owner: str, job_id: str, by: Any = None) -> dict[str, Any]:
        self.told.append("cancel")
        self.move("CANCELLED")
        return self.job_view


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr("opentinker.client.http.ATTEMPTS", 2)  # the policies' endpoint is a dead one
    return Memory()


@pytest.fixture
def url(memory: Memory) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(memory), log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(5)


def test_a_job_runs_while_its_block_lasts_and_completes_after_it(url: str, memory: Memory) -> None:
    with Client(url, KEY) as client:
        with client.create_job(base_model="m", name="mine") as job:
            assert job.state == "RUNNING"
            assert job.server == {"endpoint": memory.endpoint, "policy": "policy-1", "token": "t"}
        assert memory.told == ["complete"]
        with pytest.raises(ConflictError, match="has ended"):
            job.save("late")
    assert memory.told == ["complete"]


def test_what_was_left_open_is_closed_before_the_job_is_released_and_does_not_keep_it(
    url: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CLOSE_S", 0.05)
    told: list[list[str]] = []

    async def closes() -> None:
        told.append(list(memory.told))

    async def fails() -> None:
        raise ValueError("it is broken")

    async def hangs() -> None:
        await asyncio.Event().wait()

    with Client(url, KEY) as client, client.create_job(base_model="m") as job:
        for close in (fails, hangs, closes):
            job.at_end(close)
    assert told == [[]]
    assert memory.told == ["complete"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_cancels_the_job(url: str, memory: Memory, error: type[BaseException]) -> None:
    with pytest.raises(error), Client(url, KEY) as client, client.create_job(base_model="m"):
        raise error
    assert memory.told == ["cancel"]


def test_leaving_the_client_ends_jobs_that_were_left_open(url: str, memory: Memory) -> None:
    with Client(url, KEY) as client:
        client.create_job(base_model="m")
    assert memory.told == ["cancel"]


def test_the_lease_is_renewed_from_acceptance_on_and_no_longer_than_the_job(url: str, memory: Memory) -> None:
    with Client(url, KEY) as client, client.create_job(base_model="m"):
        until = time.monotonic() + 20.0
        while memory.heartbeats < 3 and time.monotonic() < until:
            time.sleep(0.05)
        assert memory.heartbeats >= 3
    beats = memory.heartbeats
    time.sleep(0.3)
    assert memory.heartbeats == beats


def test_work_ends_with_the_job_however_long_its_own_calls_would_wait(url: str, memory: Memory) -> None:
    cleaned: list[Any] = []

    async def work(policy: Any) -> None:
        del policy
        memory.move("FAILED", "the server's worker process died")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError as cancelled:
            cleaned.append(cancelled.args)
            raise

    with Client(url, KEY) as client, pytest.raises(ServerLostError, match="the server's worker process died"):
        client.create_job(base_model="m").run(work)
    assert cleaned == [("job job-1 is FAILED: the server's worker process died",)]


def test_one_stalled_heartbeat_does_not_cost_the_lease(url: str, memory: Memory) -> None:
    memory.stalls_at, memory.lease_s = 2, 1.8
    with Client(url, KEY) as client, client.create_job(base_model="m"):
        time.sleep(2 * memory.lease_s)
        assert memory.heartbeats >= 5


def test_a_job_that_does_not_start_in_time_is_cancelled(url: str, memory: Memory) -> None:
    memory.next_state = "QUEUED"
    with Client(url, KEY) as client, pytest.raises(DeadlineError, match="not running after") as caught:
        client.create_job(base_model="m", start_timeout_s=0.3)
    assert "a free slot" in caught.value.hint
    assert memory.told == ["cancel"]


def test_a_job_that_fails_to_start_says_why(url: str, memory: Memory) -> None:
    memory.next_state = "FAILED"
    with Client(url, KEY) as client, pytest.raises(JobFailedError, match="job-1 is FAILED"):
        client.create_job(base_model="m")
    assert memory.told == []


def test_a_lost_server_is_explained_by_the_scheduler(url: str, memory: Memory) -> None:
    with Client(url, KEY) as client, client.create_job(base_model="m") as job:
        memory.move("FAILED", "the worker was killed by signal 9")
        with pytest.raises(ServerLostError, match="killed by signal 9"):
            job.save("checkpoint")


def test_a_job_that_was_cancelled_elsewhere_says_so(url: str, memory: Memory) -> None:
    with Client(url, KEY) as client, client.create_job(base_model="m") as job:
        memory.move("CANCELLED", "cancelled by its owner")
        with pytest.raises(JobFailedError, match="CANCELLED: cancelled by its owner") as caught:
            job.save("checkpoint")
        assert not isinstance(caught.value, ServerLostError)


def test_a_wrong_key_is_an_authentication_error(url: str) -> None:
    client = SchedulerClient(url, "wrong")
    with pytest.raises(AuthenticationError):
        client.jobs()


def test_a_scheduler_that_says_when_is_asked_then_and_a_poll_that_may_not_wait_looks(url: str, memory: Memory) -> None:
    client = SchedulerClient(url, KEY)
    job = client.submit({"base_model": "m"})
    memory.retry_after_s = [1.2]
    started = time.monotonic()
    assert client.job(job["id"])["id"] == job["id"]
    assert 1.2 <= time.monotonic() - started < 20.0  # told in whole seconds, so 2
    memory.retry_after_s = [1000.0]
    started = time.monotonic()
    assert client.job(job["id"], state=job["state"], wait_s=0.1)["id"] == job["id"]
    memory.retry_after_s = [1000.0]
    with pytest.raises(RateLimitedError) as caught:
        client.cancel(job["id"])
    assert caught.value.retry_after_s == 1000.0
    assert time.monotonic() - started < 20.0


def test_transient_failures_are_retried(url: str, memory: Memory) -> None:
    memory.fail_calls = 2
    client = SchedulerClient(url, KEY)
    assert client.submit({"base_model": "m"})["id"] == "job-1"
    memory.fail_calls = 100
    with pytest.raises(UnavailableError, match="cannot check keys"):
        client.jobs()


def test_the_schedulers_errors_keep_their_type(url: str, memory: Memory) -> None:
    client = SchedulerClient(url, KEY)
    with pytest.raises(NotFoundError, match="no job job-2"):
        client.job("job-2")


def test_code_travels_whole(url: str, memory: Memory) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("env.py", "x = 1")
    SchedulerClient(url, KEY).submit({"base_model": "m"}, code=buffer.getvalue())
    assert memory.code is not None
    assert base64.b64decode(memory.code["zip"]) == buffer.getvalue()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "ftp://x", "nonsense"])
def test_an_address_without_a_cluster_is_unavailable(address: str) -> None:
    with pytest.raises(UnavailableError):
        SchedulerClient(address, KEY).jobs()


async def test_synchronous_calls_work_where_a_loop_already_runs_and_keep_their_own_loop() -> None:
    loops = []

    async def work() -> int:
        loops.append(asyncio.get_running_loop())
        return 1

    runner = SyncRunner()
    assert runner.run(work()) == 1
    assert runner.run(work()) == 1
    runner.close()
    assert loops[0] is loops[1] is not asyncio.get_running_loop()


def test_every_call_runs_on_the_same_loop() -> None:
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    runner = SyncRunner()
    assert runner.run(loop()) is runner.run(loop())
    runner.close()
    runner.close()


def test_a_server_out_of_reach_is_used_through_the_scheduler(url: str, memory: Memory) -> None:
    memory.proxied = True
    with Client(url, KEY) as client, client.create_job(base_model="m") as job:
        assert job.server["endpoint"] == f"{url}/v1/jobs/job-1/server"
    with Client(url, KEY, connect="direct") as client, client.create_job(base_model="m") as job:
        assert job.server["endpoint"] == memory.endpoint


def test_a_list_goes_on_page_by_page_and_only_as_far_as_it_is_read(url: str, memory: Memory) -> None:
    memory.pages = 5
    client = SchedulerClient(url, KEY)
    assert [job["id"] for job in client.jobs(limit=2)] == ["job-0", "job-1"]
    assert len(memory.queries) == 2
    assert len(list(client.jobs())) == 5
    memory.queries.clear()
    first = next(client.jobs(states=["RUNNING", "QUEUED"], name="a b", kind="rl", owner="*"))
    assert first["id"] == "job-0"
    [query] = memory.queries
    assert (query.state, query.name, query.kind, query.owner) == (["RUNNING", "QUEUED"], "a b", "rl", "*")
