"""Environments that do not run in the driver itself: on a server, in processes, and those of other libraries."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_tools import Cluster, marked, opentinker, processes_of, wait_until

TOKEN = "a-token-that-nobody-else-has"
BRIEF = ("training.steps=1", "evaluation.at_start=false", "evaluation.at_end=false")


@pytest.fixture
def hosted(project: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a server with the project's own environment. It ends with all its processes."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    marker, env = marked()
    command = [sys.executable, "-m", "opentinker", "env", "serve", str(project / "games.py:Echo"), "--port", "0"]
    log = tmp_path / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--workers", "2", "--token-file", str(token)], env=env, stdout=out, stderr=out, cwd=tmp_path
        )
    try:
        wait_until(lambda: re.search(r"http://[\d.]+:\d+", log.read_text()) is not None, 180, "the server says where it is")
        found = re.search(r"http://[\d.]+:\d+", log.read_text())
        assert found is not None
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    wait_until(lambda: processes_of(marker) == [], 25, "no process of the server is left")


def rows(cluster: Cluster, job_id: str) -> list[dict[str, object]]:
    run_dir = Path(cluster.client.job(job_id)["run_dir"])
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def submitted(cluster: Cluster, project: Path, *overrides: str) -> str:
    result = opentinker("submit", project / "job.yaml", *BRIEF, *overrides, "--follow", "--state-dir", cluster.state_dir)
    assert result.returncode == 0, result.stdout + result.stderr
    job_id: str = result.stdout.splitlines()[0]
    return job_id


def test_a_submitted_job_plays_on_an_environment_server_and_its_token_is_nowhere(
    cluster: Cluster, project: Path, hosted: str, tmp_path: Path
) -> None:
    (tmp_path / "value").write_text(TOKEN)
    state = ("--state-dir", cluster.state_dir)
    assert opentinker("secrets", "set", "games", "--from-file", tmp_path / "value", *state).returncode == 0
    os.environ["OPENTINKER_ENV_TOKEN"] = TOKEN  # so that the environment is checked here, too
    try:
        job_id = submitted(cluster, project, f"environment.name={hosted}", "environment.secrets.OPENTINKER_ENV_TOKEN=games")
    finally:
        del os.environ["OPENTINKER_ENV_TOKEN"]
    [row] = rows(cluster, job_id)
    assert row["terminations"] == {"done": 8}
    job = cluster.client.job(job_id)
    assert job["name"] == hosted.removeprefix("http://")
    files = [path for path in [*Path(job["run_dir"]).rglob("*"), *cluster.state_dir.rglob("*")] if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)


def test_a_forgotten_token_is_said_so_before_anything_starts(cluster: Cluster, project: Path, hosted: str) -> None:
    result = opentinker("submit", project / "job.yaml", f"environment.name={hosted}", "--state-dir", cluster.state_dir)
    if result.returncode == 0:  # what cannot be asked from here is not checked here: then the job says it
        job_id = result.stdout.strip()
        wait_until(lambda: cluster.client.job(job_id)["ended_at"] is not None, 180, "the job has ended")
        assert "token" in cluster.client.job(job_id)["cause"]
    else:
        assert "token" in result.stderr


def test_an_environment_that_hangs_in_a_process_of_its_own_is_killed_and_played_anew(cluster: Cluster, project: Path) -> None:
    games = project / "games.py"
    games.write_text(
        games.read_text()
        + """

class Spins(Echo):
    execution = "process"

    def step(self, action):
        import random, re
        if random.random() < 0.3:
            re.match(r"(a+)+$", "a" * 40 + "b")
        return super().step(action)
"""
    )
    job_id = submitted(
        cluster, project, "environment.name=games.py:Spins", "rollout.step_timeout_s=1", "rollout.member_retries=9"
    )
    [row] = rows(cluster, job_id)
    assert row["terminations"]["done"] == 8  # type: ignore[index]
    assert row["dropped"] == 0


def test_an_environment_of_another_library_trains_by_its_name(cluster: Cluster, project: Path) -> None:
    job_id = submitted(
        cluster,
        project,
        "environment.name=reasoning_gym:basic_arithmetic",
        "engine.max_model_len=512",
        "rollout.max_turns=1",
    )
    [row] = rows(cluster, job_id)
    assert row["episodes"] == 8
    assert row["errors"] == 0
