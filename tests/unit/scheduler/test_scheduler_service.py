"""The scheduler's promises, with everything real but the servers."""

import asyncio
import base64
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest

from opentinker.errors import ConfigError, ConflictError, InvalidRequestError, NotFoundError, UnknownModelError
from opentinker.scheduler.placement import Demand, Node
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.records import Event, Job
from opentinker.scheduler.settings import Quota
from opentinker.scheduler.states import JobState
from opentinker.scheduler.store import SqlStore, sqlite_url

pytestmark = pytest.mark.usefixtures("world")


async def test_a_job_gets_a_server_and_complete_takes_it_back(world: Any) -> None:
    job = await world.interactive()
    assert (job["state"], job["server"]) == ("QUEUED", None)
    job = await world.reach(job, "RUNNING")
    server = job["server"]
    spec = world.launcher.servers[server["id"]]
    assert server["token"] == spec.token
    assert server["policy"] == spec.policy_id
    assert spec.checkpoint_root.startswith(job["run_dir"])
    assert await world.free_slots() == 0
    job = await world.service.complete("admin", job["id"])
    assert (job["state"], job["cause"], job["server"]) == ("COMPLETED", "", None)
    assert world.launcher.calls == ["stop server"]
    assert await world.free_slots() == 1
    assert job["created_at"] <= job["started_at"] <= job["ended_at"]


async def test_a_token_is_shown_neither_in_the_list_nor_after_the_end(world: Any) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")
    (listed,) = (await world.service.jobs("admin"))["jobs"]
    assert listed["server"]["endpoint"]
    assert "token" not in listed["server"]
    world.launcher.unkillable = "process 1 cannot be killed"
    world.launcher.faults[job["id"]] = "it died"
    job = await world.reach(job, "FAILED")
    assert "token" not in job["server"]
    world.launcher.unkillable = ""


async def test_the_second_job_waits_until_the_first_ones_processes_are_gone(world: Any) -> None:
    first = await world.reach(await world.interactive(), "RUNNING")
    second = await world.interactive()
    await asyncio.sleep(0.05)
    second = await world.service.job("admin", second["id"])
    assert (second["state"], second["waiting_for"]) == (
        "QUEUED",
        f"needs 1 CPU slot; no CPU slot is free; after {first['id']}, which has no time limit",
    )
    world.launcher.unkillable = "process 4711 cannot be killed"
    world.launcher.faults[first["id"]] = "the server's worker process (pid 4711) died"
    await world.reach(first, "FAILED")
    await world.until(lambda: any(e.kind == "unhealthy" and "4711" in e.detail for e in world.store.events(first["id"])))
    assert (await world.service.job("admin", second["id"]))["state"] == "QUEUED"
    world.launcher.unkillable = ""
    await world.reach(second, "RUNNING")


async def test_cancel_works_while_queued_starting_and_running(world: Any) -> None:
    world.launcher.may_start.clear()
    starting = await world.reach(await world.interactive(), "STARTING")
    assert starting["waiting_for"] == "its server starts"
    queued = await world.interactive()
    assert (await world.service.cancel("admin", queued["id"]))["state"] == "CANCELLED"
    assert (await world.service.cancel("admin", starting["id"]))["state"] == "CANCELLED"
    assert await world.free_slots() == 1
    assert world.launcher.calls == ["kill server"]
    world.launcher.may_start.set()
    running = await world.reach(await world.rl(), "RUNNING")
    await world.until(lambda: running["id"] in world.launcher.drivers)
    cancelled = await world.service.cancel("admin", running["id"])
    assert (cancelled["state"], cancelled["cause"]) == ("CANCELLED", "cancelled by its owner")
    assert world.launcher.calls[1:] == ["stop driver", "stop server"]
    assert await world.free_slots() == 1
    assert (await world.service.cancel("admin", running["id"])) == cancelled


async def test_a_lease_lives_by_heartbeats_and_expires_without(world: Any) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")
    for _ in range(3):
        world.clock.now += 29.0
        await asyncio.sleep(0.03)
        assert (await world.service.heartbeat("admin", job["id"]))["state"] == "RUNNING"
    world.clock.now += 1000.0  # a stall of the machine lengthens leases by itself
    job = await world.reach(job, "CANCELLED")
    assert job["cause"] == "lease expired: no heartbeat for 30 s"
    await world.until_free(1)
    assert (await world.service.heartbeat("admin", job["id"]))["state"] == "CANCELLED"


async def test_a_lease_runs_while_the_job_is_queued_too(world: Any) -> None:
    await world.reach(await world.rl(), "RUNNING")
    queued = await world.interactive()
    world.clock.now += 1000.0
    await world.reach(queued, "CANCELLED")


async def test_a_submitted_job_needs_no_heartbeat_and_ends_with_its_driver(world: Any) -> None:
    job = await world.reach(await world.rl(), "RUNNING")
    world.clock.now += 1e6
    await world.until(lambda: job["id"] in world.launcher.ends)
    with pytest.raises(ConflictError):
        await world.service.heartbeat("admin", job["id"])
    with pytest.raises(ConflictError):
        await world.service.complete("admin", job["id"])
    spec = world.launcher.drivers[job["id"]]
    assert (spec.kind, spec.endpoint, spec.code_dir) == ("rl", job["server"]["endpoint"], None)
    world.launcher.ends[job["id"]].set_result(DriverOutcome())
    await world.reach(job, "COMPLETED")
    await world.until_free(1)


async def test_a_driver_that_lost_its_server_blames_the_server(world: Any) -> None:
    job = await world.reach(await world.rl(), "RUNNING")
    await world.until(lambda: job["id"] in world.launcher.ends)
    world.launcher.faults[job["id"]] = "the server's worker process (pid 7) died"
    world.launcher.ends[job["id"]].set_result(DriverOutcome("connection refused", "unavailable"))
    assert (await world.reach(job, "FAILED"))["cause"] == "the server's worker process (pid 7) died"


async def test_a_server_that_does_not_start_fails_its_job_with_the_cause(world: Any) -> None:
    job = await world.reach(await world.interactive("broken"), "FAILED")
    assert job["cause"] == "the model does not fit"
    await world.until_free(1)


async def test_the_same_key_gives_the_same_job(world: Any) -> None:
    jobs = await asyncio.gather(*(world.interactive(idempotency_key="k") for _ in range(5)))
    assert len({job["id"] for job in jobs}) == 1
    assert (await world.interactive())["id"] != jobs[0]["id"]
    with pytest.raises(ConflictError, match="idempotency key"):
        await world.interactive("another-model", idempotency_key="k")


async def test_bad_submissions_are_refused_and_leave_nothing(world: Any) -> None:
    with pytest.raises(UnknownModelError):
        await world.interactive("unheard-of")
    with pytest.raises(ConfigError, match="unknown key 'base_modell'") as caught:
        await world.service.submit("admin", {"kind": "interactive", "base_modell": "x"})
    assert "base_model" in caught.value.hint
    with pytest.raises(ConfigError, match="'reinforce' is not a kind of job"):
        await world.service.submit("admin", {"kind": "reinforce"})
    with pytest.raises(ConfigError, match="largest node of this cluster has 0 GPUs"):
        await world.service.submit("admin", {"kind": "interactive", "base_model": "m", "resources": {"gpus": 2}})
    with pytest.raises(InvalidRequestError, match="damaged"):
        await world.interactive(code={"zip": "AAAA", "sha256": "0" * 64})
    with pytest.raises(InvalidRequestError, match="cannot be unpacked"):
        await world.interactive(code=_code(_with_a_damaged_second_file()))
    assert (await world.service.jobs("admin"))["jobs"] == []
    assert list(world.settings.runs_dir.glob("*/*")) == []


def _code(content: bytes) -> dict[str, str]:
    return {"zip": base64.b64encode(content).decode(), "sha256": hashlib.sha256(content).hexdigest()}


def _with_a_damaged_second_file() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("fine.py", "x = 1\n")
        start = buffer.tell() + 30 + len("pkg/damaged.py")
        archive.writestr("pkg/damaged.py", "x = 1\n" * 200)
    content = bytearray(buffer.getvalue())
    content[start : start + 4] = b"\xff\xff\xff\xff"
    return bytes(content)


async def test_another_owners_job_does_not_exist(world: Any) -> None:
    job = await world.interactive()
    for call in ("job", "events", "heartbeat", "complete", "cancel", "logs", "metrics"):
        with pytest.raises(NotFoundError) as theirs:
            await getattr(world.service, call)("bob", job["id"])
        with pytest.raises(NotFoundError) as nobodys:
            await getattr(world.service, call)("bob", "job-0000")
        assert str(theirs.value).replace(job["id"], "") == str(nobodys.value).replace("job-0000", "")
    assert (await world.service.jobs("bob"))["jobs"] == []


async def test_after_a_crash_everything_goes_on(world: Any) -> None:
    world.launcher.cluster = [Node("n1", "here", gpus=0, cpu_slots=3)]
    driven = await world.reach(await world.rl(), "RUNNING")
    leased = await world.reach(await world.interactive(), "RUNNING")
    world.launcher.may_start.clear()
    starting = await world.reach(await world.interactive(), "STARTING")
    queued = await world.interactive()
    await world.crash()
    world.clock.now += 1000.0  # the time of the outage does not count against the leases
    world.boot()
    assert (await world.service.heartbeat("admin", leased["id"]))["state"] == "RUNNING"
    world.launcher.may_start.set()
    await world.reach(starting, "RUNNING")
    await world.until(lambda: driven["id"] in world.launcher.ends)
    world.launcher.ends[driven["id"]].set_result(DriverOutcome())
    await world.reach(driven, "COMPLETED")
    await world.reach(queued, "RUNNING")
    assert (await world.service.job("admin", leased["id"]))["server"] == leased["server"]
    assert world.launcher.calls == ["stop driver", "stop server"]
    kinds = [event["kind"] for event in await world.service.events("admin", leased["id"])]
    assert kinds == ["submitted", "starting", "running", "scheduler_restarted"]


async def test_a_server_that_died_while_the_scheduler_was_down_fails_its_job(world: Any) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")
    await world.crash()
    world.launcher.servers.clear()
    world.boot()
    assert (await world.reach(job, "FAILED"))["cause"] == "its server is gone"
    await world.until_free(1)


async def test_a_fault_of_the_cluster_does_not_end_the_loop(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost() -> list[Node]:
        raise ConnectionError("the cluster does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.launcher, "nodes", lost)
        await asyncio.sleep(0.05)
    await world.reach(await world.interactive(), "RUNNING")


async def test_one_jobs_odd_text_or_config_does_not_hold_up_the_others(world: Any) -> None:
    world.launcher.cluster = [Node("n1", "here", gpus=0, cpu_slots=3)]
    odd = await world.reach(await world.rl(), "RUNNING")
    await world.until(lambda: odd["id"] in world.launcher.ends)
    world.launcher.ends[odd["id"]].set_result(DriverOutcome("bad file \udcff\0" + "x" * 10_000))
    odd = await world.reach(odd, "FAILED")
    assert odd["cause"].startswith("bad file ??xxx")
    assert len(odd["cause"]) <= 2000
    await world.crash()
    store = SqlStore.open(sqlite_url(world.database))
    old = Job("job-old", "admin", "old", "rl", JobState.QUEUED, {"kind": "rl", "gone": 1}, "", 0, 1, created_at=0.0)
    store.save(old, Event("job-old", 0.0, "submitted"))
    store.close()
    world.boot()
    await world.reach(await world.interactive(), "RUNNING")
    old_now = world.store.job("job-old")
    assert (old_now.state, "gone" in old_now.cause) == (JobState.FAILED, True)


async def test_an_outage_of_the_scheduler_itself_costs_nobody_the_lease(world: Any) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")
    clocks = world.service._reconciler.clocks
    before = clocks._leases[job["id"]]
    clocks._looked_at -= 100.0
    await world.until(lambda: clocks._leases[job["id"]] > before + 90.0)


async def test_shutdown_ends_every_job_and_refuses_new_ones(world: Any) -> None:
    jobs = [await world.reach(await world.interactive(), "RUNNING"), await world.interactive()]
    assert await world.service.shutdown()
    for job in jobs:
        ended = await world.service.job("admin", job["id"])
        assert (ended["state"], ended["cause"]) == ("CANCELLED", "the cluster was stopped")
    assert world.launcher.servers == {}
    with pytest.raises(ConflictError):
        await world.interactive()


async def test_logs_are_the_drivers_or_where_none_runs_the_servers(world: Any) -> None:
    async def read(job: dict[str, Any], source: Any = None) -> str:
        text: str = (await world.service.logs("admin", job["id"], 0, source))["text"]
        return text

    def write(job: dict[str, Any], source: str) -> None:
        Path(job["run_dir"], f"{source}.log").write_text(f"the {source} of {job['id']}\n")

    driven = await world.reach(await world.rl(), "RUNNING")
    write(driven, "server")
    assert (await read(driven), await read(driven, "server")) == ("", f"the server of {driven['id']}\n")
    write(driven, "driver")
    assert await read(driven) == await read(driven, "driver") == f"the driver of {driven['id']}\n"
    await world.service.cancel("admin", driven["id"])
    assert await read(driven) == f"the driver of {driven['id']}\n"

    interactive = await world.reach(await world.interactive(), "RUNNING")
    write(interactive, "server")
    assert await read(interactive) == await read(interactive, "server") == f"the server of {interactive['id']}\n"
    assert await read(interactive, "driver") == ""
    await world.service.cancel("admin", interactive["id"])

    world.launcher.may_start.clear()
    failed = await world.reach(await world.rl(), "STARTING")
    await world.until(lambda: len(world.launcher.servers) == 1)
    (spec,) = world.launcher.servers.values()
    assert spec.log_path == str(Path(failed["run_dir"], "server.log"))
    write(failed, "server")
    assert await read(failed) == ""
    await world.service.cancel("admin", failed["id"])
    assert await read(failed) == f"the server of {failed['id']}\n"


async def test_the_events_tell_a_jobs_story(world: Any) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")
    await world.service.complete("admin", job["id"])
    kinds = [event["kind"] for event in await world.service.events("admin", job["id"])]
    assert kinds == ["submitted", "starting", "running", "completed", "released"]


async def test_no_key_and_no_token_is_on_disk(world: Any) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")
    key = (world.settings.state_dir / "api_key").read_bytes()
    for path in world.settings.state_dir.glob("scheduler.db*"):
        content = path.read_bytes()
        assert key not in content
        assert job["server"]["token"].encode() not in content
    assert (world.settings.state_dir / "api_key").stat().st_mode & 0o777 == 0o600
    assert (await world.service.authenticate(key.decode())).name == "admin"


async def test_a_job_that_reached_its_time_limit_fails_and_its_slot_comes_back(world: Any) -> None:
    job = await world.interactive(scheduling={"time_limit_s": 20.0})
    job = await world.reach(job, "RUNNING")
    world.clock.now += 17.0
    await asyncio.sleep(0.03)
    assert (await world.service.heartbeat("admin", job["id"]))["state"] == "RUNNING"
    world.clock.now += 1.0  # the last tenth is for the checkpoint
    job = await world.reach(job, "FAILED")
    assert job["cause"] == "reached its time limit of 20 s; its weights are in checkpoint 'stopped'"
    assert world.launcher.saved == [f"{job['id']}/stopped"]
    await world.until_free(1)


async def test_a_time_limit_goes_on_while_the_scheduler_is_down(world: Any) -> None:
    job = await world.reach(await world.interactive(scheduling={"time_limit_s": 20.0}), "RUNNING")
    await world.crash()
    world.clock.now += 20.0
    world.boot()
    assert (await world.reach(job, "FAILED"))["cause"].startswith("reached its time limit of 20 s")


async def test_a_short_job_fills_the_gap_before_a_large_one_and_all_are_told_when(world: Any) -> None:
    world.launcher.cluster = [Node("n1", "here", gpus=4, cpu_slots=0)]
    first = await world.interactive(resources={"gpus": 2}, scheduling={"time_limit_s": 720.0})
    await world.reach(first, "RUNNING")
    large = await world.interactive(resources={"gpus": 4})
    endless = await world.interactive(resources={"gpus": 1})
    short = await world.interactive(resources={"gpus": 0.5}, scheduling={"time_limit_s": 600.0})
    await world.reach(short, "RUNNING")
    large, endless = [await world.service.job("admin", job["id"]) for job in (large, endless)]
    assert (
        large["waiting_for"] == f"needs 4 GPUs on one node; largest free block is 1; estimated after {first['id']} (in 12 min)"
    )
    assert endless["waiting_for"].startswith(f"its turn: 1 job ahead in the queue (next: {large['id']})")
    (node,) = (await world.service.cluster("admin"))["nodes"]
    assert (node["gpus"], node["free_gpus"]) == (4, 1.5)


async def test_a_quota_refuses_what_can_never_run_and_lets_the_rest_wait(world: Any) -> None:
    world.settings = world.settings.model_copy(update={"quotas": {"bob": Quota(gpus=2, max_priority=0)}})
    await world.crash()
    world.boot()
    world.launcher.cluster = [Node("n1", "here", gpus=8, cpu_slots=0)]
    with pytest.raises(ConfigError, match="asks for 4 GPUs; your quota is 2 GPUs"):
        await world.interactive(owner="bob", resources={"gpus": 4})
    with pytest.raises(ConfigError, match="priority: 5 is above your highest, 0"):
        await world.interactive(owner="bob", scheduling={"priority": 5})
    bobs = [await world.interactive(owner="bob", resources={"gpus": 2}) for _ in range(2)]
    admins = await world.interactive(resources={"gpus": 4})
    await world.reach(admins, "RUNNING")
    waiting = await world.service.job("bob", bobs[1]["id"])
    assert waiting["waiting_for"] == "its owner's quota: needs 2 GPUs, and 2 of 2 GPUs are in use"


async def test_a_split_job_holds_both_of_its_bundles_wherever_they_are_and_starts_with_both_or_not_at_all(world: Any) -> None:
    split = {"layout": "split"}
    with pytest.raises(
        ConfigError, match="asks for 1 CPU slot for the trainer and 1 CPU slot for the rollout, each on one node"
    ):
        await world.interactive(resources=split)
    world.launcher.cluster = [Node("n1", "here", gpus=0, cpu_slots=1), Node("n2", "there", gpus=0, cpu_slots=1)]
    with pytest.raises(ConfigError, match=r"resources\.rollout\.replicas: 2 replicas are not served yet"):
        await world.interactive(resources={**split, "rollout": {"replicas": 2}})
    blocker = await world.reach(await world.interactive(), "RUNNING")
    job = await world.interactive(resources=split)
    await world.settle()
    assert (await world.service.job("admin", job["id"]))["waiting_for"].startswith("needs 2 x 1 CPU slot, each on one node")
    await world.service.cancel("admin", blocker["id"])
    job = await world.reach(job, "RUNNING")
    assert job["server"]["cpu_slots"] == 2
    (spec,) = world.launcher.servers.values()
    assert {spec.node_id, spec.rollout.node_id} == {"n1", "n2"}
    assert spec.demand == spec.rollout.demand == Demand(cpu_slots=1)
    assert [[held["cpu_slots"] for held in node["held"]] for node in (await world.service.cluster("admin"))["nodes"]] == [
        [1],
        [1],
    ]
    await world.crash()
    world.boot()
    assert await world.free_slots() == 0
    await world.service.cancel("admin", job["id"])
    await world.until_free(2)


async def test_who_used_less_goes_first_also_after_a_restart(world: Any) -> None:
    heavy = await world.reach(await world.interactive(owner="heavy"), "RUNNING", owner="heavy")
    world.clock.now += 20.0
    await world.service.cancel("heavy", heavy["id"])
    blocker = await world.reach(await world.rl(), "RUNNING")
    again, light = [await world.interactive(owner=owner) for owner in ("heavy", "light")]
    await world.crash()
    world.boot()
    await world.service.cancel("admin", blocker["id"])
    await world.reach(light, "RUNNING", owner="light")
    assert (await world.service.job("heavy", again["id"]))["state"] == "QUEUED"
