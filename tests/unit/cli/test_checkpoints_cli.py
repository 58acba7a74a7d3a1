"""`opentinker checkpoints`, against a scheduler's real HTTP API."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opentinker.checkpoint_files import digest, manifest_text
from opentinker.checkpoints import MANIFEST, policy_root
from opentinker.cli.checkpoints import size
from opentinker.cli.main import app
from opentinker.client.scheduler import SchedulerClient
from opentinker.storage import Storage


def run(live: Any, *arguments: str, width: int = 80) -> Any:
    return CliRunner().invoke(app, [*arguments, "--state-dir", str(live.folder)], env={"COLUMNS": str(width)})


def save(job: dict[str, Any], name: str, version: int, at: float, policy: str | None = None) -> None:
    folder = policy_root(Path(job["run_dir"]) / "checkpoints", policy) / f"{name}@{version}"
    folder.mkdir(parents=True)
    state = {"kind": "full", "model_type": "llama", "step": version, "created_at": at, "version": version}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(json.dumps({"files": {"w": {"bytes": 3 * 2**20}}}))


def test_checkpoints_are_listed_with_addresses_that_can_be_copied(live: Any) -> None:
    first, second = live.submit(), live.submit("interactive")
    assert run(live, "checkpoints").stdout.strip() == "no checkpoints"
    save(first, "final", 25, at=2000.0)
    save(first, "step-000010", 10, at=1000.0)
    save(second, "guess-v1", 3, at=3000.0)
    addresses = [f"admin/{job['id']}/{name}" for job, name in ((second, "guess-v1@3"), (first, "final@25"))]
    output = run(live, "checkpoints", width=70).stdout
    assert all(address in output for address in addresses)
    assert "3.0 MiB" in output
    listed = [json.loads(line) for line in run(live, "checkpoints", "--json").stdout.splitlines()]
    assert [row["ref"] for row in listed] == [*addresses, f"admin/{first['id']}/step-000010@10"]
    assert len(run(live, "checkpoints", first["id"], "--json").stdout.splitlines()) == 2


def test_no_such_job_is_an_error(live: Any) -> None:
    result = run(live, "checkpoints", "job-0000000000")
    assert result.exit_code == 1
    assert "no job" in result.stderr


@pytest.mark.parametrize(("amount", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5.0 TiB")])
def test_sizes_are_for_people(amount: int, text: str) -> None:
    assert size(amount) == text


def test_a_checkpoint_is_tagged_used_and_deleted_from_the_command_line(live: Any) -> None:
    job = live.submit()
    save(job, "final", 25, at=2000.0)
    save(job, "mine", 10, at=1000.0)
    tagged = run(live, "checkpoint", "tag", job["id"], "mine@10", "good")
    assert (tagged.exit_code, tagged.stdout.strip()) == (0, f"admin/{job['id']}/mine@10 is {job['id']}/good")
    assert "good" in run(live, "checkpoint", "list", job["id"]).stdout
    listed = [json.loads(line) for line in run(live, "checkpoint", "list", job["id"], "--json").stdout.splitlines()]
    assert [row["tags"] for row in listed] == [[], ["good"]]
    refused = run(live, "checkpoint", "delete", job["id"], "mine@10", "--yes")
    assert refused.exit_code == 1
    assert f"opentinker checkpoint untag {job['id']} good" in refused.stderr
    assert json.loads(run(live, "checkpoint", "untag", job["id"], "good", "--json").stdout)["untagged"] == "good"
    unasked = run(live, "checkpoint", "delete", job["id"], "mine@10")
    assert (unasked.exit_code, "--yes" in unasked.stderr) == (1, True)
    deleted = json.loads(run(live, "checkpoint", "delete", job["id"], "mine", "--yes", "--json").stdout)
    assert deleted == {"deleted": f"admin/{job['id']}/mine@10", "bytes": 3 * 2**20}
    assert len(run(live, "checkpoint", "list", job["id"], "--json").stdout.splitlines()) == 1
    absent = run(live, "checkpoint", "delete", job["id"], "mine", "--yes")
    assert (absent.exit_code, "it has final@25" in absent.stderr) == (1, True)


def test_a_further_policys_checkpoint_is_named_with_its_policy(live: Any) -> None:
    job = live.submit()
    save(job, "final", 25, at=2000.0)
    save(job, "final", 7, at=1000.0, policy="critic")
    ref = f"admin/{job['id']}/critic/final@7"
    assert ref in run(live, "checkpoints", job["id"], width=100).stdout
    tagged = run(live, "checkpoint", "tag", job["id"], "critic/final", "good")
    assert (tagged.exit_code, tagged.stdout.strip()) == (0, f"{ref} is {job['id']}/critic/good")
    assert run(live, "checkpoint", "untag", job["id"], "critic/good").exit_code == 0
    absent = run(live, "checkpoint", "delete", job["id"], "actor/final", "--yes")
    assert (absent.exit_code, "it has final@25, critic/final@7" in absent.stderr) == (1, True)
    deleted = json.loads(run(live, "checkpoint", "delete", job["id"], "critic/final", "--yes", "--json").stdout)
    assert deleted["deleted"] == ref
    assert len(run(live, "checkpoint", "list", job["id"], "--json").stdout.splitlines()) == 1


def test_an_export_says_what_it_cannot_reach(live: Any, tmp_path: Path) -> None:
    job = live.submit()
    save(job, "final", 25, at=2000.0)
    out = str(tmp_path / "out")
    damaged = run(live, "checkpoint", "export", job["id"], "final", "-o", out)
    assert (damaged.exit_code, "incomplete" in damaged.stderr) == (1, True)
    for words, message in (
        ((str(tmp_path / "nowhere"),), "there is no folder"),
        ((job["id"], "best"), "no checkpoint 'best'"),
        ((job["id"], "final", "--dtype", "float32"), "--merge"),
    ):
        refused = run(live, "checkpoint", "export", *words, "-o", out)
        assert (refused.exit_code, message in refused.stderr) == (1, True), refused.stderr
    assert not (tmp_path / "out").exists()


def test_an_export_brings_from_the_storage_what_is_not_on_this_machine(live: Any, tmp_path: Path) -> None:
    job = live.submit()
    save(job, "final", 7, at=1000.0, policy="critic")
    here = policy_root(Path(job["run_dir"]) / "checkpoints", "critic") / "final@7"
    (here / "model.safetensors").write_bytes(b"weights")
    (here / "config.json").write_text("{}")
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in here.iterdir() if path.name != MANIFEST
    }
    (here / MANIFEST).write_text(manifest_text(files))
    url = f"file://{tmp_path / 'bucket'}"
    storage = Storage(url, Path(job["run_dir"]).parent.parent)
    storage.put_folder(here, last=MANIFEST)
    # The cluster goes on to list it from where it is; this machine has lost the files.
    (here / "model.safetensors").unlink()
    moved = here.with_name(".final@7.elsewhere")
    arguments = ("checkpoint", "export", job["id"], "critic/final", "-o", str(tmp_path / "out"))
    damaged = run(live, *arguments)
    assert (damaged.exit_code, "model.safetensors" in damaged.stderr) == (1, True)
    listed = [json.loads(line) for line in run(live, "checkpoints", job["id"], "--json").stdout.splitlines()]
    here.rename(moved)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SchedulerClient, "checkpoints", lambda client, job_id: listed)
        away = run(live, *arguments)
        assert (away.exit_code, "--storage URL" in away.stderr) == (1, True)
        absent = run(live, *arguments, "--storage", f"file://{tmp_path / 'other'}")
        assert (absent.exit_code, "is not in the storage" in absent.stderr) == (1, True)
        written = run(live, *arguments, "--storage", url, "--json")
        assert written.exit_code == 0, written.stderr
    assert json.loads(written.stdout)["files"] == ["config.json", "model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"weights"
    assert not list(tmp_path.glob(".out*")), "what was brought is gone"
