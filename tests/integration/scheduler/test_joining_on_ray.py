"""A second node of a running cluster: what it brings, and that nothing stays of it, whatever ends it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from opentinker.scheduler.joining import NODE_VARIABLE

OTHER_ADDRESS = "127.0.0.2"
"""Stands for another machine's: Ray and the fronts use it as such, and this machine listens on it."""


@pytest.fixture(scope="module")
def cluster(run_marker: str, settings: dict[str, Any]) -> Iterator[Any]:
    from opentinker.scheduler.cluster import EmbeddedCluster

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        options = {**settings, "lease_s": 60.0}
        with EmbeddedCluster.start(path / "state", path / "runs", port=0, cpu_slots=2, settings=options) as running:
            yield running


def up_join(address: str, *options: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "opentinker", "up", "--join", address, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        start_new_session=True,
    )


@contextmanager
def joined(address: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A node that has joined; the test ends it."""
    with up_join(address, *options) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("Ctrl-C"):
                    break
            else:
                pytest.fail("the node did not join")
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=90.0)


def processes_of_nodes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if NODE_VARIABLE in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def gpu_job(api: Any, model: str = "fine") -> dict[str, Any]:
    config = {"kind": "interactive", "base_model": model, "resources": {"gpus": 1}}
    return api.post("/v1/jobs", {"config": config})  # type: ignore[no-any-return]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_node_joins_serves_jobs_at_its_own_address_and_leaves_nothing_but_a_cause(
    cluster: Any, api: Any, ending: signal.Signals
) -> None:
    at_home = api.wait(api.post("/v1/jobs", {"config": {"kind": "interactive", "base_model": "fine"}}), "RUNNING")
    with joined(cluster.ray_address, "--gpus=1", "--cpu-slots=1", f"--host={OTHER_ADDRESS}") as node:
        assert sorted((n["gpus"], n["cpu_slots"]) for n in api.get("/v1/cluster")["nodes"]) == [(0, 2), (1, 1)]
        job = api.wait(gpu_job(api, "bears-a-child"), "RUNNING")
        assert job["server"]["endpoint"].startswith(f"http://{OTHER_ADDRESS}:")
        assert at_home["server"]["endpoint"].startswith("http://127.0.0.1:")
        for of in (job, at_home):
            answer = api.http.get(f"{of['server']['proxy']}/anything")
            assert answer.text == str(of["server"]["front_pid"])
        assert len(processes_of_nodes()) > 3
        node.send_signal(ending)
        job = api.wait(job, "FAILED", timeout_s=90.0)
        assert "(its node left the cluster, or was lost)" in job["cause"]
        output, errors = node.communicate(timeout=90.0)
    if ending == signal.SIGTERM:
        assert (node.returncode, output, errors) == (0, "leaving\n", "")
    deadline = time.monotonic() + 25.0
    while left := processes_of_nodes():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert api.get(f"/v1/jobs/{at_home['id']}")["state"] == "RUNNING"
    while len(nodes := api.get("/v1/cluster")["nodes"]) > 1:
        assert time.monotonic() < deadline, nodes
        time.sleep(0.1)
    api.wait(api.rl(), "COMPLETED")


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"HOME": "/nonexistent"}, "wants a token, and there is no /nonexistent/.ray/auth_token"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another-clusters-token-0123456789"}, "refuses this account's token"),
    ],
)
def test_without_the_clusters_token_nobody_joins_and_is_told_what_to_do(
    cluster: Any, variables: dict[str, str], complaint: str
) -> None:
    process = up_join(cluster.ray_address, **variables)
    output, errors = process.communicate(timeout=180.0)
    assert (process.returncode, output) == (1, "")
    assert complaint in errors
    assert "copy the head's ~/.ray/auth_token" in errors
    assert len(errors.splitlines()) == 2


def test_a_node_that_does_not_see_the_runs_folder_is_refused(cluster: Any) -> None:
    marker = cluster.key_path.parents[1] / "runs" / ".cluster"
    number = marker.read_text()
    marker.write_text("of another machine's folder of the same name")
    process = up_join(cluster.ray_address)
    _, errors = process.communicate(timeout=180.0)
    marker.write_text(number)
    assert process.returncode == 1
    assert f"jobs write to {marker.parent}, which on this machine is not the cluster's folder" in errors
