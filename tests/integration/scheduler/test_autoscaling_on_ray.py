"""Ray's real autoscaler adds a node for a job that waits, and takes it away after it; nodes are raylets of this machine."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray._private import services

from opentinker.scheduler.processes import reap_with

HEAD_ID = "f" * 51 + "00000"
STORE_BYTES = 100 * 2**20
GATEWAY = """if True:
    import json, sys
    from pathlib import Path
    from opentinker.scheduler.cluster import EmbeddedCluster
    folder, settings, address = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    with EmbeddedCluster.start(folder / "state", folder / "runs", port=0, ray_address=address, settings=settings) as cluster:
        print(cluster.url, flush=True)
        sys.stdin.read()
"""


def autoscaling_config(address: str) -> dict[str, Any]:
    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "growing",
        "max_workers": 1,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "fake_multinode",
            "head_node_id": HEAD_ID,
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in lists},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "two-gpus": {
                "resources": {"CPU": 1, "GPU": 2, "object_store_memory": STORE_BYTES},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 1,
            },
        },
    }


@pytest.fixture
def growing(run_marker: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(address, variables of its environment) of a Ray cluster without GPUs, to which a node with two can be added."""
    marker = f"growing-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"{services.get_node_ip_address()}:{port}"
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}
    of_head = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "OPENTINKER_RUN": marker,
    }
    with tempfile.TemporaryDirectory(prefix="ot-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        config = Path(folder, "autoscaling.json")
        config.write_text(json.dumps(autoscaling_config(address)))
        options = [f"--port={port}", "--num-cpus=1", "--num-gpus=0", "--include-dashboard=false", f"--temp-dir={folder}"]
        process = subprocess.Popen(
            [
                sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options,
                f"--object-store-memory={STORE_BYTES}", f"--autoscaling-config={config}",
            ],
            env={**environment, **of_head},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "block forever" in line:
                    break
            else:
                pytest.fail("".join(lines))
            yield address, environment
        finally:
            process.kill()  # asked to stop, it would wait half a minute for jobs that are not there
            process.communicate(timeout=30.0)
            assert reap_with("OPENTINKER_RUN", marker, 0.0, 10.0) == []


def test_a_node_is_added_for_a_job_that_no_present_node_could_hold_and_goes_after_it(
    tmp_path: Path, settings: dict[str, Any], growing: tuple[str, dict[str, str]]
) -> None:
    address, environment = growing
    options = {**settings, "lease_s": 60.0, "autoscale": True, "node_types": [{"gpus": 2, "max": 1}]}
    process = subprocess.Popen(
        [sys.executable, "-c", GATEWAY, str(tmp_path), json.dumps(options), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    key = (tmp_path / "state" / "api_key").read_text()
    with process, httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60.0) as http:
        try:
            config = {"kind": "interactive", "base_model": "fine", "resources": {"gpus": 3}}
            refused = http.post("/v1/jobs", json={"config": config}).json()
            assert "the largest node of this cluster has 2 GPUs" in refused["detail"]
            job = http.post("/v1/jobs", json={"config": {**config, "resources": {"gpus": 2}}}).json()
            path, words = f"/v1/jobs/{job['id']}", ""
            deadline = time.monotonic() + 180.0
            while job["state"] in ("QUEUED", "STARTING"):
                assert time.monotonic() < deadline, job["waiting_for"]
                words = max(words, job["waiting_for"] if "node" in job["waiting_for"] else "")
                job = http.get(path, params={"state": job["state"], "wait_s": 0.5}).json()
            assert words == "needs 2 GPUs on one node; waits for a node to be added"
            assert (job["state"], job["cause"]) == ("RUNNING", "")
            assert http.post(f"{path}/complete").json()["state"] == "COMPLETED"
            while len(nodes := http.get("/v1/cluster").json()["nodes"]) > 1:
                assert time.monotonic() < deadline, nodes
                time.sleep(0.2)
        finally:
            process.communicate("", timeout=120.0)
