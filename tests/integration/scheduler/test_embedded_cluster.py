"""Starting and stopping a cluster: nothing is left, whatever ends it."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from opentinker.errors import ConfigError
from opentinker.scheduler import cluster
from opentinker.scheduler.state_dir import StateDir

SCRIPT = """if True:
    import json, sys
    from pathlib import Path
    from opentinker.scheduler.cluster import EmbeddedCluster
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    with EmbeddedCluster.start(folder / "state", folder / "runs", port=0, cpu_slots=1, gpus=2, settings=settings) as cluster:
        print(cluster.url, flush=True)
        sys.stdin.read()
    print("stopped", flush=True)
"""


def processes_with(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OPENTINKER_RUN") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("ending", ["stop", "kill -9"])
def test_no_process_is_left_of_a_cluster_with_a_running_job(
    tmp_path: Path, run_marker: str, settings: dict[str, object], ending: str
) -> None:
    marker = f"{run_marker}-{ending}"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENTINKER_RUN": marker},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    state = StateDir(tmp_path / "state")
    record = state.running()
    assert record is not None
    assert (record["url"], record["pid"]) == (url, process.pid)
    assert Path(record["key_path"]) == tmp_path / "state" / "api_key"
    assert stat.S_IMODE(Path(record["key_path"]).stat().st_mode) == 0o600
    with user(url, tmp_path) as http:
        config = {"kind": "rl", "base_model": "bears-a-child", "environment": {"name": "waits"}}
        job = http.post("/v1/jobs", json={"config": config}).json()
        while job["state"] in ("QUEUED", "STARTING"):
            job = http.get(f"/v1/jobs/{job['id']}", params={"state": job["state"], "wait_s": 10}).json()
        assert job["state"] == "RUNNING"
        (node,) = http.get("/v1/cluster").json()["nodes"]
        assert (node["free_gpus"], node["free_cpu_slots"]) == (1, 1)  # Ray may be told of GPUs that are not there
        refused = http.post("/v1/jobs", json={"config": {**config, "resources": {"gpus": 3}}}).json()
        assert "3 GPUs on one node; the largest node of this cluster has 2 GPUs" in refused["detail"]
        # A process that is killed in its first second may outlive its Ray by half a minute; this one is past that.
        while "at work" not in http.get(f"/v1/jobs/{job['id']}/logs").json()["text"]:
            time.sleep(0.05)
    others = [p.pid for p in processes_with(marker) if p.pid != process.pid]
    assert len(others) > 4
    # A signal to our process group, as terminals and service managers send it, does not reach Ray and the jobs.
    assert os.getpgid(process.pid) not in map(os.getpgid, others)
    if ending == "stop":
        output, errors = process.communicate("", timeout=120.0)
        assert output == "stopped\n"
        assert errors == ""
        assert not state.cluster.exists()
    else:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60.0)
    deadline = time.monotonic() + 25.0
    while left := processes_with(marker):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert state.running() is None
    # What a killed cluster left on disk goes with the next start.
    assert (ending == "stop") == (not Path(record["ray_dir"]).exists())
    cluster._clean_up_after(state.record())
    assert not Path(record["ray_dir"]).exists()


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use") as caught:
            cluster.EmbeddedCluster.start(tmp_path / "state", tmp_path / "runs", port=port)
        assert time.monotonic() - started < 60.0
    assert "--port 0" in caught.value.hint
    assert StateDir(tmp_path / "state").running() is None


RAY = """if True:
    import sys
    import ray
    ray.init(address="local", resources={"cpu_slot": 1}, include_dashboard=False, log_to_driver=False)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""
GATEWAY = """if True:
    import json, sys
    from pathlib import Path
    from opentinker.scheduler.cluster import EmbeddedCluster
    folder, settings, address = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    with EmbeddedCluster.start(folder / "state", folder / "runs", port=0, ray_address=address, settings=settings) as cluster:
        print(cluster.url, flush=True)
        sys.stdin.read()
"""


@contextmanager
def script(code: str, *arguments: str) -> Iterator[str]:
    """The first line that a Python script prints; it ends in order when the block does."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "token"},
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("", timeout=120.0)
        assert process.returncode == 0


def test_on_an_existing_ray_cluster_jobs_outlive_the_process_that_serves_the_api(
    tmp_path: Path, run_marker: str, settings: dict[str, object]
) -> None:
    with script(RAY) as address:
        with script(GATEWAY, str(tmp_path), json.dumps(settings), address) as url, user(url, tmp_path) as http:
            config = {"kind": "rl", "base_model": "fine", "environment": {"name": "waits"}}
            path = f"/v1/jobs/{http.post('/v1/jobs', json={'config': config}).json()['id']}"
        assert StateDir(tmp_path / "state").running() is None
        with script(GATEWAY, str(tmp_path), json.dumps(settings), address) as url, user(url, tmp_path) as http:
            job = http.get(path).json()
            while job["state"] in ("QUEUED", "STARTING"):
                job = http.get(path, params={"state": job["state"], "wait_s": 10}).json()
            assert job["state"] == "RUNNING"
            assert http.post(f"{path}/cancel").json()["state"] == "CANCELLED"


@contextmanager
def user(url: str, folder: Path) -> Iterator[httpx.Client]:
    key = (folder / "state" / "api_key").read_text()
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30.0) as http:
        yield http
