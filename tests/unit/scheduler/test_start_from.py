"""Jobs that start from another job's checkpoint: whose, which, and whether it fits. And the list of a job's checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from opentinker.errors import ConfigError, ConflictError, NotFoundError
from opentinker.scheduler.placement import Node
from opentinker.scheduler.records import Scope
from opentinker.scheduler.users import EVERYONE, Caller

ANN = Caller("ann", frozenset({Scope.SUBMIT}))
LORA = {"rank": 4}


def save(job: dict[str, Any], name: str, version: int, *, at: float = 100.0, kind: str = "full", policy: str = "") -> Path:
    """What the job's server would have written."""
    below = f"policies/{policy}" if policy else ""
    folder = Path(job["run_dir"]) / "checkpoints" / below / f"{name}@{version}"
    folder.mkdir(parents=True)
    state = {"kind": kind, "model_type": "llama", "step": 10 * version, "created_at": at, "version": version}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(json.dumps({"files": {"w": {"bytes": 7}}}))
    return folder


def starting(ref: str, **config: Any) -> dict[str, Any]:
    return {"kind": "interactive", "base_model": "some-model", "start_from": ref, **config}


async def ended(world: Any, owner: str = "ann", **config: Any) -> dict[str, Any]:
    job = await world.service.submit(owner, {"kind": "interactive", "base_model": "some-model", **config})
    await world.service.cancel(owner, job["id"])
    return job


async def test_a_server_starts_from_what_the_address_meant_at_submit(world: Any) -> None:
    source = await ended(world)
    save(source, "final", 1, at=50.0)
    newest = save(source, "final", 2)
    job = await world.service.submit("ann", starting(f"{source['id']}/final"))
    assert job["config"]["start_from"] == f"ann/{source['id']}/final@2"
    save(source, "final", 3, at=200.0)
    await world.reach(job, "RUNNING", owner="ann")
    assert [spec.start_from for spec in world.launcher.servers.values()] == [str(newest)]


async def test_a_named_version_is_taken(world: Any) -> None:
    source = await ended(world)
    older = save(source, "final", 1, at=50.0)
    save(source, "final", 2)
    job = await world.service.submit("ann", starting(f"ann/{source['id']}/final@1"))
    await world.reach(job, "RUNNING", owner="ann")
    assert [spec.start_from for spec in world.launcher.servers.values()] == [str(older)]


async def test_without_an_address_nothing_is_named(world: Any) -> None:
    await world.reach(await world.interactive(), "RUNNING")
    assert [spec.start_from for spec in world.launcher.servers.values()] == [""]


async def test_another_users_job_does_not_exist_but_for_administrators(world: Any) -> None:
    source = await ended(world)
    save(source, "final", 1)
    for ref in (f"{source['id']}/final", f"ann/{source['id']}/final", f"{source['id']}/absent"):
        with pytest.raises(NotFoundError, match="no job"):
            await world.service.submit("bob", starting(ref))
    with pytest.raises(NotFoundError, match="no job"):  # ann's own job under bob's name
        await world.service.submit("ann", starting(f"bob/{source['id']}/final"))
    with pytest.raises(NotFoundError, match="no job 'job-0'"):
        await world.service.submit("ann", starting("job-0/final"))
    job = await world.service.submit("root", starting(f"{source['id']}/final"), may_name=EVERYONE)
    assert job["config"]["start_from"] == f"ann/{source['id']}/final@1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_from": "{job}/best"}, r"no checkpoint 'best'.*it has final@1"),
        ({"start_from": "{job}/final@9"}, r"no checkpoint 'final@9'.*it has final@1"),
        ({"start_from": "final"}, "not a checkpoint's address"),
        ({"base_model": "other"}, "base model 'some-model', this job has 'other'"),
        ({"lora": None}, r"adapter of rank 4 with alpha 32 on all-linear, this job trains full parameters"),
        ({"lora": {"rank": 8}}, "rank 4 .* rank 8"),
    ],
)
async def test_what_does_not_fit_is_refused_at_submit(world: Any, change: dict[str, Any], message: str) -> None:
    source = await ended(world, lora=LORA)
    save(source, "final", 1, kind="lora")
    config = {**starting("{job}/final", lora=LORA), **change}
    config["start_from"] = config["start_from"].replace("{job}", source["id"])
    with pytest.raises(ConfigError, match="(?s)" + message) as error:
        await world.service.submit("ann", config)
    assert error.value.hint
    assert (await world.service.submit("ann", starting(f"{source['id']}/final", lora=LORA)))["state"] == "QUEUED"


async def test_half_a_checkpoint_is_none(world: Any) -> None:
    source = await ended(world)
    (save(source, "final", 1) / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="no checkpoint 'final'") as error:
        await world.service.submit("ann", starting(f"{source['id']}/final"))
    assert error.value.hint == "it has none"


async def test_the_base_model_is_not_told_where_it_is_not_known(world: Any) -> None:
    """`white` may be an agent on either server."""
    world.launcher.cluster = [Node("n1", "here", gpus=0, cpu_slots=2)]
    job = await ended(world, lora=LORA, servers={"second": {"base_model": "other-model"}})
    for policy in ("", "second", "white"):
        save(job, "final", 1, kind="lora", policy=policy)
    told = {row["policy"]: row["base_model"] for row in await world.service.checkpoints("ann", job["id"])}
    assert told == {None: "some-model", "second": "other-model", "white": None}


@pytest.mark.parametrize(
    ("kind", "second", "fits"),
    [
        ("full", {"lora": None}, True),
        ("lora", {"lora": None}, True),
        ("full", {}, False),
        ("full", {"base_model": "other-model", "lora": None}, False),
    ],
)
async def test_a_checkpoint_to_load_fits_any_server_of_an_interactive_job(
    world: Any, kind: str, second: dict[str, Any], fits: bool
) -> None:
    world.launcher.cluster = [Node("n1", "here", gpus=0, cpu_slots=2)]
    source = await ended(world, lora=LORA if kind == "lora" else None)
    save(source, "final", 2, kind=kind)
    config = {"kind": "interactive", "base_model": "some-model", "lora": LORA, "servers": {"second": second}}
    config["checkpoints"] = [f"{source['id']}/final"]
    if fits:
        job = await world.service.submit("ann", config)
        assert job["config"]["checkpoints"] == [f"ann/{source['id']}/final@2"]
        return
    with pytest.raises(ConfigError, match=r"checkpoints.0: .* kind 'full', and policies of its base model are 'lora' here"):
        await world.service.submit("ann", config)


async def test_a_repeated_submit_is_the_same_job_although_the_name_means_another_one_now(world: Any) -> None:
    source = await ended(world)
    save(source, "final", 1)
    first = await world.service.submit("ann", starting(f"{source['id']}/final"), "key")
    save(source, "final", 2, at=200.0)
    again = await world.service.submit("ann", starting(f"{source['id']}/final"), "key")
    assert again["id"] == first["id"]
    with pytest.raises(ConflictError):
        await world.service.submit("ann", starting(f"{source['id']}/final@2"), "key")


async def test_the_list_names_what_can_be_started_from_newest_first(world: Any) -> None:
    job = await ended(world)
    assert await world.service.checkpoints("ann", job["id"]) == []
    save(job, "final", 1, at=50.0)
    save(job, "best", 4, at=60.0)
    listed = await world.service.checkpoints("ann", job["id"])
    assert [row["ref"] for row in listed] == [f"ann/{job['id']}/best@4", f"ann/{job['id']}/final@1"]
    assert listed[0] == {
        "name": "best",
        "version": 4,
        "policy": None,
        "ref": f"ann/{job['id']}/best@4",
        "kind": "full",
        "base_model": "some-model",
        "step": 40,
        "created_at": 60.0,
        "bytes": 7,
        "tags": [],
    }
    with pytest.raises(NotFoundError):
        await world.service.checkpoints("bob", job["id"])


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
async def test_an_inference_job_samples_from_whatever_a_checkpoint_holds(world: Any, lora: dict[str, Any] | None) -> None:
    source = await ended(world, lora=lora)
    folder = save(source, "final", 1, kind="full" if lora is None else "lora")
    config = {"kind": "inference", "base_model": "some-model", "start_from": f"{source['id']}/final"}
    await world.reach(await world.service.submit("ann", config), "RUNNING", owner="ann")
    assert [spec.start_from for spec in world.launcher.servers.values()] == [str(folder)]


def playing(agents: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {
        "kind": "rl",
        "base_model": "some-model",
        "lora": LORA,
        "environment": {"name": "gomoku_duel"},
        "agents": agents,
        **config,
    }


async def test_what_agents_begin_with_is_pinned_held_and_told_to_the_server(world: Any) -> None:
    duel = await ended(world, lora=LORA)
    black, white = (save(duel, "final", 1, kind="lora", policy=policy) for policy in ("", "white"))
    agents = {"black": {"start_from": f"{duel['id']}/final"}, "white": {"checkpoint": f"{duel['id']}/white/final"}}
    job = await world.service.submit("ann", playing(agents), "key")
    own, further = f"ann/{duel['id']}/final@1", f"ann/{duel['id']}/white/final@1"
    assert job["config"]["agents"]["black"]["start_from"] == own
    assert job["config"]["agents"]["white"]["checkpoint"] == further
    save(duel, "final", 2, at=200.0, kind="lora", policy="white")
    assert (await world.service.submit("ann", playing(agents), "key"))["id"] == job["id"]
    assert [path.name for path in (black.parent / ".holds").iterdir()] == [job["id"]]
    assert [path.name for path in (white.parent / ".holds").iterdir()] == [f"{job['id']}~1"]
    with pytest.raises(ConflictError, match="is what job"):
        await world.service.delete_checkpoint("ann", duel["id"], "final@1", ANN)
    await world.reach(job, "RUNNING", owner="ann")
    (spec,) = world.launcher.servers.values()
    assert spec.start_from == ""
    assert spec.starts == {own: str(black), further: str(white)}


async def test_several_of_one_policy_are_all_held(world: Any) -> None:
    source = await ended(world, lora=LORA)
    folders = [save(source, "step", version, kind="lora") for version in (1, 2)]
    named = [f"{source['id']}/step@{version}" for version in (1, 2)]
    job = await world.service.submit(
        "ann", {"kind": "interactive", "base_model": "some-model", "lora": LORA, "checkpoints": named}
    )
    assert job["config"]["checkpoints"] == [f"ann/{ref}" for ref in named]
    holds = folders[0].parent / ".holds"
    assert {json.loads(path.read_text())["checkpoint"] for path in holds.iterdir()} == {"step@1", "step@2"}
    await world.service.cancel("ann", job["id"])


@pytest.mark.parametrize(
    ("agents", "change", "message"),
    [
        ({"white": {"checkpoint": "{job}/best"}}, {}, r"agents.white.checkpoint: job \S+ has no checkpoint 'best'"),
        ({"white": {"checkpoint": "{job}/red/final"}}, {}, r"agents.white.checkpoint: 'red' of job \S+ has no checkpoint"),
        ({"white": {"checkpoint": "{job}/final"}}, {"base_model": "other"}, "agents.white.checkpoint: .* on the base model"),
        (
            {"white": {"checkpoint": "{job}/final", "lora": {"rank": 2}}},
            {},
            "agents.white.checkpoint: .* holds an adapter of rank 4 .*, agents.white has an adapter of rank 2",
        ),
        ({"white": {"checkpoint": "{full}/final"}}, {}, "agents.white.checkpoint: .* holds full parameters, agents.white has"),
        ({"white": {"start_from": "{full}/final"}}, {}, "agents.white.start_from: .* holds full parameters"),
    ],
)
async def test_an_agents_checkpoint_that_does_not_fit_is_refused_with_its_name(
    world: Any, agents: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    source, full = await ended(world, lora=LORA), await ended(world)
    root = save(source, "final", 1, kind="lora").parent
    save(full, "final", 1)
    named = json.loads(json.dumps(agents).replace("{job}", source["id"]).replace("{full}", full["id"]))
    with pytest.raises(ConfigError, match="(?s)" + message) as error:
        await world.service.submit("ann", playing({"black": {}, **named}, **change))
    assert error.value.hint
    assert not [path for path in root.rglob("*") if path.parent.name == ".holds"], "nothing is left of it"


async def test_the_agent_with_a_jobs_own_policy_is_said_to_be_that(world: Any) -> None:
    duel = await world.service.submit("ann", playing({"black": {}, "white": {}}))
    await world.service.cancel("ann", duel["id"])
    save(duel, "final", 1, kind="lora")
    agents = {"black": {}, "white": {"checkpoint": f"{duel['id']}/black/final"}}
    with pytest.raises(ConfigError, match="'black' of job") as error:
        await world.service.submit("ann", playing(agents))
    assert error.value.hint == f"'black' has that job's own policy, whose checkpoints are {duel['id']}/final"


async def test_another_users_checkpoint_does_not_exist_for_an_agent_either(world: Any) -> None:
    source = await ended(world, lora=LORA)
    save(source, "final", 1, kind="lora")
    with pytest.raises(NotFoundError, match="no job"):
        await world.service.submit("bob", playing({"black": {}, "white": {"checkpoint": f"{source['id']}/final"}}))
