"""Runs that are copied to a storage: the scheduler reads there what is not on its node any more."""

import asyncio
import base64
import hashlib
import io
import json
import os
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from opentinker.config.base import parse_config
from opentinker.errors import ConfigError, ConflictError, StorageError, UnavailableError
from opentinker.scheduler import service as service_module
from opentinker.scheduler import submission as submission_module
from opentinker.scheduler.placement import Node
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.storage_calls import THREADS
from opentinker.storage import Storage


def settings(**fields: Any) -> Settings:
    return parse_config(Settings, {"state_dir": "/s", "runs_dir": "/r", **fields})


def test_a_folder_is_where_runs_are_and_a_url_is_where_they_are_copied() -> None:
    assert (settings().run_root, settings().remote_storage) == (Path("/r"), "")
    assert (settings(storage_url="/shared").run_root, settings(storage_url="/shared").remote_storage) == (Path("/shared"), "")
    remote = settings(storage_url="s3://bucket/ot")
    assert (remote.run_root, remote.remote_storage) == (Path("/r"), "s3://bucket/ot")
    with pytest.raises(ConfigError, match="neither an absolute path nor a URL"):
        settings(storage_url="runs")
    with pytest.raises(ConfigError, match="must not hold credentials"):
        settings(storage_url="ftp://me:secret@host/ot")


@pytest.fixture
async def stored(world: Any, tmp_path: Path) -> Any:
    """The world with a storage on another disk."""
    world.settings = world.settings.model_copy(update={"storage_url": f"file://{tmp_path / 'remote'}"})
    await world.crash()
    world.boot()
    return world


def checkpoint(job: dict[str, Any], name: str) -> Path:
    folder = Path(job["run_dir"]) / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(
        json.dumps({"kind": "full", "model_type": "llama", "step": 5, "created_at": 1.0})
    )
    (folder / "manifest.json").write_text(json.dumps({"files": {"w": {"bytes": 7}}}))
    return folder


def code() -> dict[str, str]:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("mine.py", "x = 1")
    raw = content.getvalue()
    return {"zip": base64.b64encode(raw).decode(), "sha256": hashlib.sha256(raw).hexdigest()}


async def test_the_users_code_is_there_for_a_driver_on_another_node(stored: Any) -> None:
    job = await stored.interactive(code=code())
    storage = Storage(stored.settings.storage_url, stored.settings.runs_dir)
    assert storage.read(Path(job["run_dir"]) / "code" / "mine.py") == b"x = 1"


async def test_an_ended_run_is_read_from_the_storage_when_its_folder_is_gone(stored: Any) -> None:
    service = stored.service
    job = await stored.reach(await stored.rl(), "RUNNING")
    run_dir = Path(job["run_dir"])
    assert run_dir == stored.settings.runs_dir / "admin" / job["id"]
    (run_dir / "driver.log").write_text("line one\nthe end")
    (run_dir / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    storage = Storage(stored.settings.storage_url, stored.settings.runs_dir)
    storage.put_folder(checkpoint(job, "final@2"), last="manifest.json")
    await stored.until(lambda: job["id"] in stored.launcher.ends)
    stored.launcher.ends[job["id"]].set_result(DriverOutcome(""))
    await stored.reach(job, "COMPLETED")
    await stored.until(lambda: storage.exists(run_dir / "metrics.jsonl"))
    await copied(stored)
    shutil.rmtree(run_dir)
    logs = await service.logs("admin", job["id"])
    assert (logs["text"], logs["finished"]) == ("line one\nthe end", True)
    assert (await service.logs("admin", job["id"], 5))["text"] == "one\nthe end"
    assert [row["step"] for row in (await service.metrics("admin", job["id"]))["rows"]] == [1]
    assert [c["ref"] for c in await service.checkpoints("admin", job["id"])] == [f"admin/{job['id']}/final@2"]
    config = {"kind": "interactive", "base_model": "some-model", "start_from": f"{job['id']}/final"}
    follower = await stored.reach(await service.submit("admin", config), "RUNNING")
    (spec,) = (spec for spec in stored.launcher.servers.values() if spec.job_id == follower["id"])
    assert spec.start_from == str(run_dir / "checkpoints" / "final@2")  # its server brings it there


async def test_without_its_storage_the_scheduler_still_runs_what_is_here(stored: Any, tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("a file where the folder should be")
    job = await stored.reach(await stored.interactive(), "RUNNING")
    (Path(job["run_dir"]) / "server.log").write_text("it works\n")
    assert (await stored.service.logs("admin", job["id"]))["text"] == "it works\n"
    assert await stored.service.checkpoints("admin", job["id"]) == []
    runs = sorted(stored.settings.runs_dir.glob("*/*"))
    with pytest.raises(UnavailableError, match=r"the storage file:.*does not do it"):
        await stored.interactive(code=code())
    assert sorted(stored.settings.runs_dir.glob("*/*")) == runs
    await stored.service.complete("admin", job["id"])
    await stored.until_free(1)


def files(folder: Path) -> list[Path]:
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]  # some may be going


async def lose(stored: Any, job: dict[str, Any]) -> None:
    await stored.until(lambda: job["id"] in stored.launcher.ends)
    stored.launcher.ends[job["id"]].set_result(DriverOutcome("the driver process died", lost=True))


async def copied(stored: Any) -> None:
    await stored.until(lambda: not stored.service._reconciler.copies.pending)


async def test_what_a_jobs_first_node_has_is_older_than_what_its_second_one_copied(stored: Any) -> None:
    launcher, service = stored.launcher, stored.service
    job = await stored.reach(await stored.rl(max_restarts=1), "RUNNING")
    run_dir = Path(job["run_dir"])
    log = run_dir / "driver.log"
    log.write_text("one\n")
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    launcher.cluster = [Node("n2", "elsewhere", gpus=0, cpu_slots=1)]
    await lose(stored, job)
    await stored.until(lambda: any(spec.node_id == "n2" for spec in launcher.servers.values()))
    await copied(stored)
    storage = Storage(stored.settings.storage_url, stored.settings.runs_dir)
    assert storage.read(log) == b"one\n"
    assert (await service.logs("admin", job["id"]))["text"] == "one\n"
    # As the other node's server copies them, before whose eyes this node's folder is not.
    there = Storage(stored.settings.storage_url, stored.settings.runs_dir.with_name("n2"))
    other = there.root / run_dir.relative_to(storage.root)
    other.mkdir(parents=True)
    (other / "driver.log").write_text("one\ntwo\n")
    (other / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    for name in ("driver.log", "metrics.jsonl"):
        there.put(other / name)
    assert (await service.logs("admin", job["id"], 4))["text"] == "two\n"
    await stored.until(lambda: job["id"] in launcher.ends)
    launcher.ends[job["id"]].set_result(DriverOutcome(""))
    await stored.reach(await service.job("admin", job["id"]), "COMPLETED")
    await stored.until_free(1)
    await copied(stored)
    assert storage.read(log) == b"one\ntwo\n"
    assert [row["step"] for row in (await service.metrics("admin", job["id"]))["rows"]] == [1, 2]
    logs = await service.logs("admin", job["id"])
    assert (logs["text"], logs["finished"]) == ("one\ntwo\n", True)


async def test_copying_an_earlier_server_s_files_ends_when_the_next_one_copies(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.scheduler.run_copies.FOLLOW_S", 0.01)
    monkeypatch.setattr("opentinker.scheduler.run_copies.TRIES", 10**6)
    remote = tmp_path / "remote"
    remote.write_text("a file where the folder should be")
    job = await stored.reach(await stored.rl(max_restarts=1), "RUNNING")
    log = Path(job["run_dir"]) / "driver.log"
    log.write_text("one\n")
    stored.launcher.cluster = []
    await lose(stored, job)
    await stored.until(lambda: stored.service._reconciler.copies.pending == (job["id"],))
    await stored.settle()
    stored.launcher.cluster = [Node("n2", "elsewhere", gpus=0, cpu_slots=1)]
    await copied(stored)
    remote.unlink()
    await stored.settle()
    assert not Storage(stored.settings.storage_url, stored.settings.runs_dir).exists(log)


async def test_a_server_that_comes_and_goes_while_the_one_before_is_copied_is_copied_too(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.scheduler.run_copies.FOLLOW_S", 0.5)
    remote = tmp_path / "remote"
    remote.write_text("a file where the folder should be")
    job = await stored.reach(await stored.rl(max_restarts=1), "RUNNING")
    log = Path(job["run_dir"]) / "driver.log"
    log.write_text("one\n")
    await lose(stored, job)
    await stored.until(lambda: kinds_of(stored, job).count("running") == 2)
    log.write_text("one\ntwo\n")
    await lose(stored, job)
    await stored.until(lambda: kinds_of(stored, job).count("copying") == 2)
    remote.unlink()
    await copied(stored)
    assert kinds_of(stored, job)[-1] == "copied"
    assert Storage(stored.settings.storage_url, stored.settings.runs_dir).read(log) == b"one\ntwo\n"


async def ended_with_a_log(stored: Any) -> dict[str, Any]:
    """A job whose last lines the storage, which is away, does not get."""
    job = await stored.reach(await stored.rl(), "RUNNING")
    (Path(job["run_dir"]) / "driver.log").write_text("the end\n")
    await stored.until(lambda: job["id"] in stored.launcher.ends)
    stored.launcher.ends[job["id"]].set_result(DriverOutcome(""))
    job = await stored.reach(job, "COMPLETED")
    await stored.until_free(1)
    return job


def kinds_of(stored: Any, job: dict[str, Any]) -> list[str]:
    return [event.kind for event in stored.store.events(job["id"])]


async def test_what_was_to_be_copied_when_the_scheduler_died_is_copied_by_the_next(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = tmp_path / "remote"
    remote.write_text("a file where the folder should be")
    job = await ended_with_a_log(stored)
    assert kinds_of(stored, job)[-2:] == ["released", "copying"]
    await stored.crash()
    remote.unlink()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    stored.launcher.here = "n2"
    for _ in range(2):  # another machine has not these files, or older ones
        stored.boot()
        assert stored.service._reconciler.copies.pending == ()
        await stored.settle()
        await stored.crash()
    assert kinds_of(stored, job)[-1] == "copying"
    monkeypatch.undo()
    stored.boot()
    await copied(stored)
    log = Path(job["run_dir"]) / "driver.log"
    assert Storage(stored.settings.storage_url, stored.settings.runs_dir).read(log) == b"the end\n"
    assert kinds_of(stored, job)[-1] == "copied"
    await stored.crash()
    stored.boot()
    await stored.settle()
    assert kinds_of(stored, job).count("copied") == 1, "once and for all"


async def test_what_a_later_server_copies_is_not_copied_again_after_a_crash(stored: Any, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    remote.write_text("a file where the folder should be")
    job = await stored.reach(await stored.rl(max_restarts=1), "RUNNING")
    log = Path(job["run_dir"]) / "driver.log"
    log.write_text("one\n")
    stored.launcher.cluster = [Node("n2", "elsewhere", gpus=0, cpu_slots=1)]
    await lose(stored, job)
    await stored.until(lambda: any(spec.node_id == "n2" for spec in stored.launcher.servers.values()))
    await stored.crash()
    remote.unlink()
    stored.boot()
    assert stored.service._reconciler.copies.pending == ()
    await stored.settle()
    assert not Storage(stored.settings.storage_url, stored.settings.runs_dir).exists(log)


@pytest.mark.parametrize("why", ["its folder is gone", "tried 3 times"])
async def test_what_cannot_be_copied_is_said_and_not_tried_for_ever(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "tried 3 times":
        monkeypatch.setattr("opentinker.scheduler.run_copies.FOLLOW_S", 0.01)
        monkeypatch.setattr("opentinker.scheduler.run_copies.TRIES", 3)
    (tmp_path / "remote").write_text("a file where the folder should be")
    job = await ended_with_a_log(stored)
    if why == "its folder is gone":
        await stored.crash()
        shutil.rmtree(job["run_dir"])
        stored.boot()
    await copied(stored)
    last = stored.store.events(job["id"])[-1]
    assert (last.kind, why in last.detail) == ("not_copied", True)


@pytest.fixture
def hanging(stored: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The storage hangs until this is set."""
    answers = threading.Event()
    storage = stored.service._storage

    def waiting(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            answers.wait()
            return real(*arguments, **named)

        return call

    for method in ("_put", "read", "size", "checkpoints"):
        monkeypatch.setattr(storage, method, waiting(getattr(storage, method)))
    monkeypatch.setattr(service_module, "READ_S", 0.1)
    monkeypatch.setattr(submission_module, "STORAGE_S", 0.1)
    yield answers
    answers.set()


async def test_a_storage_that_hangs_is_said_and_what_is_here_is_still_read(stored: Any, hanging: threading.Event) -> None:
    service = stored.service
    job = await stored.reach(await stored.interactive(), "RUNNING")
    (Path(job["run_dir"]) / "server.log").write_text("it works\n")
    for _ in range(20):
        with pytest.raises(UnavailableError, match=r"the storage did not answer within 0\.1 s"):
            await service.checkpoints("admin", job["id"])
    assert (await service.logs("admin", job["id"]))["text"] == "it works\n"
    await service.complete("admin", job["id"])
    assert (await service.logs("admin", job["id"]))["text"] == "it works\n"
    shutil.rmtree(job["run_dir"])
    with pytest.raises(UnavailableError, match="did not answer"):
        await service.logs("admin", job["id"])


async def test_a_submit_that_the_storage_kept_too_long_leaves_nothing_behind(
    stored: Any, hanging: threading.Event, tmp_path: Path
) -> None:
    with pytest.raises(UnavailableError, match="did not answer"):
        await stored.interactive(code=code())
    assert (await stored.service.jobs("admin"))["jobs"] == []
    hanging.set()
    await stored.until(lambda: not list(stored.settings.runs_dir.glob("*/*")) and not files(tmp_path / "remote"))
    await stored.interactive(code=code())


async def test_a_submit_that_needs_no_storage_does_not_wait_for_one_that_hangs(
    stored: Any, hanging: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_module, "STORAGE_S", 60.0)
    uploads = [asyncio.create_task(stored.interactive(code=code())) for _ in range(2 * THREADS)]
    await stored.until(lambda: len(list(stored.settings.runs_dir.glob("*/*/code/mine.py"))) == len(uploads))
    async with asyncio.timeout(5.0):
        for key in (None, "key", "key"):
            await stored.interactive(idempotency_key=key)
    assert len((await stored.service.jobs("admin"))["jobs"]) == 2
    for upload in uploads[::2]:  # some of them under way, others not even begun
        upload.cancel()
    given_up = await asyncio.gather(*uploads[::2], return_exceptions=True)
    assert [type(error) for error in given_up] == [asyncio.CancelledError] * THREADS
    hanging.set()
    jobs = [*await asyncio.gather(*uploads[1::2]), *(await stored.service.jobs("admin"))["jobs"]]
    kept = {job["id"] for job in jobs}
    await stored.until(lambda: {folder.name for folder in stored.settings.runs_dir.glob("*/*")} == kept)
    await stored.until(lambda: {path.parts[-3] for path in files(tmp_path / "remote")} <= kept)


@pytest.mark.parametrize("key", ["key", None])
async def test_a_retry_that_overtakes_its_first_attempt_is_the_same_job(
    stored: Any, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setattr(submission_module, "STORAGE_S", 60.0)
    attempts = [asyncio.create_task(stored.interactive(code=code(), idempotency_key=key)) for _ in range(3)]
    await stored.settle()
    hanging.set()
    jobs = {job["id"] for job in await asyncio.gather(*attempts)}
    assert len(jobs) == (1 if key else 3)
    await stored.until(lambda: {folder.name for folder in stored.settings.runs_dir.glob("*/*")} == jobs)


@pytest.mark.parametrize("why", ["disk", "closing"])
async def test_a_job_that_is_refused_at_last_leaves_nothing_behind(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def full(*_: Any) -> None:
        assert files(tmp_path / "remote")
        raise StorageError("the disk is full")

    monkeypatch.setattr(stored.store, "accept", full)
    monkeypatch.setattr(stored.service._submissions, "closed", why == "closing")
    with pytest.raises(StorageError if why == "disk" else ConflictError):
        await stored.interactive(code=code())
    assert list(stored.settings.runs_dir.glob("*/*")) == []
    await stored.until(lambda: not files(tmp_path / "remote"))


async def test_an_upload_that_fails_halfway_leaves_nothing_behind(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = stored.service._storage
    put = storage._put

    def fails(path: Path) -> None:
        put(path)
        raise ConnectionResetError("the line is dead")

    monkeypatch.setattr(storage, "_put", fails)
    with pytest.raises(UnavailableError, match="the line is dead"):
        await stored.interactive(code=code())
    assert files(tmp_path / "remote") == list(stored.settings.runs_dir.glob("*/*")) == []
