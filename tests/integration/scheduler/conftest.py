"""One embedded cluster with two CPU slots and stand-in servers, shared by the tests of this folder."""

import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent
LEASE_S = 8.0
SETTINGS: dict[str, Any] = {
    "worker_class": "scheduler_stand_ins:WorkerProcess",
    "front_class": "scheduler_stand_ins:FrontProcess",
    "drivers": {"rl": "scheduler_stand_ins:drive"},
    "check_model": "scheduler_stand_ins:check_model",
    "lease_s": LEASE_S,
    "reconcile_s": 0.2,
    "probe_s": 0.2,
    "graceful_stop_s": 1.0,
}


@pytest.fixture(scope="session")
def run_marker() -> Iterator[str]:
    """The value of a variable that every process of the test's cluster inherits; they find the stand-ins, too."""
    marker = f"test-{uuid.uuid4().hex}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENTINKER_RUN", marker)
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        yield marker


@pytest.fixture(scope="module")
def cluster(run_marker: str) -> Iterator[Any]:
    from opentinker.scheduler.cluster import EmbeddedCluster

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with EmbeddedCluster.start(path / "state", path / "runs", port=0, cpu_slots=2, settings=SETTINGS) as running:
            yield running


@pytest.fixture(scope="session")
def lease_s() -> float:
    return LEASE_S


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    return SETTINGS


class Api:
    """The scheduler's routes, as a user sees them."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=90.0)

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        response = self.http.get(path, params=params)
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def rl(self, environment: str = "returns", model: str = "fine", **body: Any) -> dict[str, Any]:
        config = {"kind": "rl", "base_model": model, "environment": {"name": environment}}
        return self.post("/v1/jobs", {"config": config, **body})

    def interactive(self, model: str = "fine") -> dict[str, Any]:
        return self.post("/v1/jobs", {"config": {"kind": "interactive", "base_model": model}})

    def wait(self, job: dict[str, Any], *states: str, timeout_s: float = 90.0, alive: bool = True) -> dict[str, Any]:
        """The job once it is in one of the states; meanwhile its lease is renewed, if `alive`."""
        deadline = time.monotonic() + timeout_s
        while job["state"] not in states:
            assert time.monotonic() < deadline, f"still {job['state']}: {job['waiting_for']}"
            job = self.get(f"/v1/jobs/{job['id']}", state=job["state"], wait_s=1)
            if alive and job["lease_s"] is not None:
                job = self.post(f"/v1/jobs/{job['id']}/heartbeat")
        return job

    @contextmanager
    def alive(self, *jobs: dict[str, Any]) -> Iterator[None]:
        """Renew the jobs' leases within, as their client's own thread would."""
        stop = threading.Event()

        def beat() -> None:
            with httpx.Client(base_url=self.http.base_url, headers=self.http.headers, timeout=5.0) as http:
                while not stop.wait(LEASE_S / 8):
                    for job in jobs:
                        with suppress(httpx.HTTPError):
                            http.post(f"/v1/jobs/{job['id']}/heartbeat")

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def free_slots(self) -> int:
        return sum(node["free_cpu_slots"] for node in self.get("/v1/cluster")["nodes"])

    def wait_free(self, slots: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.free_slots() != slots:
            assert time.monotonic() < deadline, f"{self.free_slots()} slots are free, not {slots}"
            time.sleep(0.05)


@pytest.fixture
def api(cluster: Any) -> Iterator[Api]:
    """A user of the cluster; whatever a test leaves running is cancelled."""
    user = Api(cluster.url, cluster.key_path.read_text())
    yield user
    for job in user.get("/v1/jobs")["jobs"]:
        if job["state"] in ("QUEUED", "STARTING", "RUNNING"):
            user.post(f"/v1/jobs/{job['id']}/cancel")
    user.wait_free(2)
    user.http.close()
