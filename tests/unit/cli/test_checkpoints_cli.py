"""`opentinker checkpoints`, against a scheduler's real HTTP API."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opentinker.cli.checkpoints import size
from opentinker.cli.main import app


def run(live: Any, *arguments: str, width: int = 80) -> Any:
    return CliRunner().invoke(app, [*arguments, "--state-dir", str(live.folder)], env={"COLUMNS": str(width)})


def save(job: dict[str, Any], name: str, version: int, at: float) -> None:
    folder = Path(job["run_dir"]) / "checkpoints" / f"{name}@{version}"
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
