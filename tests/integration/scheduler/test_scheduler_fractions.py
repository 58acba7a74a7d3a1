"""Fractions of a GPU, queueing and time limits on a real Ray cluster with two simulated GPUs."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cluster(run_marker: str, settings: dict[str, Any]) -> Iterator[Any]:
    from opentinker.scheduler.cluster import EmbeddedCluster

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        options = {**settings, "lease_s": 60.0}
        with EmbeddedCluster.start(path / "state", path / "runs", port=0, cpu_slots=2, gpus=2, settings=options) as running:
            yield running


def submit(api: Any, gpus: float, **scheduling: Any) -> dict[str, Any]:
    config = {"kind": "interactive", "base_model": "fine", "resources": {"gpus": gpus}, "scheduling": scheduling}
    return api.post("/v1/jobs", {"config": config})  # type: ignore[no-any-return]


def free_gpus(api: Any) -> float:
    return sum(node["free_gpus"] for node in api.get("/v1/cluster")["nodes"])


def until_free(api: Any, gpus: float) -> None:
    deadline = time.monotonic() + 60.0
    while free_gpus(api) != gpus:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_fractions_share_one_gpu_and_leave_the_other_whole(api: Any) -> None:
    halves = [
        api.wait(submit(api, 0.5), "RUNNING"),
        api.wait(submit(api, 0.25), "RUNNING"),
        api.wait(submit(api, 0.25), "RUNNING"),
    ]
    whole = api.wait(submit(api, 1), "RUNNING")
    assert free_gpus(api) == 0.0
    late = submit(api, 1)
    late = api.get(f"/v1/jobs/{late['id']}", state="QUEUED", wait_s=1)
    assert late["waiting_for"].startswith("needs 1 GPU; no GPU is free; after job-")
    for job in (*halves, whole):
        api.post(f"/v1/jobs/{job['id']}/cancel")
    api.wait(late, "RUNNING")
    api.post(f"/v1/jobs/{late['id']}/complete")
    until_free(api, 2.0)


def test_what_is_left_of_two_gpus_is_not_taken_for_one(api: Any) -> None:
    """Both GPUs are half used: together a whole one is free, but no job can have it."""
    jobs = [api.wait(submit(api, 0.5), "RUNNING") for _ in range(4)]
    api.post(f"/v1/jobs/{jobs[0]['id']}/complete")
    api.post(f"/v1/jobs/{jobs[3]['id']}/complete")
    until_free(api, 1.0)
    whole = submit(api, 1)
    time.sleep(1.0)
    whole = api.get(f"/v1/jobs/{whole['id']}")
    assert (whole["state"], whole["waiting_for"].split(";")[1]) == ("QUEUED", " no GPU is free")
    api.post(f"/v1/jobs/{jobs[1]['id']}/complete")
    api.wait(whole, "RUNNING")


def test_a_time_limit_ends_a_job_that_runs_and_lets_the_next_one_in(api: Any) -> None:
    first = api.wait(submit(api, 2, time_limit_s=20.0), "RUNNING")
    second = submit(api, 2)
    second = api.get(f"/v1/jobs/{second['id']}", state="QUEUED", wait_s=1)
    assert f"estimated after {first['id']} (in " in second["waiting_for"]
    first = api.wait(first, "FAILED", timeout_s=60.0)
    assert first["cause"].startswith("reached its time limit of 20 s")
    api.wait(second, "RUNNING")
