"""Jobs that start from another job's checkpoint: whose, which, and whether it fits. And the list of a job's checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from opentinker.errors import ConfigError, ConflictError, NotFoundError
from opentinker.scheduler.users import EVERYONE

LORA = {"rank": 4}


def save(job: dict[str, Any], name: str, version: int, *, at: float = 100.0, kind: str = "full") -> Path:
    """What the job's server would have written."""
    folder = Path(job["run_dir"]) / "checkpoints" / f"{name}@{version}"
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
