"""Every route that there is, with every kind of key that there is. A new route has to be put into a class here."""

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from opentinker.scheduler.api import OPEN_PATHS, create_app

CHANGING = {("POST", "/v1/jobs")}
"""Need `submit`. So do all that change a job, which have its id in their path."""
READING = {("GET", "/v1/jobs"), ("GET", "/v1/cluster"), ("GET", "/v1/models"), ("GET", "/v1/openapi.json"), ("GET", "/metrics")}
"""Any valid key; they answer with what is the caller's."""
OWN_SECRETS = re.compile(r"/v1/secrets(/.*)?")
"""Need `submit`, and are about the caller's own, whoever calls."""
ADMINISTRATION = re.compile(r"/v1/(users|audit)(/.*)?")
"""Need `admin`, before anything else is looked at."""
OWN = "{job_id}"
"""Belongs to a job's owner and to administrators; for everybody else there is no such job."""
SUBMISSION = {"config": {"kind": "interactive", "base_model": "m"}}


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """(method, path template) of the OpenAPI schema's routes, and of those that it does not show."""
    found = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    for route in app.routes:
        if isinstance(route, Route) or hasattr(route, "methods"):
            found |= {(method, route.path) for method in (route.methods or ()) if method != "HEAD"}
    return iter(sorted(found))


def fill(path: str, job_id: str) -> str:
    """A path with the job's id, and with something in its other holes."""
    return re.sub(r"\{[^}]*\}", "x", path.replace(OWN, job_id))


class People:
    """Keys of a user who owns a job, of one who may only read, of a stranger, and keys that are worth nothing."""

    def __init__(self, http: httpx.AsyncClient, admin: str) -> None:
        self.http = http
        self.keys = {"admin": admin}

    async def call(self, who: str | None, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {} if who is None else {"Authorization": f"Bearer {self.keys[who]}"}
        return await self.http.request(method, path, headers=headers, json=body)

    async def add(self, who: str, *scopes: str) -> str:
        """The id of the new user's key."""
        answer = await self.call("admin", "POST", "/v1/users", {"name": who, "scopes": scopes or ["submit"]})
        assert answer.status_code == 201, answer.text
        self.keys[who] = answer.json()["key"]["key"]
        return str(answer.json()["key"]["id"])


@pytest.fixture
def app(world: Any) -> FastAPI:
    return create_app(world.service)


@pytest.fixture
async def people(world: Any, app: FastAPI) -> AsyncIterator[People]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as http:
        people = People(http, (world.settings.state_dir / "api_key").read_text())
        for who in ("ann", "bob"):
            await people.add(who)
        await people.add("reader", "read")
        yield people


async def submitted(people: People, who: str) -> str:
    answer = await people.call(who, "POST", "/v1/jobs", SUBMISSION)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def test_every_route_is_of_a_known_kind(app: FastAPI) -> None:
    unknown = [
        (method, path)
        for method, path in routes_of(app)
        if (method, path) not in CHANGING | READING
        and path not in OPEN_PATHS
        and OWN not in path
        and not ADMINISTRATION.fullmatch(path)
        and not OWN_SECRETS.fullmatch(path)
    ]
    assert unknown == [], "decide who may use it, and put it into a class at the top of this file"


async def test_no_route_answers_without_a_valid_key(app: FastAPI, people: People, world: Any) -> None:
    job_id = await submitted(people, "ann")
    key_id = await people.add("gone")
    await people.add("off")
    await people.call("admin", "POST", f"/v1/users/gone/keys/{key_id}/revoke")
    await people.call("admin", "PATCH", "/v1/users/off", {"disabled": True})
    people.keys["wrong"] = "ot-wrong"
    answers = set()
    for method, path in routes_of(app):
        if path in OPEN_PATHS:
            continue
        for who in (None, "wrong", "gone", "off"):
            world.clock.now += 60.0  # not too fast to be told why
            answer = await people.call(who, method, fill(path, job_id))
            assert answer.status_code == 401, (method, path, who)
            answers.add(answer.text)
    assert len(answers) == 1


async def test_a_strangers_job_does_not_exist_on_any_route(app: FastAPI, people: People) -> None:
    job_id = await submitted(people, "ann")
    theirs = [(method, path) for method, path in routes_of(app) if OWN in path]
    assert len(theirs) >= 7
    for method, path in theirs:
        for who in ("bob", "reader"):
            answer = await people.call(who, method, fill(path, job_id))
            nobodys = await people.call(who, method, fill(path, "job-0000000000"))
            assert answer.status_code == nobodys.status_code == 404, (method, path, who)
            assert answer.text.replace(job_id, "") == nobodys.text.replace("job-0000000000", "")
    assert (await people.call("ann", "GET", f"/v1/jobs/{job_id}")).json()["cause"] == ""
    for who in ("bob", "reader"):
        assert (await people.call(who, "GET", "/v1/jobs")).json()["jobs"] == []


async def test_administration_is_for_administrators(app: FastAPI, people: People) -> None:
    routes = [(method, path) for method, path in routes_of(app) if ADMINISTRATION.fullmatch(path)]
    assert len(routes) >= 8
    for method, path in routes:
        for who in ("ann", "reader"):
            body = {"name": "eve", "scopes": ["admin"]} if method in ("POST", "PATCH") else None
            path = path.replace("{name}", who)
            answer = await people.call(who, method, fill(path, ""), body if path.endswith(("users", "keys")) else {})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), (method, path, who)
            assert "'admin'" in answer.json()["detail"]
    names = [user["name"] for user in (await people.call("admin", "GET", "/v1/users")).json()["users"]]
    assert names == ["admin", "ann", "bob", "reader"]


async def test_who_may_only_read_changes_nothing_of_their_own(app: FastAPI, people: People) -> None:
    job_id = await submitted(people, "ann")
    answer = await people.call("admin", "POST", "/v1/users/ann/keys", {"name": "dashboard", "scopes": ["read"]})
    people.keys["viewer"] = answer.json()["key"]
    changing = [(method, path) for method, path in routes_of(app) if OWN in path and method != "GET"]
    secrets = [(method, path) for method, path in routes_of(app) if OWN_SECRETS.fullmatch(path)]
    assert len(secrets) == 3
    for method, path in secrets:
        answer = await people.call("viewer", method, fill(path, ""), {"value": "v"} if method == "PUT" else None)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), (method, path)
    for method, path in [*changing, *CHANGING]:
        answer = await people.call("viewer", method, fill(path, job_id), SUBMISSION if "{" not in path else None)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), (method, path)
        assert "'submit'" in answer.json()["detail"]
    assert [job["id"] for job in (await people.call("viewer", "GET", "/v1/jobs")).json()["jobs"]] == [job_id]
    assert (await people.call("viewer", "GET", f"/v1/jobs/{job_id}")).status_code == 200
    assert (await people.call("viewer", "GET", "/v1/cluster")).status_code == 200


async def test_a_secret_is_its_owners_alone_even_by_the_same_name(people: People) -> None:
    for who, value in (("ann", "anns-value"), ("admin", "the-admins-value")):
        assert (await people.call(who, "PUT", "/v1/secrets/openai", {"value": value})).status_code == 200
    for who, there in (("ann", ["openai"]), ("bob", []), ("admin", ["openai"])):
        answer = await people.call(who, "GET", "/v1/secrets")
        assert [secret["name"] for secret in answer.json()["secrets"]] == there
        assert "value" not in answer.text
    for who in ("bob", "reader"):
        assert (await people.call(who, "DELETE", "/v1/secrets/openai")).status_code in (403, 404)
    assert (await people.call("admin", "DELETE", "/v1/secrets/openai")).status_code == 204
    assert len((await people.call("ann", "GET", "/v1/secrets")).json()["secrets"]) == 1
    events = (await people.call("admin", "GET", "/v1/audit")).json()["events"]
    done = [(event["actor"], event["action"], event["target"]) for event in events if event["action"].startswith("secret")]
    assert done == [
        ("admin", "secret.remove", "admin/openai"),
        ("admin", "secret.set", "admin/openai"),
        ("ann", "secret.set", "ann/openai"),
    ]


async def test_an_administrator_sees_and_cancels_everybodys_jobs_and_leaves_a_trace(people: People) -> None:
    ann, bob = await submitted(people, "ann"), await submitted(people, "bob")
    mine = await submitted(people, "admin")

    async def listed(who: str, query: str = "") -> list[str]:
        answer = await people.call(who, "GET", f"/v1/jobs{query}")
        return [job["id"] for job in answer.json()["jobs"]]

    assert await listed("admin") == [mine]
    assert await listed("admin", "?owner=ann") == [ann]
    assert await listed("admin", "?owner=*") == [mine, bob, ann]
    assert await listed("admin", "?owner=' OR ''='") == []
    assert await listed("ann", "?owner=ann") == [ann]
    for query in ("?owner=bob", "?owner=*", "?owner=' OR 1=1"):
        assert (await people.call("ann", "GET", f"/v1/jobs{query}")).status_code == 403
    answer = await people.call("admin", "POST", f"/v1/jobs/{ann}/cancel")
    assert (answer.json()["state"], answer.json()["cause"]) == ("CANCELLED", "cancelled by admin")
    answer = await people.call("bob", "POST", f"/v1/jobs/{bob}/cancel")
    assert answer.json()["cause"] == "cancelled by its owner"
    audit = (await people.call("admin", "GET", "/v1/audit?limit=1")).json()["events"]
    assert [(e["actor"], e["action"], e["target"], e["outcome"]) for e in audit] == [
        ("admin", "job.cancel", f"ann/{ann}", "ok")
    ]


async def test_a_policys_token_is_for_its_owners_keys_that_may_submit(people: People) -> None:
    job_id = await submitted(people, "ann")
    answer = await people.call("admin", "POST", "/v1/users/ann/keys", {"name": "dashboard", "scopes": ["read"]})
    people.keys["viewer"] = answer.json()["key"]
    job: dict[str, Any] = {"state": "QUEUED"}
    while job["state"] != "RUNNING":
        job = (await people.call("ann", "GET", f"/v1/jobs/{job_id}?state={job['state']}&wait_s=5")).json()
    token = job["server"]["token"]
    for who in ("viewer", "admin"):
        answer = await people.call(who, "GET", f"/v1/jobs/{job_id}")
        assert answer.json()["server"]["endpoint"]
        assert token not in answer.text
    assert "token" in (await people.call("ann", "POST", f"/v1/jobs/{job_id}/heartbeat")).json()["server"]
    assert "token" not in (await people.call("admin", "POST", f"/v1/jobs/{job_id}/heartbeat")).json()["server"]


async def test_two_users_may_use_the_same_idempotency_key(people: People) -> None:
    body = {**SUBMISSION, "idempotency_key": "k"}
    first = [(await people.call(who, "POST", "/v1/jobs", body)).json()["id"] for who in ("ann", "bob")]
    again = [(await people.call(who, "POST", "/v1/jobs", body)).json()["id"] for who in ("ann", "bob")]
    assert first == again
    assert len(set(first)) == 2


@pytest.mark.parametrize("evil", ["Robert'); DROP TABLE jobs;--", "' OR '1'='1", "%", "../../etc/passwd"])
async def test_sql_in_names_is_a_name(people: People, evil: str) -> None:
    body = {"config": {**SUBMISSION["config"], "name": evil}, "idempotency_key": evil}
    job = (await people.call("ann", "POST", "/v1/jobs", body)).json()
    assert job["name"] == evil
    assert (await people.call("ann", "POST", "/v1/jobs", body)).json()["id"] == job["id"]
    assert (await people.call("bob", "GET", "/v1/jobs/" + evil.replace("/", "%2F").replace("%", "%25"))).status_code == 404
    answer = await people.call("admin", "POST", "/v1/users", {"name": evil})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    people.keys["evil"] = evil
    assert (await people.call("evil", "GET", "/v1/jobs")).status_code == 401
    assert len((await people.call("admin", "GET", "/v1/jobs?owner=*")).json()["jobs"]) == 1


async def test_a_large_config_is_refused_and_a_long_body_not_read(people: People) -> None:
    answer = await people.call("ann", "POST", "/v1/jobs", {"config": {"kind": "interactive", "base_model": "m" * 2**20}})
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    assert answer.json()["detail"] == "the config has 1024 KiB, more than 256 KiB"
    answer = await people.call("admin", "POST", "/v1/users", {"name": "x" * 100_000})
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    answer = await people.http.post(
        "/v1/jobs",
        content=b'{"config": {"kind": "interactive", "base_model": "\\ud800"}}',
        headers={"Authorization": f"Bearer {people.keys['ann']}"},
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert (await people.call("admin", "GET", "/v1/jobs?owner=*")).json()["jobs"] == []


async def test_only_its_owner_and_administrators_start_from_a_jobs_checkpoint(world: Any, people: People) -> None:
    job_id = await submitted(people, "ann")
    folder = world.settings.runs_dir / "ann" / job_id / "checkpoints" / "final@1"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"kind": "full", "model_type": "llama", "step": 1, "created_at": 1.0}')
    (folder / "manifest.json").write_text('{"files": {}}')

    async def start(who: str, source: str) -> httpx.Response:
        config = {**SUBMISSION["config"], "start_from": f"{source}/final"}
        return await people.call(who, "POST", "/v1/jobs", {"config": config})

    strangers, nobodys = await start("bob", job_id), await start("bob", "job-0000000000")
    assert strangers.status_code == nobodys.status_code == 404
    assert strangers.text.replace(job_id, "") == nobodys.text.replace("job-0000000000", "")
    for who in ("ann", "admin"):
        answer = await start(who, job_id)
        assert answer.status_code == 201, answer.text
        assert answer.json()["config"]["start_from"] == f"ann/{job_id}/final@1"
