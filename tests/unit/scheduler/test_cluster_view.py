"""Who uses what: all of it for administrators, and for others no more than owners and amounts of what is not theirs."""

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from opentinker.scheduler import views
from opentinker.scheduler.api import create_app
from opentinker.scheduler.gpus import GpuUse, read_gpu_use
from opentinker.scheduler.placement import Node


@pytest.fixture
async def http(world: Any) -> Any:
    key = {"Authorization": f"Bearer {(world.settings.state_dir / 'api_key').read_text()}"}
    transport = httpx.ASGITransport(create_app(world.service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler", headers=key) as client:
        yield client


async def test_the_view_tells_who_holds_what_and_who_waits(world: Any) -> None:
    mine = await world.reach(await world.interactive(), "RUNNING")
    theirs = await world.interactive(owner="ann")
    await world.until(lambda: world.service._reconciler.waiting_for(world.store.job(theirs["id"])) != "its turn")
    seen = await world.service.cluster("*")
    (held,) = seen["nodes"][0]["held"]
    assert (held["job"], held["owner"], held["cpu_slots"], held["state"]) == (mine["id"], "admin", 1, "RUNNING")
    (waiting,) = seen["queue"]
    assert (waiting["job"], waiting["owner"]) == (theirs["id"], "ann")
    assert "no CPU slot is free" in waiting["waiting_for"]
    assert (seen["queued"], seen["running"]) == (1, 1)
    as_ann = await world.service.cluster("ann")
    assert (as_ann["nodes"][0]["held"][0]["job"], as_ann["nodes"][0]["held"][0]["owner"]) == (None, "admin")
    assert as_ann["queue"][0]["job"] == theirs["id"]
    assert mine["id"] not in str(as_ann["nodes"])


async def test_answers_are_what_the_schema_says(world: Any, http: httpx.AsyncClient) -> None:
    world.launcher.cluster = [Node("n1", "here", gpus=1, cpu_slots=1)]
    world.launcher.use = {"n1": [GpuUse(0, "H200", 0.5, 2**30, 2**37)]}
    job = await world.reach(await world.interactive(), "RUNNING")
    await world.interactive()
    path = f"/v1/jobs/{job['id']}"
    for route, model in [
        (path, views.JobView),
        ("/v1/jobs", views.JobPage),
        (f"{path}/events", views.Events),
        (f"{path}/logs", views.Logs),
        (f"{path}/metrics", views.MetricRows),
        ("/v1/cluster", views.ClusterView),
    ]:
        answer = (await http.get(route)).json()
        model.model_validate(answer)
    views.Problem.model_validate((await http.get("/v1/jobs/job-none")).json())
    schema = (await http.get("/v1/openapi.json")).json()
    assert schema["paths"]["/v1/jobs"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "JobPage"
    )
    assert set(schema["paths"]["/v1/jobs/{job_id}/server/{path}"]) == {"get", "post", "delete"}


async def test_prometheus_can_scrape_with_a_key_only(world: Any, http: httpx.AsyncClient) -> None:
    world.launcher.cluster = [Node("n1", "here", gpus=2, cpu_slots=1), Node("n2", "here", gpus=0, cpu_slots=1)]
    world.launcher.use = {"n1": [GpuUse(0, "H200", 0.5, 2**30, 2**37), GpuUse(1, "H200", 0.0, 0, 2**37)]}
    job = await world.reach(await world.interactive(), "RUNNING")
    lost = await world.reach(await world.interactive(), "RUNNING")
    world.launcher.faults[lost["id"]] = "killed"
    await world.reach(lost, "FAILED")
    await http.get(f"/v1/jobs/{job['id']}")
    await http.get(f"/v1/jobs/{job['id']}", params={"state": "RUNNING", "wait_s": 0.01})
    world.clock.now += 1000.0  # no heartbeat
    await world.reach(job, "CANCELLED")
    assert (await http.get("/metrics", headers={"Authorization": "Bearer wrong"})).status_code == 401
    assert (await http.get("/v1/nowhere")).status_code == 404
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples = {
        (s.name, *sorted(v for k, v in s.labels.items() if k != "node")): s.value
        for family in text_string_to_metric_families(answer.text)
        for s in family.samples
    }
    assert samples["opentinker_jobs", "FAILED"] == 1
    assert samples["opentinker_jobs", "CANCELLED"] == 1
    assert samples["opentinker_jobs", "QUEUED"] == 0
    assert samples["opentinker_gpus", "n1"] == 2
    assert samples["opentinker_gpu_busy_ratio", "0", "n1"] == 0.5
    assert samples["opentinker_queue_wait_seconds_count",] == 2
    assert samples["opentinker_server_start_seconds_count",] == 2
    assert samples["opentinker_server_failures_total",] == 1
    assert samples["opentinker_lease_expiries_total",] == 1
    assert samples["opentinker_placement_pass_seconds_count",] > 0
    assert samples["opentinker_api_requests_total", "/v1/jobs/{job_id}", "200", "GET"] == 2
    assert samples["opentinker_api_latency_seconds_count", "/v1/jobs/{job_id}", "GET"] == 1, "long polls are left out"
    assert samples["opentinker_api_requests_total", "401", "GET", "refused"] == 1
    assert samples["opentinker_api_requests_total", "404", "GET", "unmatched"] == 1
    assert job["id"] not in answer.text


class Nvml:
    """What `pynvml` does, for two GPUs that this machine does not have."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        def call(argument: Any = None) -> Any:
            if name == self.broken:
                raise self.NVMLError
            match name:
                case "nvmlInit" | "nvmlShutdown":
                    self.open += 1 if name == "nvmlInit" else -1
                case "nvmlDeviceGetCount":
                    return 2
                case "nvmlDeviceGetHandleByIndex":
                    return argument
                case "nvmlDeviceGetName":
                    return b"H200"
                case "nvmlDeviceGetUtilizationRates":
                    return type("Rates", (), {"gpu": 50 * argument})
                case "nvmlDeviceGetMemoryInfo":
                    return type("Memory", (), {"used": 1, "total": 2})

        return call


def test_nvml_is_read_and_closed() -> None:
    nvml = Nvml()
    assert read_gpu_use(nvml) == [GpuUse(0, "H200", 0.0, 1, 2), GpuUse(1, "H200", 0.5, 1, 2)]
    assert nvml.open == 0


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetUtilizationRates"])
def test_where_nvml_fails_nothing_is_told(broken: str) -> None:
    assert read_gpu_use(Nvml(broken)) == []
