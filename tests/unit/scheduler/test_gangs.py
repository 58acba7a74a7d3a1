"""Jobs with several servers: all of them are placed, started, watched, saved and stopped as one."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.config.job import parse_job
from opentinker.errors import AgentStuckError, ConfigError, InvalidRequestError, NotFoundError, TrainerError
from opentinker.scheduler.layouts import further_amounts, gang, requests_of, total, whole
from opentinker.scheduler.placement import Allocation, Demand, Node
from opentinker.scheduler.plan import (
    DriverOutcome,
    End,
    FaultKind,
    JobView,
    Restart,
    Run,
    ServerView,
    Snapshot,
    Start,
    Stop,
    Wait,
    plan,
)
from opentinker.scheduler.records import Job
from opentinker.scheduler.states import JobState, ServerState

SLOT = Demand(cpu_slots=1)
NODES = [Node("n", "n", 0, 2)]
PAIR = [
    ServerView("s", ServerState.READY, (Allocation("n", SLOT),), ("j",)),
    ServerView("s-second", ServerState.READY, (Allocation("n", SLOT),), ("j",)),
]


def view(state: JobState, **changes: Any) -> JobView:
    return replace(JobView("j", state, (SLOT, SLOT)), **changes)


def config(second: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "rl",
        "name": "duel",
        "base_model": "some-model",
        "lora": {"rank": 4},
        "environment": {"name": "gomoku_duel"},
        "servers": {"second": second or {}},
        "agents": {"black": {}, "white": {"server": "second"}},
        **changes,
    }


demands = st.one_of(
    st.builds(Demand, gpus=st.integers(1, 8)), st.builds(Demand, gpus=st.sampled_from([0.25, 0.5])), st.just(SLOT)
)
requests = st.lists(demands, min_size=1, max_size=2).map(tuple)


@given(st.lists(requests, min_size=1, max_size=4))
def test_a_record_stands_for_the_bundles_of_each_server(parts: list[tuple[Demand, ...]]) -> None:
    given_ = {f"s{i}" if i else "": part for i, part in enumerate(parts)}
    together = total([demand for part in parts for demand in part])
    split = total(parts[0][1:])
    fields: dict[str, Any] = {"config": {}, "run_dir": "", "created_at": 0.0, "kind": "rl", "name": "", "owner": "ann"}
    job = Job("j", state=JobState.QUEUED, gpus=together.gpus, cpu_slots=together.cpu_slots, **fields)
    job = replace(job, rollout_gpus=split.gpus, rollout_cpu_slots=split.cpu_slots, further=further_amounts(given_))
    assert gang(job) == given_
    assert total(whole(job)) == together


def test_all_servers_start_in_one_decision_or_none_does() -> None:
    start = Start("j", (Allocation("n", SLOT), Allocation("n", SLOT)))
    assert plan(Snapshot(0.0, NODES, [view(JobState.QUEUED)])) == [start]
    other = ServerView("o", ServerState.READY, (Allocation("n", SLOT),), ("k",))
    (wait,) = plan(Snapshot(0.0, NODES, [JobView("k", JobState.RUNNING, (SLOT,)), view(JobState.QUEUED)], [other]))
    assert isinstance(wait, Wait)
    assert wait.waiting_for.startswith("needs 2 x 1 CPU slot, each on one node; 1 block of 1 CPU slot free")


def test_a_job_runs_when_the_last_of_its_servers_is_ready() -> None:
    starting = [PAIR[0], replace(PAIR[1], state=ServerState.STARTING)]
    for servers in (starting, starting[::-1]):
        assert plan(Snapshot(0.0, NODES, [view(JobState.STARTING)], servers)) == []
    assert plan(Snapshot(0.0, NODES, [view(JobState.STARTING)], PAIR)) == [Run("j")]


def test_the_death_of_any_server_ends_or_restarts_the_whole_job() -> None:
    for dead in (0, 1):
        servers = [replace(server, fault="it died") if place == dead else server for place, server in enumerate(PAIR)]
        assert plan(Snapshot(0.0, NODES, [view(JobState.RUNNING)], servers)) == [End("j", JobState.FAILED, "it died")]
        again = view(JobState.RUNNING, restarts_left=1)
        assert plan(Snapshot(0.0, NODES, [again], servers)) == [Restart("j", "it died")]
        assert plan(Snapshot(0.0, NODES, [], servers)) == [Stop("s"), Stop("s-second")]


def test_of_several_faults_the_one_that_no_restart_mends_decides() -> None:
    lost, refused = replace(PAIR[0], fault="it died"), replace(PAIR[1], fault="it does not fit", fault_kind=FaultKind.REFUSED)
    job = view(JobState.STARTING, restarts_left=1, returns_left=1)
    assert plan(Snapshot(0.0, NODES, [job], [lost, refused])) == [End("j", JobState.FAILED, "it does not fit")]
    unplaced = replace(PAIR[1], fault="no place", fault_kind=FaultKind.UNPLACED)
    assert plan(Snapshot(0.0, NODES, [job], [unplaced, lost])) == [Restart("j", "it died")]
    assert plan(Snapshot(0.0, NODES, [job], [unplaced, PAIR[0]])) == [Restart("j", "no place", counted=False)]


def test_a_restart_waits_until_all_earlier_servers_are_gone() -> None:
    stopping = replace(PAIR[1], state=ServerState.STOPPING)
    decisions = plan(Snapshot(0.0, NODES, [view(JobState.QUEUED)], [stopping]))
    assert decisions == [Wait("j", "its earlier server to be gone"), Stop("s-second")]
    assert Wait("j", "its earlier servers to be gone") in plan(Snapshot(0.0, NODES, [view(JobState.QUEUED)], PAIR))


def test_a_job_is_idle_when_all_its_servers_are() -> None:
    job = view(JobState.RUNNING, idle_limit_s=10.0)
    one, both = ([replace(PAIR[0], idle_s=20.0), replace(PAIR[1], idle_s=idle_s)] for idle_s in (1.0, 15.0))
    assert plan(Snapshot(0.0, NODES, [job], one)) == []
    assert plan(Snapshot(0.0, NODES, [job], both)) == [
        End("j", JobState.FAILED, "its server was idle for 10 s, its limit", save=True)
    ]


def test_what_could_never_start_together_is_refused_with_the_arithmetic() -> None:
    job = parse_job(config())
    assert requests_of(job, NODES) == {"": (SLOT,), "second": (SLOT,)}
    with pytest.raises(ConfigError, match="2 servers start together and ask for 2 CPU slots: 1 CPU slot for its own"):
        requests_of(job, [Node("n", "n", 0, 1)])
    gpus = parse_job(config({"resources": {"gpus": 3}}, resources={"gpus": 2}))
    nodes = [Node("a", "a", 4, 0)]
    with pytest.raises(ConfigError, match=r"ask for 5 GPUs: 2 GPUs for its own .*, 3 GPUs for server 'second'.* has 4"):
        requests_of(gpus, nodes)
    assert total(whole_of(requests_of(gpus, [*nodes, Node("b", "b", 2, 0)]))) == Demand(5)
    large = parse_job(config({"resources": {"gpus": 8}}))
    with pytest.raises(ConfigError, match=r"servers.second: the job asks for 8 GPUs on one node") as refused:
        requests_of(large, nodes)
    assert refused.value.hint.startswith("lower servers.second.resources.gpus")


def whole_of(parts: dict[str, tuple[Demand, ...]]) -> list[Demand]:
    return [demand for part in parts.values() for demand in part]


def slots(world: Any, count: int) -> None:
    world.launcher.cluster = [Node("n1", "here", gpus=0, cpu_slots=count)]


async def test_a_job_with_two_servers_is_one_job_from_its_start_to_its_end(world: Any) -> None:
    slots(world, 2)
    with pytest.raises(ConfigError, match="3 servers start together and ask for 3 CPU slots"):
        await world.service.submit("ann", config() | {"servers": {"second": {}, "third": {}}} | THREE)
    holder = await world.reach(await world.interactive(), "RUNNING")
    job = await world.service.submit("ann", config())
    await world.settle()
    job = await world.service.job("ann", job["id"])
    assert (job["state"], job["server"], job["servers"]) == ("QUEUED", None, {})
    assert job["waiting_for"].startswith("needs 2 x 1 CPU slot")
    assert await world.free_slots() == 1, "it takes no part of what it needs"
    await world.service.cancel("admin", holder["id"])
    job = await world.reach(job, "RUNNING", "ann")
    own, second = job["server"], job["servers"]["second"]
    assert second["id"] == f"{own['id']}-second"
    assert own["token"] != second["token"]
    assert await world.free_slots() == 0
    specs = {spec.server_id: spec for spec in world.launcher.servers.values()}
    assert specs[own["id"]].checkpoint_root == f"{job['run_dir']}/checkpoints"
    assert specs[second["id"]].checkpoint_root == f"{job['run_dir']}/checkpoints/policies/white"
    assert specs[second["id"]].log_path == f"{job['run_dir']}/servers/second/server.log"
    assert specs[second["id"]].seed == specs[own["id"]].seed + 1
    assert specs[own["id"]].taken == specs[second["id"]].taken == ("white",), "its folder is that of no other policy"
    await world.until(lambda: job["id"] in world.launcher.drivers)
    driver = world.launcher.drivers[job["id"]]
    assert driver.token == own["token"]
    assert driver.servers == {"second": {"endpoint": second["endpoint"], "token": second["token"], "policy": second["policy"]}}
    for server in (own, second):
        found = await world.service.server_of(job["id"], None, server["token"])
        assert found == {"endpoint": server["endpoint"], "token": server["token"], "owner": "ann"}
    await world.service.stop("ann", job["id"])
    job = await world.reach(job, "CANCELLED", "ann")
    assert world.launcher.saved == [f"{job['id']}/stopped"] * 2, "the weights of both servers"
    await world.until_free(2)
    assert world.launcher.servers == {}
    assert world.launcher.drivers == {}
    events = [event["kind"] for event in await world.service.events("ann", job["id"])]
    assert events.count("released") == 1
    marks = {own["id"]: [job["id"]], second["id"]: [f"{job['id']}-second"]}
    assert specs[second["id"]].mark == f"{job['id']}-second"
    assert {id_: world.launcher.stopped[id_] for id_ in marks} == marks, "neither ends the other's processes"


THREE = {"agents": {"black": {}, "white": {"server": "second"}, "red": {"server": "third"}}}


async def test_logs_of_further_servers_are_found_by_their_names(world: Any) -> None:
    slots(world, 2)
    job = await world.service.submit("ann", config())

    async def read(**asked: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await world.service.logs("ann", job["id"], **asked)
        return answer

    assert (await read(server="second"))["text"] == "", "it has not begun"

    def write(log: str, text: str) -> None:
        path = Path(job["run_dir"], log)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("servers/second/server.log", "the second\n")
    write("server.log", "its own\n")
    assert (await read(source="server"))["text"] == "its own\n"
    assert (await read(server="second"))["text"] == (await read(source="server", server="second"))["text"] == "the second\n"
    assert (await read(server="second", offset=11))["text"] == ""
    for odd in ("third", "..", "second/../second"):
        with pytest.raises(NotFoundError, match=f"job {job['id']} has no server '{odd}'") as caught:
            await read(server=odd)
        assert caught.value.hint == "beside its own it has second"
    with pytest.raises(InvalidRequestError, match="no server's"):
        await read(source="driver", server="second")
    alone = await world.service.submit("ann", {"kind": "interactive", "base_model": "some-model"})
    with pytest.raises(NotFoundError, match="has no server 'second'") as caught:
        await world.service.logs("ann", alone["id"], server="second")
    assert caught.value.hint == "it has none beside its own"


async def test_the_checkpoints_of_all_servers_are_listed_and_each_can_be_started_from(world: Any) -> None:
    slots(world, 2)
    job = await world.service.submit("ann", config({"base_model": "other-model", "lora": None}))
    root = Path(job["run_dir"]) / "checkpoints"
    for folder, kind in ((root / "final@3", "lora"), (root / "policies" / "white" / "final@3", "full")):
        folder.mkdir(parents=True)
        state = {"kind": kind, "model_type": "llama", "step": 3, "created_at": 1.0, "version": 3}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        (folder / "manifest.json").write_text(json.dumps({"files": {"w": {"bytes": 7}}}))
    found = {view["policy"]: view for view in await world.service.checkpoints("ann", job["id"])}
    assert {policy: view["base_model"] for policy, view in found.items()} == {None: "some-model", "white": "other-model"}
    of_white = found["white"]["ref"]
    with pytest.raises(ConfigError, match="was trained on the base model 'other-model', this job has 'some-model'"):
        await world.interactive(owner="ann", start_from=of_white)
    started = await world.interactive("other-model", owner="ann", start_from=of_white)
    assert started["config"]["start_from"] == of_white


async def test_a_lost_server_is_named_with_its_agent_and_restarts_both(world: Any) -> None:
    slots(world, 2)
    job = await world.service.submit("ann", config(scheduling={"max_restarts": 1}))
    job = await world.reach(job, "RUNNING", "ann")
    first = job["server"]["id"]
    world.launcher.faults[f"{first}-second"] = "the server's worker process (pid 7) died"

    job = await world.reach(job, "QUEUED", "ann")
    job = await world.reach(job, "RUNNING", "ann")
    assert job["server"]["id"] != first
    assert set(world.launcher.servers) == {job["server"]["id"], f"{job['server']['id']}-second"}
    await world.until(lambda: job["id"] in world.launcher.drivers)
    assert world.launcher.drivers[job["id"]].resume
    events = await world.service.events("ann", job["id"])
    (restart,) = [event["detail"] for event in events if event["kind"] == "restarting"]
    assert restart == "server 'second' (white): the server's worker process (pid 7) died"
    world.launcher.faults[job["server"]["id"]] = "the server's front process died"
    job = await world.reach(job, "FAILED", "ann")
    assert job["cause"] == "the job's own server (black): the server's front process died"
    await world.until_free(2)
    assert world.launcher.servers == {}


async def test_a_server_that_hangs_restarts_both_and_is_not_waited_for(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slots(world, 2)
    job = await world.service.submit("ann", config(scheduling={"max_restarts": 1}))
    job = await world.reach(job, "RUNNING", "ann")
    first, probe = job["server"]["id"], world.launcher.probe

    async def silent(server_id: str) -> Any:
        return await (asyncio.Event().wait() if server_id == f"{first}-second" else probe(server_id))

    monkeypatch.setattr(world.launcher, "probe", silent)
    await world.until(lambda: job["id"] in world.launcher.ends)
    cause = "'white' on server 'second' held up the others in update 3 for 30 s"
    world.launcher.ends[job["id"]].set_result(DriverOutcome(cause, AgentStuckError.code))
    job = await world.reach(job, "QUEUED", "ann")
    job = await world.reach(job, "RUNNING", "ann")
    assert set(world.launcher.servers) == {job["server"]["id"], f"{job['server']['id']}-second"} != {first, f"{first}-second"}
    events = await world.service.events("ann", job["id"])
    assert [event["detail"] for event in events if event["kind"] == "restarting"] == [cause]
    await world.until(lambda: job["id"] in world.launcher.ends)
    assert world.launcher.drivers[job["id"]].resume
    world.launcher.ends[job["id"]].set_result(DriverOutcome(cause, AgentStuckError.code))
    job = await world.reach(job, "FAILED", "ann")
    assert job["cause"] == cause


async def test_one_server_that_refuses_to_start_fails_the_job_at_once(world: Any) -> None:
    slots(world, 2)
    job = await world.service.submit("ann", config({"base_model": "broken"}, scheduling={"max_restarts": 3}))
    job = await world.reach(job, "FAILED", "ann")
    assert job["cause"] == "server 'second' (white): the model does not fit"
    await world.until_free(2)


async def test_a_stop_says_when_the_weights_of_one_server_could_not_be_saved(world: Any) -> None:
    slots(world, 2)
    job = await world.reach(await world.service.submit("ann", config()), "RUNNING", "ann")
    world.launcher.save_error = TrainerError("the disk is full")
    await world.service.stop("ann", job["id"])
    job = await world.reach(job, "CANCELLED", "ann")
    assert job["cause"] == "stopped by its owner; no checkpoint could be written: the disk is full"
    await world.until_free(2)


async def test_a_scheduler_that_is_started_anew_goes_on_with_both_servers(world: Any) -> None:
    slots(world, 2)
    job = await world.reach(await world.service.submit("ann", config()), "RUNNING", "ann")
    await world.crash()
    world.boot()
    await world.settle()
    again = await world.service.job("ann", job["id"])
    assert (again["state"], again["server"]["id"], set(again["servers"])) == ("RUNNING", job["server"]["id"], {"second"})
    await world.service.cancel("ann", job["id"])
    await world.until_free(2)
