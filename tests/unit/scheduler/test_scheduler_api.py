"""The HTTP API over a real service."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from opentinker.scheduler import api
from opentinker.scheduler.api import create_app

ROUTES = [
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs"),
    ("GET", "/v1/jobs/job-1"),
    ("GET", "/v1/jobs/job-1/events"),
    ("POST", "/v1/jobs/job-1/heartbeat"),
    ("POST", "/v1/jobs/job-1/complete"),
    ("POST", "/v1/jobs/job-1/cancel"),
    ("GET", "/v1/jobs/job-1/logs"),
    ("GET", "/v1/jobs/job-1/metrics"),
    ("GET", "/v1/cluster"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/no/such/route"),
]


@pytest.fixture
async def http(world: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(world.service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as client:
        yield client


@pytest.fixture
def key(world: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {(world.settings.state_dir / 'api_key').read_text()}"}


async def test_health_alone_is_open(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_a_valid_key_every_route_answers_the_same(http: httpx.AsyncClient, method: str, path: str) -> None:
    bodies = set()
    for header in (None, "Bearer", "Bearer ot-wrong", "Basic b3Q6b3Q=", "Bearer \xff"):
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        response = await http.request(method, path, headers=headers, content=b"{not json")
        assert response.status_code == 401
        assert response.headers["content-type"] == "application/problem+json"
        assert response.headers["www-authenticate"] == "Bearer"
        bodies.add(response.text)
    (body,) = bodies
    assert "wrong" not in body
    assert "job-1" not in body


async def test_a_job_travels_through_the_routes(http: httpx.AsyncClient, key: dict[str, str], world: Any) -> None:
    body = {"config": {"kind": "interactive", "base_model": "m"}, "idempotency_key": "k"}
    created = await http.post("/v1/jobs", json=body, headers=key)
    assert created.status_code == 201
    job = created.json()
    assert (await http.post("/v1/jobs", json=body, headers=key)).json()["id"] == job["id"]
    path = f"/v1/jobs/{job['id']}"
    while job["state"] != "RUNNING":
        job = (await http.get(path, params={"state": job["state"], "wait_s": 5}, headers=key)).json()
    assert (await http.post(f"{path}/heartbeat", headers=key)).json()["state"] == "RUNNING"
    assert [j["id"] for j in (await http.get("/v1/jobs", headers=key)).json()["jobs"]] == [job["id"]]
    assert (await http.get("/v1/cluster", headers=key)).json()["nodes"][0]["free_cpu_slots"] == 0
    assert (await http.get(f"{path}/logs", headers=key)).json() == {"text": "", "offset": 0, "finished": False}
    assert (await http.get(f"{path}/logs?source=server", headers=key)).json()["text"] == ""
    assert (await http.get(f"{path}/logs?source=else", headers=key)).json()["code"] == "invalid_request"
    assert (await http.get(f"{path}/metrics", headers=key)).json() == {"rows": [], "next": 0, "finished": False}
    assert (await http.post(f"{path}/complete", headers=key)).json()["state"] == "COMPLETED"
    assert (await http.get(f"{path}/logs", headers=key)).json()["finished"]
    assert (await http.get(f"{path}/events", headers=key)).json()["events"][0]["kind"] == "submitted"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "detail"),
    [
        ("POST", "/v1/jobs", {}, 400, "invalid_request", "body.config: Field required"),
        ("POST", "/v1/jobs", {"config": {}, "extra": 1}, 400, "invalid_request", "body.extra: Extra inputs"),
        ("POST", "/v1/jobs", {"config": {"kind": "rl"}}, 400, "invalid_config", "base_model: Field required"),
        ("GET", "/v1/jobs/job-1?wait_s=-1", None, 400, "invalid_request", "query.wait_s"),
        ("GET", "/v1/jobs/job-1", None, 404, "not_found", "no job 'job-1'"),
        ("GET", "/v1/nowhere", None, 404, "not_found", "no route /v1/nowhere"),
        ("DELETE", "/v1/jobs", None, 405, "invalid_request", "Method Not Allowed"),
    ],
)
async def test_every_error_is_a_problem_document(
    http: httpx.AsyncClient, key: dict[str, str], method: str, path: str, body: Any, status: int, code: str, detail: str
) -> None:
    response = await http.request(method, path, json=body, headers=key)
    problem = response.json()
    assert response.headers["content-type"] == "application/problem+json"
    assert (response.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert detail in problem["detail"]


async def test_a_validation_error_does_not_repeat_the_input(http: httpx.AsyncClient, key: dict[str, str]) -> None:
    response = await http.post("/v1/jobs", json={"config": "my-secret", "idempotency_key": 5}, headers=key)
    assert response.status_code == 400
    assert "my-secret" not in response.text


async def test_an_internal_error_tells_nothing(
    http: httpx.AsyncClient, key: dict[str, str], world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise RuntimeError("my-secret")

    monkeypatch.setattr(world.launcher, "nodes", broken)
    response = await http.get("/v1/cluster", headers=key)
    assert (response.status_code, response.json()["detail"]) == (500, "internal error")
    assert "my-secret" not in response.text


async def test_a_body_without_end_is_cut_off(
    http: httpx.AsyncClient, key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MAX_BODY_BYTES", 100)
    response = await http.post("/v1/jobs", json={"config": {"kind": "x" * 200}}, headers=key)
    assert (response.status_code, response.json()["code"]) == (413, "too_large")
