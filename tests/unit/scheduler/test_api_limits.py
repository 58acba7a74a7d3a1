"""What one caller can do to others, and what the API tells before it knows who asks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from opentinker.errors import RateLimitedError, StorageError, UnavailableError
from opentinker.scheduler import api
from opentinker.scheduler.api import create_app
from opentinker.scheduler.health import Health
from opentinker.scheduler.limits import PER_ADDRESS_BURST
from opentinker.scheduler.waits import Waits


@pytest.fixture
async def http(world: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(world.service), raise_app_exceptions=False, client=("198.51.100.9", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as client:
        yield client


@pytest.fixture
def key(world: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {(world.settings.state_dir / 'api_key').read_text()}"}


async def add_user(http: httpx.AsyncClient, admin: dict[str, str], name: str) -> dict[str, str]:
    answer = await http.post("/v1/users", json={"name": name}, headers=admin)
    return {"Authorization": f"Bearer {answer.json()['key']['key']}"}


def test_places_are_counted_for_each_and_for_all_and_given_back() -> None:
    waits = Waits("polls", 2, 3)
    with waits.held("ann"), waits.held("ann"):
        with pytest.raises(RateLimitedError, match="2 polls"), waits.held("ann"):
            pass
        with (
            waits.held("bob"),
            pytest.raises(RateLimitedError, match="busy") as caught,
            waits.held("eve"),
        ):
            pass
        assert caught.value.retry_after_s > 0
    with pytest.raises(ZeroDivisionError), waits.held("ann"):
        raise ZeroDivisionError
    assert waits._held.total() == 0
    assert not waits._held


async def test_who_polls_too_much_is_told_to_wait_and_beats_and_others_are_not(
    http: httpx.AsyncClient, key: dict[str, str], world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.MAX_POLLS + api.MAX_ENDS < 1000  # the actor's MAX_CALLS, which cannot be imported without Ray
    ann, bob = await add_user(http, key, "ann"), await add_user(http, key, "bob")
    body = {"config": {"kind": "interactive", "base_model": "m"}}
    job = (await http.post("/v1/jobs", json=body, headers=ann)).json()
    job = await world.reach(job, "RUNNING", owner="ann")
    theirs = (await http.post("/v1/jobs", json=body, headers=bob)).json()
    path = f"/v1/jobs/{job['id']}"
    waiting = {"state": "RUNNING", "wait_s": 30}
    polls = [asyncio.create_task(http.get(path, params=waiting, headers=ann)) for _ in range(api.MAX_POLLS_EACH)]
    await world.settle()
    refused = await http.get(path, params=waiting, headers=ann)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await http.get(path, headers=ann)).status_code == 200  # looking is no waiting
    assert (await http.post(f"{path}/heartbeat", headers=ann)).status_code == 200
    others = await http.get(f"/v1/jobs/{theirs['id']}", params={"state": "QUEUED", "wait_s": 0.1}, headers=bob)
    assert others.status_code == 200
    assert (await http.post(f"{path}/complete", headers=ann)).json()["state"] == "COMPLETED"
    assert [answer.json()["state"] for answer in await asyncio.gather(*polls)] == ["COMPLETED"] * api.MAX_POLLS_EACH
    assert (await http.get(path, params={**waiting, "state": "FAILED"}, headers=ann)).status_code == 200


@pytest.mark.parametrize("end", ["cancel", "stop"])
async def test_who_ends_too_many_jobs_at_once_is_told_to_wait(
    world: Any, key: dict[str, str], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(api, "MAX_ENDS_EACH", 1)
    transport = httpx.ASGITransport(create_app(world.service))
    job = await world.reach(await world.interactive(), "RUNNING")
    world.launcher.unkillable = "a process does not die"
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler", headers=key) as http:
        path = f"/v1/jobs/{job['id']}/{end}"
        first = asyncio.create_task(http.post(path))
        await world.reach(job, "CANCELLED")
        refused = await http.post(path)
        assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
        world.launcher.unkillable = ""
        assert (await first).json()["state"] == "CANCELLED"
        assert (await http.post(path)).status_code == 200


async def test_health_asks_the_scheduler_and_not_more_than_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def ping() -> None:
        nonlocal asked
        asked += 1

    async def failing() -> None:
        raise UnavailableError("the actor died: my-secret")

    async def hanging() -> None:
        await asyncio.sleep(60.0)

    monkeypatch.setattr("opentinker.scheduler.health.ANSWER_S", 0.05)
    health = Health(ping)
    await asyncio.gather(*(health.check() for _ in range(100)))
    assert asked == 1
    for bad in (failing, hanging):
        health = Health(bad)
        for _ in range(2):
            with pytest.raises(UnavailableError) as caught:
                await health.check()
        assert "my-secret" not in str(caught.value)


async def test_health_is_a_problem_when_the_scheduler_does_not_answer(
    http: httpx.AsyncClient, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise UnavailableError("my-secret")

    monkeypatch.setattr(world.service, "ping", broken)
    transport = httpx.ASGITransport(create_app(world.service))
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as client:
        answer = await client.get("/health")
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert "my-secret" not in answer.text


@pytest.mark.parametrize("kind", [UnavailableError, StorageError])
async def test_before_a_key_is_known_a_broken_store_tells_nothing_of_itself(
    http: httpx.AsyncClient, key: dict[str, str], world: Any, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")

    def broken(*_: Any) -> None:
        raise kind("connection to 10.1.2.3 failed: my-secret")

    monkeypatch.setattr(world.store, "api_key_by_digest", broken)
    for headers in (key, {"Authorization": "Bearer ot-wrong"}):
        answer = await http.get("/v1/jobs", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (kind.status, kind.code)
        assert "my-secret" not in answer.text
        assert "10.1.2.3" not in answer.text
    monkeypatch.undo()
    monkeypatch.setattr(world.store, "job", broken)
    answer = await http.get(f"/v1/jobs/{job['id']}/server/v1/info", headers={"Authorization": "Bearer otp-guess"})
    monkeypatch.undo()
    assert answer.status_code == kind.status
    assert "my-secret" not in answer.text


async def test_wrong_policy_tokens_are_guesses_too(http: httpx.AsyncClient, key: dict[str, str], world: Any) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")
    token = (await http.get(f"/v1/jobs/{job['id']}", headers=key)).json()["server"]["token"]
    path = f"/v1/jobs/{job['id']}/server/v1/info"
    right = {"Authorization": f"Bearer {token}"}
    assert (await http.get(path, headers=right)).status_code == 503  # the stand-in has no server
    guesses = [await http.get(path, headers={"Authorization": f"Bearer otp-{n}"}) for n in range(int(PER_ADDRESS_BURST) + 1)]
    assert [guess.status_code for guess in guesses] == [401] * int(PER_ADDRESS_BURST) + [429]
    assert int(guesses[-1].headers["Retry-After"]) >= 1
    assert (await http.get("/v1/jobs", headers={"Authorization": "Bearer ot-guess"})).status_code == 429  # of the same purse
    assert (await http.get(path, headers=right)).status_code == 503  # it got in before
    events = (await http.get("/v1/audit", headers=key)).json()["events"]
    assert ("login", "198.51.100.9", "denied") in [(e["action"], e["address"], e["outcome"]) for e in events]
