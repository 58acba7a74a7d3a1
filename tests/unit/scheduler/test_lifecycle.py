"""Kinds of jobs, restarts, limits and stops, with everything real but the servers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from opentinker.errors import (
    AuthenticationError,
    CheckpointError,
    ConflictError,
    ServerLostError,
    UnknownModelError,
)
from opentinker.scheduler.api import create_app
from opentinker.scheduler.clearing import wait_for_memory
from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.launcher import Launched, ServerSpec
from opentinker.scheduler.limits import PER_ADDRESS_BURST
from opentinker.scheduler.placement import Node
from opentinker.scheduler.plan import DriverOutcome
from opentinker.server import models

pytestmark = pytest.mark.usefixtures("world")
DIED = DriverOutcome("the driver process died", lost=True)


def kinds_of(world: Any, job: dict[str, Any]) -> list[str]:
    return [event.kind for event in world.store.events(job["id"])]


async def inference(world: Any, **changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = await world.service.submit("admin", {"kind": "inference", "base_model": "some-model", **changes})
    return job


async def test_an_inference_job_has_a_server_without_a_trainer_and_no_driver(world: Any) -> None:
    job = await world.reach(await inference(world), "RUNNING")
    assert world.launcher.servers[job["server"]["id"]].config["trainer"] is None
    assert job["lease_s"] is None
    world.clock.now += 1e6
    await world.settle()
    assert (await world.service.job("admin", job["id"]))["state"] == "RUNNING"
    assert world.launcher.drivers == {}
    assert (await world.service.complete("admin", job["id"]))["state"] == "COMPLETED"
    assert world.launcher.saved == []


async def test_an_inference_job_with_a_lease_ends_with_its_client(world: Any) -> None:
    job = await world.reach(await inference(world, lease=True), "RUNNING")
    world.clock.now += 1000.0
    assert "lease expired" in (await world.reach(job, "CANCELLED"))["cause"]


async def test_a_driver_that_dies_is_run_again_on_a_new_server_and_resumes(world: Any) -> None:
    job = await world.reach(await world.rl(max_restarts=1), "RUNNING")
    await world.until(lambda: job["id"] in world.launcher.drivers)
    first = world.launcher.drivers[job["id"]]
    assert not first.resume
    world.launcher.ends[job["id"]].set_result(DIED)
    await world.until(lambda: world.launcher.drivers.get(job["id"], first) is not first)
    second = world.launcher.drivers[job["id"]]
    assert second.resume
    assert second.server_id != first.server_id
    assert second.policy_id != first.policy_id
    assert (await world.service.job("admin", job["id"]))["server"]["policy"] == second.policy_id
    assert kinds_of(world, job) == ["submitted", "starting", "running", "restarting", "released", "starting", "running"]
    world.launcher.ends[job["id"]].set_result(DIED)
    job = await world.reach(await world.service.job("admin", job["id"]), "FAILED")
    assert job["cause"] == "the driver process died"
    await world.until_free(1)


async def test_a_server_that_dies_is_replaced_and_the_queue_goes_on_meanwhile(world: Any) -> None:
    job = await world.reach(await inference(world, scheduling={"max_restarts": 1}), "RUNNING")
    world.launcher.unkillable = "process 7 cannot be killed"
    world.launcher.faults[job["id"]] = "the worker died"
    job = await world.reach(job, "QUEUED")
    assert job["server"] is None
    await world.until(lambda: "unhealthy" in kinds_of(world, job))
    assert (await world.service.job("admin", job["id"]))["waiting_for"] == "its earlier server to be gone"
    (held,) = (await world.service.cluster("admin"))["nodes"][0]["held"]
    assert held["unhealthy"] == "process 7 cannot be killed"
    world.launcher.unkillable = ""
    world.launcher.faults.clear()
    job = await world.reach(await world.service.job("admin", job["id"]), "STARTING")
    await world.reach(job, "RUNNING")


async def test_restarts_are_counted_across_a_restart_of_the_scheduler(world: Any) -> None:
    job = await world.reach(await world.rl(max_restarts=1), "RUNNING")
    await world.until(lambda: job["id"] in world.launcher.drivers)
    world.launcher.ends[job["id"]].set_result(DIED)
    await world.until(lambda: "restarting" in kinds_of(world, job))
    await world.crash()
    world.boot()
    await world.until(lambda: job["id"] in world.launcher.drivers and world.launcher.drivers[job["id"]].resume)
    world.launcher.ends[job["id"]].set_result(DIED)
    assert (await world.reach(await world.service.job("admin", job["id"]), "FAILED"))["cause"] == "the driver process died"


async def test_an_error_of_the_drivers_own_is_not_tried_again(world: Any) -> None:
    job = await world.reach(await world.rl(max_restarts=5), "RUNNING")
    await world.until(lambda: job["id"] in world.launcher.drivers)
    world.launcher.ends[job["id"]].set_result(DriverOutcome("no such environment"))
    assert (await world.reach(job, "FAILED"))["cause"] == "no such environment"


@pytest.mark.parametrize(("kind", "end"), [("interactive", "CANCELLED"), ("inference", "COMPLETED"), ("rl", "FAILED")])
async def test_a_server_with_nothing_to_do_is_given_back(world: Any, kind: str, end: str) -> None:
    config = {"kind": kind, "base_model": "some-model", "scheduling": {"idle_limit_s": 600.0}}
    config |= {"environment": {"name": "arithmetic"}} if kind == "rl" else {}
    job = await world.reach(await world.service.submit("admin", config), "RUNNING")
    world.launcher.idle_s[job["id"]] = 599.0
    await world.settle()
    assert (await world.service.job("admin", job["id"]))["state"] == "RUNNING"
    world.launcher.idle_s[job["id"]] = 600.0
    assert "idle for 10 min" in (await world.reach(job, end))["cause"]
    assert world.launcher.saved == ([] if kind == "inference" else [f"{job['id']}/stopped"])
    await world.until_free(1)


async def test_stop_saves_first_and_cancel_does_not(world: Any) -> None:
    job = await world.reach(await world.rl(), "RUNNING")
    world.launcher.may_save.clear()
    stopping = asyncio.create_task(world.service.stop("admin", job["id"]))
    await world.until(lambda: "stopping" in kinds_of(world, job))
    assert (await world.service.job("admin", job["id"]))["state"] == "RUNNING"
    world.launcher.may_save.set()
    job = await stopping
    assert job["state"] == "CANCELLED"
    assert job["cause"] == "stopped by its owner; its weights are in checkpoint 'stopped'"
    assert world.launcher.saved == [f"{job['id']}/stopped"]
    other = await world.reach(await world.rl(), "RUNNING")
    await world.service.cancel("admin", other["id"])
    assert len(world.launcher.saved) == 1


async def test_a_stop_that_cannot_save_ends_the_job_and_says_so(world: Any) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")
    world.launcher.save_error = CheckpointError("cannot write the checkpoint: disk full")
    job = await world.service.stop("admin", job["id"])
    assert job["cause"] == "stopped by its owner; no checkpoint could be written: cannot write the checkpoint: disk full"


async def test_a_cancel_during_the_last_checkpoint_does_not_wait_for_it(world: Any) -> None:
    job = await world.reach(await world.rl(), "RUNNING")
    world.launcher.may_save.clear()
    stopping = asyncio.create_task(world.service.stop("admin", job["id"]))
    await world.until(lambda: "stopping" in kinds_of(world, job))
    job = await world.service.cancel("admin", job["id"])
    assert (job["state"], job["cause"]) == ("CANCELLED", "cancelled by its owner")
    assert (await stopping)["state"] == "CANCELLED"
    await world.until_free(1)


async def test_stop_ends_a_job_that_waits_or_starts_and_leaves_an_ended_one(world: Any) -> None:
    world.launcher.may_start.clear()
    first, second = await world.interactive(), await world.interactive()
    await world.reach(first, "STARTING")
    for job in (second, first):
        assert (await world.service.stop("admin", job["id"]))["state"] == "CANCELLED"
    assert world.launcher.saved == []
    assert (await world.service.stop("admin", first["id"]))["state"] == "CANCELLED"


async def test_the_token_of_an_earlier_server_says_that_there_is_a_new_one_and_is_no_guess(world: Any) -> None:
    app = create_app(world.service)
    transport = httpx.ASGITransport(app, client=("198.51.100.9", 1))
    job = await world.reach(await inference(world, scheduling={"max_restarts": 1}), "RUNNING")
    other = await world.interactive()
    old, path = job["server"]["token"], f"/v1/jobs/{job['id']}/server/v1/info"
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as http:

        async def ask(token: str, path: str = path) -> tuple[int, str]:
            answer = await http.get(path, headers={"Authorization": f"Bearer {token}"})
            return answer.status_code, answer.json()["code"]

        world.launcher.may_start.clear()
        world.launcher.faults[job["id"]] = "killed by signal 9"
        await world.until(lambda: "restarting" in kinds_of(world, job))
        world.launcher.faults.clear()
        world.launcher.may_start.set()
        job = await world.reach(await world.service.job("admin", job["id"]), "RUNNING")
        assert job["server"]["token"] != old
        for _ in range(2 * int(PER_ADDRESS_BURST)):  # as a client that tries again and again
            assert await ask(old) == (409, ServerLostError.code)
        with pytest.raises(ServerLostError, match="it has a new server; read the job again"):
            await world.service.server_of(job["id"], None, old)
        assert (await world.service.server_of(job["id"], None, job["server"]["token"]))["token"] == job["server"]["token"]
        assert world.service.users._limiter.wait_s("198.51.100.9", "any", world.clock()) == 0.0
        for token, where in ((f"{old}x", path), (old, path.replace(job["id"], other["id"]))):
            assert await ask(token, where) == (401, AuthenticationError.code)


async def test_a_stop_survives_the_scheduler(world: Any) -> None:
    job = await world.reach(await world.rl(max_restarts=3), "RUNNING")
    world.launcher.may_save.clear()
    stopping = asyncio.create_task(world.service.stop("admin", job["id"]))
    await world.until(lambda: "stopping" in kinds_of(world, job))
    stopping.cancel()
    await world.crash()
    world.boot()
    world.launcher.may_save.set()
    job = await world.reach(await world.service.job("admin", job["id"]), "CANCELLED")
    assert job["cause"] == "stopped by its owner; its weights are in checkpoint 'stopped'"


async def test_a_stopped_job_does_not_start_again_when_its_driver_dies_during_the_checkpoint(world: Any) -> None:
    job = await world.reach(await world.rl(max_restarts=3), "RUNNING")
    await world.until(lambda: job["id"] in world.launcher.drivers)
    world.launcher.may_save.clear()
    stopping = asyncio.create_task(world.service.stop("admin", job["id"]))
    await world.until(lambda: "stopping" in kinds_of(world, job))
    world.launcher.ends[job["id"]].set_result(DIED)
    job = await stopping
    assert (job["state"], job["cause"]) == (
        "CANCELLED",
        "stopped by its owner; no checkpoint could be written: the driver process died",
    )


async def test_a_job_whose_place_is_gone_gets_another_without_counting_it(world: Any) -> None:
    world.launcher.unplaced = 2
    job = await world.reach(await world.interactive(), "RUNNING")
    assert kinds_of(world, job).count("returned") == 2
    world.launcher.unplaced = 99
    other = await world.service.complete("admin", job["id"])
    other = await world.reach(await world.interactive(), "FAILED")
    assert other["cause"] == "the node died before the server started"
    assert kinds_of(world, other).count("returned") == 5


async def test_a_server_that_says_why_it_cannot_start_is_not_started_again(world: Any) -> None:
    config = {"kind": "inference", "base_model": "broken", "scheduling": {"max_restarts": 100}}
    job = await world.reach(await world.service.submit("admin", config), "FAILED")
    assert job["cause"] == "the model does not fit"
    assert "restarting" not in kinds_of(world, job)


@pytest.mark.parametrize("where", ["the hub is away", "the cache is full"])
async def test_a_model_that_could_not_be_brought_is_tried_again_and_one_that_does_not_exist_is_not(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """As a server's start brings it."""

    def away(hub_id: str, **_: object) -> str:
        raise ConnectionError("no route to host")

    def full(file: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", away)
    monkeypatch.setattr(models, "KNOWN_MODELS", {"some-model": SimpleNamespace(find=Path, version="1", hint="")})
    monkeypatch.setattr(models, "check_model", lambda name: None)
    monkeypatch.setattr(models, "_convert_gguf", full)
    launch, tries = world.launcher.launch, []

    async def bring(spec: ServerSpec) -> Launched:
        tries.append(spec.job_id)
        if len(tries) == 1:
            models.resolve_model("hub:a/b" if where == "the hub is away" else "some-model", tmp_path)
        return await launch(spec)

    monkeypatch.setattr(world.launcher, "launch", bring)
    job = await world.reach(await inference(world, scheduling={"max_restarts": 1}), "RUNNING")
    assert kinds_of(world, job).count("restarting") == 1
    await world.service.complete("admin", job["id"])

    async def refuse(spec: ServerSpec) -> Launched:
        raise UnknownModelError("the model hub has no 'a/b'")

    monkeypatch.setattr(world.launcher, "launch", refuse)
    job = await world.reach(await inference(world, scheduling={"max_restarts": 1}), "FAILED")
    assert "restarting" not in kinds_of(world, job)


async def test_when_rays_head_is_lost_jobs_with_restarts_left_start_anew_and_others_fail(world: Any) -> None:
    world.launcher.cluster = [Node("n1", "here", gpus=0, cpu_slots=2)]
    mortal, lasting = await world.rl(), await world.rl(max_restarts=1)
    for job in (mortal, lasting):
        await world.reach(job, "RUNNING")
    await world.until(lambda: len(world.launcher.drivers) == 2)
    await world.crash()
    world.launcher.servers.clear()
    world.launcher.drivers.clear()
    world.launcher.ends.clear()
    world.launcher.cluster = [Node("n2", "another", gpus=0, cpu_slots=2)]
    world.boot()
    assert (await world.reach(await world.service.job("admin", mortal["id"]), "FAILED"))["cause"] == "its server is gone"
    await world.until(lambda: lasting["id"] in world.launcher.drivers and world.launcher.drivers[lasting["id"]].resume)
    assert world.launcher.drivers[lasting["id"]].node_id == "n2"


@pytest.mark.parametrize("jump_s", [86400.0, -86400.0])
async def test_a_clock_that_is_set_changes_no_time_limit(world: Any, jump_s: float) -> None:
    job = await world.reach(await world.interactive(scheduling={"time_limit_s": 20.0}), "RUNNING")
    world.jump_s = jump_s
    await world.settle()
    assert (await world.service.job("admin", job["id"]))["state"] == "RUNNING"
    world.clock.now += 18.0
    await world.reach(job, "FAILED")


async def test_only_jobs_that_the_cluster_does_not_drive_can_be_completed(world: Any) -> None:
    job = await world.reach(await world.rl(), "RUNNING")
    with pytest.raises(ConflictError, match="completes by itself"):
        await world.service.complete("admin", job["id"])


def test_a_gpu_is_back_when_its_memory_is() -> None:
    looks = [[GpuUse(0, "H200", 0.0, 9 * 2**30, 2**37), GpuUse(1, "H200", 0.0, 5 * 2**30, 2**37)]]
    looks.append([GpuUse(0, "H200", 0.0, 2**20, 2**37), looks[0][1]])
    reads = iter([looks[0], looks[1]])
    assert wait_for_memory((0,), 2**30, 5.0, lambda: next(reads)) == ""
    left = wait_for_memory((0, 1), 2**30, 0.0, lambda: looks[1])
    assert left == "GPU 1 still holds 5.0 GiB, though the job's processes are gone"
    assert wait_for_memory((), 0, 0.0, lambda: looks[0]) == ""
    assert wait_for_memory((3,), 0, 0.0, list) == "", "NVML does not tell"
