"""Runs that are copied to a storage: the scheduler reads there what is not on its node any more."""

import base64
import hashlib
import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from opentinker.config.base import parse_config
from opentinker.errors import ConfigError, UnavailableError
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.settings import Settings
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
    await stored.until(lambda: not any(name.startswith("copy:") for name in service._reconciler._tasks))
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
