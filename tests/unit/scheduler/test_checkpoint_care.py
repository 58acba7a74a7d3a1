"""Tags, deletion and holds of checkpoints, as users ask for them: whose, which, and what protects one."""

import json
from pathlib import Path
from typing import Any

import pytest

from opentinker.checkpoint_marks import Marks
from opentinker.checkpoints import policy_root
from opentinker.errors import ConfigError, ConflictError, InvalidRequestError, NotFoundError
from opentinker.scheduler.placement import Node
from opentinker.scheduler.records import Scope
from opentinker.scheduler.users import Caller

ANN = Caller("ann", frozenset({Scope.SUBMIT}))


def save(job: dict[str, Any], name: str, version: int, policy: str | None = None) -> Path:
    """What the job's server would have written."""
    folder = policy_root(Path(job["run_dir"]) / "checkpoints", policy) / f"{name}@{version}"
    folder.mkdir(parents=True)
    state = {"kind": "full", "model_type": "llama", "step": version, "created_at": 100.0 + version, "version": version}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(json.dumps({"files": {"w": {"bytes": 7}}}))
    return folder


async def submit(world: Any, **config: Any) -> dict[str, Any]:
    job: dict[str, Any] = await world.service.submit("ann", {"kind": "interactive", "base_model": "some-model", **config})
    return job


async def ended(world: Any) -> dict[str, Any]:
    job = await submit(world)
    await world.service.cancel("ann", job["id"])
    return job


async def refs(world: Any, job: dict[str, Any]) -> list[str]:
    return [row["ref"].rpartition("/")[2] for row in await world.service.checkpoints("ann", job["id"])]


async def test_a_tag_is_shown_moves_and_is_taken_away(world: Any) -> None:
    job = await ended(world)
    save(job, "final", 1)
    save(job, "final", 2)
    view = await world.service.tag_checkpoint("ann", job["id"], "final@1", "good", ANN)
    assert (view["ref"], view["tags"]) == (f"ann/{job['id']}/final@1", ["good"])
    await world.service.tag_checkpoint("ann", job["id"], "final", "good", ANN)
    assert [row["tags"] for row in await world.service.checkpoints("ann", job["id"])] == [["good"], []]
    with pytest.raises(NotFoundError, match="no tag 'bad'") as error:
        await world.service.untag_checkpoint("ann", job["id"], "bad", ANN)
    assert error.value.hint == "it has good"
    await world.service.untag_checkpoint("ann", job["id"], "good", ANN)
    assert [row["tags"] for row in await world.service.checkpoints("ann", job["id"])] == [[], []]
    for tag in ("final", "step-000001", "a/b"):
        with pytest.raises(InvalidRequestError):
            await world.service.tag_checkpoint("ann", job["id"], "final", tag, ANN)
    with pytest.raises(NotFoundError, match="no checkpoint 'best'"):
        await world.service.tag_checkpoint("ann", job["id"], "best", "good", ANN)
    noted = [(e["actor"], e["action"]) for e in await world.service.users.audit(10) if e["action"].startswith("checkpoint")]
    assert noted == [("ann", "checkpoint.untag"), ("ann", "checkpoint.tag"), ("ann", "checkpoint.tag")]


async def test_a_job_starts_from_a_tag_and_means_what_had_it_at_submit(world: Any) -> None:
    source = await ended(world)
    save(source, "final", 1)
    save(source, "final", 2)
    await world.service.tag_checkpoint("ann", source["id"], "final@1", "good", ANN)
    job = await submit(world, start_from=f"{source['id']}/good")
    assert job["config"]["start_from"] == f"ann/{source['id']}/final@1"


async def test_what_an_open_job_starts_from_is_not_deleted_until_that_job_has_ended(world: Any) -> None:
    source = await ended(world)
    folder = save(source, "final", 1)
    job = await submit(world, start_from=f"{source['id']}/final")
    assert Marks(folder.parent, None).holds() == {job["id"]: "final@1"}
    with pytest.raises(ConflictError, match=f"final@1 is what job {job['id']} starts from"):
        await world.service.delete_checkpoint("ann", source["id"], "final@1", ANN)
    await world.service.cancel("ann", job["id"])
    await world.service.delete_checkpoint("ann", source["id"], "final@1", ANN)
    assert not folder.exists()
    assert await refs(world, source) == []
    assert "checkpoint.delete" in [event["action"] for event in await world.service.users.audit(10)]


async def test_a_job_that_runs_comes_to_name_another_ones_checkpoint(world: Any) -> None:
    source = await ended(world)
    folder, later = save(source, "step-000002", 2), save(source, "step-000004", 4)
    job = await world.reach(await submit(world), "RUNNING", "ann")
    exact = [f"ann/{source['id']}/step-000002@2", f"ann/{source['id']}/step-000004@4"]
    named = [f"{source['id']}/step-000002", exact[1]]
    for _ in range(2):  # a retry finds what was done
        assert await world.service.name_checkpoints("ann", job["id"], named) == exact
    [told] = world.launcher.named.values()
    assert told == dict(zip(exact, [str(folder), str(later)], strict=True))
    assert (await world.service.job("ann", job["id"]))["config"]["checkpoints"] == exact
    assert Marks(folder.parent, None).holds() == {job["id"]: "step-000002@2", f"{job['id']}~1": "step-000004@4"}
    with pytest.raises(ConflictError, match=f"step-000004@4 is what job {job['id']} starts from"):
        await world.service.delete_checkpoint("ann", source["id"], "step-000004@4", ANN)
    await world.service.cancel("ann", job["id"])
    await world.service.delete_checkpoint("ann", source["id"], "step-000004@4", ANN)


async def test_a_checkpoint_that_is_not_there_not_ones_own_or_does_not_fit_is_not_named_later(world: Any) -> None:
    world.launcher.cluster = [Node("n1", "here", gpus=0, cpu_slots=3)]
    source = await ended(world)
    folder = save(source, "step-000002", 2)
    address = f"{source['id']}/step-000002"
    job = await world.reach(await submit(world), "RUNNING", "ann")
    others = await world.service.submit("bob", {"kind": "interactive", "base_model": "some-model"})
    narrow = await submit(world, base_model="other-model")
    for owner, id_, name, error, says in (
        ("ann", job["id"], f"{source['id']}/step-000009", ConfigError, "has no checkpoint 'step-000009'"),
        ("ann", job["id"], "step-000002", ConfigError, "not a checkpoint's address"),
        ("ann", job["id"], "job-00/final", NotFoundError, "no job 'job-00'"),
        ("bob", job["id"], address, NotFoundError, f"no job '{job['id']}'"),
        ("bob", (await world.reach(others, "RUNNING", "bob"))["id"], address, NotFoundError, f"no job '{source['id']}'"),
        ("ann", (await world.reach(narrow, "RUNNING", "ann"))["id"], address, ConfigError, "base model 'some-model'"),
        ("ann", source["id"], address, ConflictError, "is CANCELLED: it has no server"),
    ):
        with pytest.raises(error, match=says):
            await world.service.name_checkpoints(owner, id_, [name])
    assert Marks(folder.parent, None).holds() == {}
    assert world.launcher.named == {}
    driven = await world.rl()
    with pytest.raises(ConflictError, match="is of kind 'rl': it loads what its config names"):
        await world.service.name_checkpoints("admin", driven["id"], [address])


async def test_a_tag_protects_and_is_no_way_to_delete(world: Any) -> None:
    job = await ended(world)
    save(job, "final", 1)
    await world.service.tag_checkpoint("ann", job["id"], "final", "good", ANN)
    with pytest.raises(ConflictError, match="has the tag 'good'") as error:
        await world.service.delete_checkpoint("ann", job["id"], "final@1", ANN)
    assert error.value.hint == f"opentinker checkpoint untag {job['id']} good"
    with pytest.raises(NotFoundError, match="no checkpoint 'good'"):
        await world.service.delete_checkpoint("ann", job["id"], "good", ANN)
    assert await refs(world, job) == ["final@1"]


async def test_what_an_open_job_would_go_on_from_is_not_deleted(world: Any) -> None:
    job = await submit(world)
    save(job, "step-000001", 1)
    save(job, "step-000002", 2)
    await world.service.delete_checkpoint("ann", job["id"], "step-000001", ANN)
    with pytest.raises(ConflictError, match="step-000002@2 is what its job would go on from"):
        await world.service.delete_checkpoint("ann", job["id"], "step-000002", ANN)
    await world.service.cancel("ann", job["id"])
    await world.service.delete_checkpoint("ann", job["id"], "step-000002", ANN)
    assert await refs(world, job) == []


async def test_a_further_policys_part_of_what_an_open_job_would_go_on_from_is_not_deleted(world: Any) -> None:
    """The job's own policy is saved last: it died between the two saves of step 3, so that it goes on from step 2."""
    job = await submit(world)
    for step in (1, 2):
        save(job, f"step-00000{step}", step)
    for step in (1, 2, 3):
        save(job, f"step-00000{step}", step, "white")
    await world.service.delete_checkpoint("ann", job["id"], "white/step-000001", ANN)
    for step in (2, 3):
        with pytest.raises(ConflictError, match=f"white/step-00000{step}@{step} is what its job would go on from"):
            await world.service.delete_checkpoint("ann", job["id"], f"white/step-00000{step}", ANN)


@pytest.mark.parametrize("name", ["pool-white-first", "pool-white-000010", "arena-000000"])
@pytest.mark.parametrize("policy", [None, "white"])
async def test_what_an_open_job_plays_against_is_not_deleted(world: Any, name: str, policy: str | None) -> None:
    job = await submit(world)
    save(job, name, 0, policy)
    address = f"{policy}/{name}@0" if policy else f"{name}@0"
    with pytest.raises(ConflictError, match="may play in its job's games"):
        await world.service.delete_checkpoint("ann", job["id"], address, ANN)
    await world.service.cancel("ann", job["id"])
    await world.service.delete_checkpoint("ann", job["id"], address, ANN)
    assert await refs(world, job) == []


async def test_those_of_further_policies_are_listed_under_their_policy_and_treated_alike(world: Any) -> None:
    job = await submit(world)
    save(job, "final", 1)
    save(job, "final", 2, "critic")
    folder = save(job, "step-000003", 3, "critic")
    save(job, "step-000004", 4, "critic")
    listed = await world.service.checkpoints("ann", job["id"])
    base = f"ann/{job['id']}"
    assert [(row["policy"], row["ref"]) for row in listed] == [
        ("critic", f"{base}/critic/step-000004@4"),
        ("critic", f"{base}/critic/step-000003@3"),
        ("critic", f"{base}/critic/final@2"),
        (None, f"{base}/final@1"),
    ]
    view = await world.service.tag_checkpoint("ann", job["id"], "critic/final", "good", ANN)
    assert (view["ref"], view["policy"], view["tags"]) == (f"{base}/critic/final@2", "critic", ["good"])
    assert [row["tags"] for row in await world.service.checkpoints("ann", job["id"])] == [[], [], ["good"], []]
    with pytest.raises(ConflictError, match="critic/final@2 has the tag 'good'") as error:
        await world.service.delete_checkpoint("ann", job["id"], "critic/final", ANN)
    assert error.value.hint == f"opentinker checkpoint untag {job['id']} critic/good"
    with pytest.raises(NotFoundError, match="has no tag 'good'"):
        await world.service.untag_checkpoint("ann", job["id"], "good", ANN)
    await world.service.untag_checkpoint("ann", job["id"], "critic/good", ANN)
    await world.service.delete_checkpoint("ann", job["id"], "critic/step-000003", ANN)
    assert not folder.exists()
    with pytest.raises(ConflictError, match="critic/step-000004@4 is what its job would go on from"):
        await world.service.delete_checkpoint("ann", job["id"], "critic/step-000004", ANN)
    await world.service.delete_checkpoint("ann", job["id"], "critic/final@2", ANN)
    assert [row["ref"] for row in await world.service.checkpoints("ann", job["id"])] == [
        f"{base}/critic/step-000004@4",
        f"{base}/final@1",
    ]
    with pytest.raises(NotFoundError, match=r"policy 'critic' of job .* has no checkpoint 'final'") as missing:
        await world.service.delete_checkpoint("ann", job["id"], "critic/final", ANN)
    assert missing.value.hint == "it has step-000004@4"
    for name in ("../final", "critic/../final", "critic/final@2/x"):
        with pytest.raises(InvalidRequestError):
            await world.service.delete_checkpoint("ann", job["id"], name, ANN)


async def test_another_users_checkpoints_do_not_exist(world: Any) -> None:
    job = await ended(world)
    save(job, "final", 1)
    bob = Caller("bob", frozenset({Scope.SUBMIT}))
    for asked in (
        world.service.tag_checkpoint("bob", job["id"], "final", "mine", bob),
        world.service.untag_checkpoint("bob", job["id"], "mine", bob),
        world.service.delete_checkpoint("bob", job["id"], "final@1", bob),
    ):
        with pytest.raises(NotFoundError, match="no job"):
            await asked
    assert await refs(world, job) == ["final@1"]


async def test_a_submit_that_is_refused_holds_nothing_and_a_stray_hold_is_no_hindrance(world: Any) -> None:
    source = await ended(world)
    folder = save(source, "final", 1)
    with pytest.raises(ConfigError):
        await submit(world, start_from=f"{source['id']}/final@9")
    assert Marks(folder.parent, None).holds() == {}
    Marks(folder.parent, None).hold("job-0123456789", "final@1")  # the scheduler died before it accepted that one
    await world.service.delete_checkpoint("ann", source["id"], "final@1", ANN)
    assert not folder.exists()
