"""Processes are started ahead for the jobs that come next, where they will likely run, and never for anybody else."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from opentinker.scheduler.placement import Allocation, Demand, Node
from opentinker.scheduler.plan import JobView, ServerView, Snapshot, Wait
from opentinker.scheduler.prestart import prestart_process
from opentinker.scheduler.queueing import Policy
from opentinker.scheduler.settings import Quota
from opentinker.scheduler.states import JobState, ServerState
from opentinker.scheduler.warming import KEEP_S, RETRY_S, NextJob, NoPrestartError, Warmth, next_jobs

GPU = Demand(gpus=1)
NODES = [Node("a", "a", 2, 0), Node("b", "b", 2, 0)]


def running(job_id: str, node: str, since: float, limit: float | None = None) -> tuple[JobView, ServerView]:
    job = JobView(job_id, JobState.RUNNING, (GPU,), holds_since=since, time_limit_s=limit)
    return job, ServerView(f"s-{job_id}", ServerState.READY, (Allocation(node, GPU),), (job_id,))


def snapshot(holders: list[tuple[JobView, ServerView]], queued: list[JobView], **fields: Any) -> Snapshot:
    return Snapshot(100.0, NODES, [job for job, _ in holders] + queued, [server for _, server in holders], **fields)


def queue(*names: str, demand: Demand = GPU, owner: str = "") -> list[JobView]:
    return [JobView(name, JobState.QUEUED, (demand,), owner=owner) for name in names]


def test_the_first_in_line_gets_the_place_of_who_ends_first() -> None:
    holders = [running("old", "a", 10.0), running("limited", "b", 50.0, limit=60.0), running("new", "b", 90.0)]
    waits = [Wait(name, "") for name in ("q1", "q2", "q3", "q4")]
    jobs = queue("q1", "q2", "q3", "q4")
    found = next_jobs(snapshot(holders, jobs), waits, 9)
    assert found == (NextJob("q1", "b", GPU), NextJob("q2", "a", GPU), NextJob("q3", "b", GPU))
    assert next_jobs(snapshot(holders, jobs), waits, 1) == found[:1]
    assert next_jobs(snapshot(holders, jobs), waits, 0) == ()


def test_nobody_who_could_not_start_is_warmed() -> None:
    holders = [running("r", "a", 10.0)]
    over = queue("over", owner="ann")
    big, slot, fits = queue("big", demand=Demand(gpus=4)), queue("slot", demand=Demand(cpu_slots=1)), queue("fits")
    waits = [Wait(name, "") for name in ("over", "big", "slot", "fits")]
    policy = Policy(quotas={"ann": Quota(jobs=0)})
    assert next_jobs(snapshot(holders, over + big + slot + fits, policy=policy), waits, 9) == (NextJob("fits", "a", GPU),)


def test_a_start_has_the_node_to_itself() -> None:
    job, server = running("r", "a", 10.0)
    starting = ServerView("s2", ServerState.STARTING, (Allocation("a", GPU),), ("r2",))
    jobs = [(job, server), (JobView("r2", JobState.STARTING, (GPU,)), starting)]
    assert next_jobs(snapshot(jobs, queue("q")), [Wait("q", "")], 9) == ()


class Starter:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.forget_error: Exception | None = None

    async def prestart(self, job: NextJob, keep_s: float) -> None:
        self.calls.append(f"+{job.job_id}@{job.node_id}")
        if self.error is not None:
            raise self.error

    async def forget(self, job_id: str, node_id: str) -> None:
        self.calls.append(f"-{job_id}@{node_id}")
        if self.forget_error is not None:
            raise self.forget_error


async def test_what_waits_for_nobody_is_ended_and_what_ran_out_is_started_anew() -> None:
    starter, now = Starter(), [0.0]
    warmth = Warmth(starter, lambda: now[0])
    here, there = NextJob("j", "a", GPU), NextJob("j", "b", GPU)

    async def look(*jobs: NextJob) -> list[str]:
        warmth.want(jobs)
        starter.calls.clear()
        if warmth.due:
            await warmth.work()
        return starter.calls

    assert await look(here) == ["+j@a"]
    assert await look(here) == []
    now[0] = KEEP_S
    assert await look(here) == ["+j@a"]
    assert await look(there) == ["+j@b"]
    assert await look(there) == ["-j@a"]
    warmth.left("j", "b")
    assert await look() == [], "it starts where it is warm"
    assert await look(here) == ["+j@a"]
    warmth.left("j", "b")
    assert await look() == ["-j@a"], "it starts elsewhere"
    assert await look(here) == ["+j@a"]
    warmth.left("j")
    assert await look() == ["-j@a"], "it was cancelled"


async def test_a_job_that_starts_meanwhile_is_left_alone() -> None:
    """Whatever is under way when it starts, nothing is ended where it starts, and nothing more is started for it."""

    class Slow(Starter):
        async def forget(self, job_id: str, node_id: str) -> None:
            await super().forget(job_id, node_id)
            warmth.left("j", "a")

    starter = Slow()
    warmth = Warmth(starter, lambda: 0.0)
    warmth.want((NextJob("j", "a", GPU), NextJob("k", "a", GPU)))
    await warmth.work()
    warmth.want((NextJob("j", "b", GPU),))
    await warmth.work()
    warmth.left("k")
    starter.calls.clear()
    await warmth.work()  # while k's processes are ended, j starts on a
    assert starter.calls == ["-k@a", "-j@b"]
    assert not warmth.due
    warmth.left("j")
    assert not warmth.due, "what runs now is not of the warm-up any more"


async def test_a_cluster_that_cannot_do_it_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    starter = Starter()
    starter.error = NoPrestartError("no such call")
    warmth = Warmth(starter, lambda: 0.0)
    warmth.want((NextJob("j", "a", GPU), NextJob("k", "a", GPU)))
    await warmth.work()
    assert starter.calls == ["+j@a"]
    assert not warmth.due
    assert "no_prestart" in caplog.text


async def test_a_start_that_fails_is_tried_again_later_and_keeps_nobody_from_being_warmed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starter, now = Starter(), [0.0]
    warmth = Warmth(starter, lambda: now[0])
    warmth.want((NextJob("j", "a", GPU), NextJob("k", "a", GPU)))
    starter.error = ConnectionError("the raylet is busy")
    await warmth.work()
    assert starter.calls == ["+j@a", "+k@a"]
    assert not warmth.due, "not at every look"
    assert "not_prestarted job=j node=a" in caplog.text
    now[0] = RETRY_S
    starter.error = None
    await warmth.work()
    assert starter.calls[2:] == ["+j@a", "+k@a"]
    now[0] += RETRY_S
    assert not warmth.due
    warmth.left("j")
    await warmth.work()
    assert starter.calls[4:] == ["-j@a"], "what there is of it"


async def test_an_end_that_fails_is_tried_again_until_they_end_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    starter, now = Starter(), [0.0]
    warmth = Warmth(starter, lambda: now[0])
    warmth.want((NextJob("j", "a", GPU),))
    await warmth.work()
    warmth.left("j")
    warmth.want((NextJob("k", "b", GPU),))
    starter.forget_error = ConnectionError("the node is busy")
    starter.calls.clear()
    await warmth.work()
    assert starter.calls == ["-j@a", "+k@b"], "others are not kept from being warmed"
    assert "not_forgotten job=j node=a" in caplog.text
    warmth.want(())
    looks = 0
    while warmth._stale:
        assert not warmth.due, "not at every look"
        now[0] += RETRY_S
        await warmth.work()
        looks += 1
    assert 1 < looks <= KEEP_S / RETRY_S
    assert now[0] < KEEP_S


@pytest.mark.parametrize("hanging", ["prestart", "forget"])
async def test_a_request_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, hanging: str) -> None:
    monkeypatch.setattr("opentinker.scheduler.warming.ASK_S", 0.01)
    starter, now = Starter(), [0.0]
    warmth = Warmth(starter, lambda: now[0])
    warmth.want((NextJob("j", "a", GPU),))
    if hanging == "forget":
        await warmth.work()
        warmth.left("j")

    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(starter, hanging, hang)
    async with asyncio.timeout(5.0):
        await warmth.work()
    assert not warmth.due
    now[0] = RETRY_S
    assert warmth.due


async def test_what_could_not_be_ended_is_not_ended_where_its_job_starts_or_is_warmed_again() -> None:
    """Not even if that comes while it is being tried."""

    class Failing(Starter):
        async def forget(self, job_id: str, node_id: str) -> None:
            await super().forget(job_id, node_id)
            if starts_meanwhile:
                warmth.left("j", "a")
            raise ConnectionError

    for starts_meanwhile in (False, True):
        starter, now = Failing(), [0.0]
        warmth = Warmth(starter, lambda now=now: now[0])
        for node in "ab":
            warmth.want((NextJob("j", node, GPU),))
            await warmth.work()
        assert warmth.due
        await warmth.work()
        assert starter.calls[:3] == ["+j@a", "+j@b", "-j@a"]
        warmth.want((NextJob("j", "a", GPU),))
        if starts_meanwhile:
            warmth.left("j", "a")
        else:
            await warmth.work()
        starter.calls.clear()
        now[0] = RETRY_S
        await warmth.work()
        assert "-j@a" not in starter.calls


class Answering(grpc.GenericRpcHandler):
    """A raylet that answers every request with this status."""

    def __init__(self, status: grpc.StatusCode | None) -> None:
        self._status = status

    def service(self, details: Any) -> Any:
        if self._status is None:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda _, context: context.abort(self._status, "no"))


@pytest.mark.parametrize(
    ("status", "never"), [(None, True), (grpc.StatusCode.UNAVAILABLE, False), (grpc.StatusCode.DEADLINE_EXCEEDED, False)]
)
def test_a_raylet_that_does_not_know_the_request_never_will_and_one_that_fails_may(
    monkeypatch: pytest.MonkeyPatch, status: grpc.StatusCode | None, never: bool
) -> None:
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    raylet = grpc.server(ThreadPoolExecutor(1), handlers=(Answering(status),))
    port = raylet.add_insecure_port("127.0.0.1:0")
    raylet.start()
    try:
        with pytest.raises(NoPrestartError if never else grpc.RpcError) as error:
            prestart_process(f"127.0.0.1:{port}", {"env_vars": {"A": "b"}}, 1.0)
        assert ("UNIMPLEMENTED" in str(error.value)) == never
    finally:
        raylet.stop(None)


def test_a_ray_without_the_call_never_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    monkeypatch.delattr("ray.core.generated.node_manager_pb2.PrestartWorkersRequest")
    with pytest.raises(NoPrestartError, match="PrestartWorkersRequest"):
        prestart_process("127.0.0.1:1", {}, 1.0)


async def test_a_queued_job_is_warmed_and_cooled_by_the_scheduler(world: Any) -> None:
    first = await world.reach(await world.interactive(), "RUNNING")
    second, third = await world.interactive(), await world.interactive()
    await world.until(lambda: world.launcher.warm == {second["id"]: "n1"})
    await world.service.cancel("admin", second["id"])
    await world.until(lambda: world.launcher.warm == {third["id"]: "n1"})
    await world.service.complete("admin", first["id"])
    await world.reach(third, "RUNNING")
    await world.settle()
    assert world.launcher.warm == {third["id"]: "n1"}, "they are its server's now"
