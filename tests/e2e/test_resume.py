"""A program that drives its own job is killed with SIGKILL, and the same program is started again."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e_tools import LEASE_S, OPENTINKER, Cluster, opentinker

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

import exact_resume
import resume_own

from opentinker.training.recorder import standing_rows

STEPS = 6


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The model and the environments that the runs share."""
    exact_resume.prepare(tmp_path)
    return tmp_path


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def shown(rows: list[dict[str, Any]]) -> list[tuple[str, int, Any]]:
    """What a run says of what it learnt, step by step."""
    return [
        (row["kind"], row["step"], row.get("loss"))
        if row["kind"].startswith("sft")
        else (row["kind"], row["step"], row["reward_mean"])
        for row in rows
    ]


@pytest.mark.parametrize("kind", ["lora", "sft"])
def test_a_driver_that_is_killed_goes_on_in_another_job_bit_for_bit(cluster: Cluster, shared: Path, kind: str) -> None:
    whole, cut = shared / "whole", shared / "cut"
    access = cluster.url, cluster.key
    uninterrupted = resume_own.begin(shared, *access, kind, whole, STEPS)
    # After the fourth row and so with the checkpoint of step 2 at least; what came since has to come again.
    assert exact_resume.kill_after(resume_own.begin(shared, *access, kind, cut, STEPS), cut, 5, 0.0), "it still ran"
    exact_resume.finish(uninterrupted, whole)
    [first] = {address.split("/")[1] for saved in left_of(cut) for address in saved["addresses"].values()}
    exact_resume.finish(resume_own.begin(shared, *access, kind, cut, STEPS), cut)
    assert exact_resume.difference(whole, cut) == 0.0
    rows = rows_of(cut)
    [resumed] = [row["step"] for row in rows if row["kind"] == "resumed"]
    assert resumed >= 2
    assert shown(standing_rows(rows)) == shown(rows_of(whole))
    second = left_of(cut)[-1]["addresses"][""].split("/")[1]
    assert second != first
    assert cluster.client.job(first)["state"] == "CANCELLED"
    assert cluster.client.job(second)["state"] == "COMPLETED"
    held = cluster.client.job(second)["config"]["checkpoints"]
    assert held[-1].startswith(f"admin/{first}/step-"), "what the run went on from is held"
    names = [view["name"] for view in cluster.client.checkpoints(first)]
    assert f"step-{resumed:06d}" in names, "a job whose lease was lost keeps its checkpoints"
    summary = json.loads((cut / "summary.json").read_text())
    assert summary["steps"] == STEPS


def left_of(run_dir: Path) -> list[dict[str, Any]]:
    saved: list[dict[str, Any]] = json.loads((run_dir / "resume.json").read_text())["checkpoints"]
    return saved


def test_the_command_goes_on_with_the_run_in_a_folder_and_says_why_not(cluster: Cluster, project: Path) -> None:
    file, runs = project / "job.yaml", project / "mine"
    config = yaml.safe_load(file.read_text())
    config["environment"]["name"] = "games.py:Slow"
    config["evaluation"] |= {"at_start": False}
    config["training"] = {"steps": 4, "save_every": 1, "keep_last": 1}
    file.write_text(yaml.safe_dump(config))
    command = [OPENTINKER, "train", str(file), "--state-dir", str(cluster.state_dir), "--runs-dir", str(runs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not ((found := list(runs.glob("*/resume.json"))) and left_of(found[0].parent)):
        assert time.monotonic() < deadline, "no checkpoint was written"
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    run = found[0].parent

    def again(*words: str) -> Any:
        return opentinker("train", file, "--state-dir", cluster.state_dir, *words)

    for words, says in (
        (("training.seed=9", "--resume", str(run)), "error: training.seed: the run in .* has 0, and now it is 9"),
        (("--resume", str(project / "none")), "holds no run: there is nothing to go on from"),
        (("training.steps=1", "--resume", str(copied_at(run, 3))), r"training.steps is 1, and the run in .* has done 3"),
    ):
        refused = again(*words)
        assert refused.returncode == 1
        assert re.search(says, re.sub(r"\s+", " ", refused.stderr)), refused.stderr
        assert "waiting for a server" not in refused.stderr, "before anything is asked of the cluster"
    result = again("training.steps=5", "--resume", str(run))
    assert result.returncode == 0, result.stdout + result.stderr
    rows = rows_of(run)
    assert [row["step"] for row in standing_rows(rows) if row["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert sum(row["kind"] == "resumed" for row in rows) == 1
    [last] = [Path(line.removeprefix("checkpoint: ")) for line in result.stdout.splitlines() if line.startswith("checkpoint: ")]
    assert last.name == "final@5", "versions go on, too"
    job = last.parents[1].name
    assert [view["name"] for view in cluster.client.checkpoints(job)][:2] == ["final", "step-000005"]
    shutil.rmtree(last.parent / "step-000005@5")
    gone = again("training.steps=6", "--resume", str(run))
    assert gone.returncode == 1
    assert f"job {job} has no checkpoint 'step-000005@5'" in re.sub(r"\s+", " ", gone.stderr)
    assert rows_of(run) == rows, "nothing began anew"
    time.sleep(LEASE_S)  # the killed driver's job is over before the next test counts slots


def copied_at(run: Path, step: int) -> Path:
    """A copy of a run, whose record says that it was left after a later step."""
    copy = shutil.copytree(run, run.with_name("copy"))
    state = json.loads((copy / "resume.json").read_text())
    state["checkpoints"][-1]["step"] = step
    (copy / "resume.json").write_text(json.dumps(state))
    return copy
