"""Secrets: sealed in the store, named by configs, and delivered to the driver of their owner's job alone."""

import json
import logging
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.errors import ConfigError, ConflictError, InvalidRequestError, NotFoundError
from opentinker.scheduler import vault
from opentinker.scheduler.api import create_app
from opentinker.scheduler.auth import new_server_secret
from opentinker.scheduler.records import Scope
from opentinker.scheduler.users import Caller
from opentinker.scheduler.vault import Vault, seal, unseal

KEY = bytes(range(32))
ADMIN = Caller("admin", frozenset({Scope.ADMIN}))
VALUE = "sk-tr0ub4dor-and-3"
CONFIG = {
    "kind": "rl",
    "base_model": "some-model",
    "environment": {"name": "arithmetic", "secrets": {"OPENAI_API_KEY": "openai"}},
}


@given(st.text(max_size=200), st.text(max_size=20), st.text(max_size=20))
def test_what_is_sealed_opens_for_its_owner_and_name_and_no_other(value: str, owner: str, name: str) -> None:
    sealed = seal(KEY, owner, name, value)
    assert unseal(KEY, owner, name, sealed) == value
    assert seal(KEY, owner, name, value) != sealed
    for key, whose, what in ((KEY, owner + "x", name), (KEY, owner, name + "x"), (bytes(32), owner, name)):
        with pytest.raises(ConfigError, match="cannot be opened"):
            unseal(key, whose, what, sealed)


@given(st.text(max_size=60))
def test_a_damaged_row_is_an_error_that_says_what_to_do(row: str) -> None:
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        unseal(KEY, "ann", "openai", "v1:" + row)
    assert "opentinker secrets set openai" in caught.value.hint


async def test_a_driver_gets_the_values_and_nothing_else_holds_them(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await world.service.vault.put(ADMIN, "openai", "an-earlier-value")
    await world.service.vault.put(ADMIN, "openai", VALUE)
    job = await world.reach(await world.service.submit("admin", CONFIG), "RUNNING")
    await world.until(lambda: job["id"] in world.launcher.drivers)
    spec = world.launcher.drivers[job["id"]]
    assert spec.secrets == {"OPENAI_API_KEY": ("openai", VALUE)}
    assert VALUE not in repr(spec)
    assert VALUE not in repr(world.store.secrets("admin"))
    shown = [await world.service.jobs("admin"), await world.service.job("admin", job["id"])]
    shown += [await world.service.events("admin", job["id"]), await world.service.vault.names("admin")]
    shown += [await world.service.users.audit(100)]
    assert VALUE not in json.dumps(shown)
    assert VALUE not in caplog.text
    files = [path for path in world.settings.state_dir.rglob("*") if path.is_file()]
    assert world.database in files
    assert not any(VALUE.encode() in path.read_bytes() for path in files)


async def test_a_submit_names_the_secrets_that_are_missing_and_how_to_set_them(world: Any) -> None:
    with pytest.raises(ConfigError, match="you have no secret 'openai'") as caught:
        await world.service.submit("admin", CONFIG)
    assert "`opentinker secrets set openai`" in caught.value.hint
    assert (await world.service.jobs("admin"))["jobs"] == []
    assert list((world.settings.state_dir / "runs").rglob("job-*")) == []


@pytest.mark.parametrize("what", ["removed", "swapped", "another server secret"])
async def test_a_secret_that_is_gone_or_does_not_open_fails_the_job_with_that(world: Any, what: str) -> None:
    await world.service.vault.put(ADMIN, "openai", VALUE)
    world.launcher.may_start.clear()
    job = await world.reach(await world.service.submit("admin", CONFIG), "STARTING")
    if what == "removed":
        await world.service.vault.remove(ADMIN, "openai")
    elif what == "swapped":
        await world.service.vault.put(ADMIN, "other", "another value")
        secrets = {secret.name: secret for secret in world.store.secrets("admin")}
        world.store.save(replace(secrets["openai"], sealed=secrets["other"].sealed))
    else:
        await world.crash()
        world.secret = new_server_secret()
        world.boot()
    world.launcher.may_start.set()
    job = await world.reach(job, "RUNNING")
    job = await world.reach(job, "FAILED")
    assert "openai" in job["cause"]
    assert "opentinker secrets set openai" in job["cause"]


async def test_values_and_names_have_limits(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault, "MAX_SECRETS", 2)
    store = Vault(world.store, world.secret, world.clock)
    for value in ("", "a\0b", "x" * (vault.MAX_VALUE_BYTES + 1), "\ud800"):
        with pytest.raises(InvalidRequestError) as caught:
            await store.put(ADMIN, "name", value)
        assert not value or value not in str(caught.value)
    for name in ("", "a/b", ".hidden", "a b", "x" * 64, "a\n"):
        with pytest.raises(InvalidRequestError, match="cannot be a secret's name"):
            await store.put(ADMIN, name, "value")
    for name in ("one", "two", "one"):
        await store.put(ADMIN, name, "x" * vault.MAX_VALUE_BYTES)
    with pytest.raises(ConflictError, match="2 secrets"):
        await store.put(ADMIN, "three", "value")
    with pytest.raises(NotFoundError):
        await store.remove(ADMIN, "three")
    assert [secret["name"] for secret in await store.names("admin")] == ["one", "two"]


@pytest.fixture
async def http(world: Any) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {(world.settings.state_dir / 'api_key').read_text()}"}
    transport = httpx.ASGITransport(create_app(world.service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler", headers=headers) as client:
        yield client


async def test_no_answer_of_the_routes_holds_a_value(http: httpx.AsyncClient, world: Any) -> None:
    put = await http.put("/v1/secrets/openai", json={"value": VALUE})
    assert (put.status_code, put.json()["name"]) == (200, "openai")
    answers = [put, await http.get("/v1/secrets"), await http.put("/v1/secrets/a b", json={"value": VALUE})]
    answers += [
        await http.put("/v1/secrets/x", json={"value": VALUE, "more": 1}),
        await http.put("/v1/secrets/x", json=[VALUE]),
    ]
    answers += [await http.put("/v1/secrets/x", json={"value": VALUE * 10_000}), await http.delete("/v1/secrets/openai")]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 400, 400, 413, 204]
    assert (await http.delete("/v1/secrets/openai")).status_code == 404
    assert not any(VALUE in answer.text for answer in answers)
    with sqlite3.connect(world.database) as database:
        assert database.execute("SELECT count(*) FROM secrets").fetchone() == (0,)
