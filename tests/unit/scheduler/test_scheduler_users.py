"""Users and keys: made, used, narrowed, replaced and taken away."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from opentinker.errors import (
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    RateLimitedError,
    StorageError,
    UnavailableError,
)
from opentinker.scheduler.api import create_app
from opentinker.scheduler.limits import PER_ADDRESS_BURST
from opentinker.scheduler.records import Scope
from opentinker.scheduler.users import Caller, UserDirectory

ROOT = Caller("admin", frozenset({Scope.ADMIN}), "192.0.2.7")


@pytest.fixture
def users(world: Any) -> UserDirectory:
    directory: UserDirectory = world.service.users
    return directory


def key_file(world: Any) -> str:
    return str((world.settings.state_dir / "api_key").read_text())


async def test_a_key_is_shown_once_and_stored_nowhere(
    users: UserDirectory, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    answer = await users.add(ROOT, "ann", ["submit"], {"share": 2.0, "max_gpus": 4, "max_jobs": 10})
    secret = answer["key"]["key"]
    assert answer["user"] == {
        "name": "ann",
        "scopes": ["submit"],
        "share": 2.0,
        "max_gpus": 4,
        "max_jobs": 10,
        "disabled": False,
        "created_at": world.clock.now,
    }
    assert users.authenticate(secret).name == "ann"
    listed = [await users.users(), await users.keys("ann"), await users.audit(100)]
    assert secret not in str(listed) + caplog.text
    assert "digest" not in str(listed)
    for path in world.settings.state_dir.glob("scheduler.db*"):
        assert secret.encode() not in path.read_bytes()


async def test_what_a_key_may_do_is_what_both_it_and_its_user_may(users: UserDirectory) -> None:
    secret = (await users.add(ROOT, "ann", ["submit"], {}))["key"]["key"]
    viewer = (await users.add_key(ROOT, "ann", "dashboard", ["read"]))["key"]
    assert users.authenticate(secret).scopes == {Scope.SUBMIT, Scope.READ}
    assert users.authenticate(viewer).scopes == {Scope.READ}
    with pytest.raises(InvalidRequestError, match="does not have the scope admin"):
        await users.add_key(ROOT, "ann", "root", ["admin"])
    await users.change(ROOT, "ann", {"scopes": ["read"]})
    assert users.authenticate(secret).scopes == {Scope.READ}
    await users.change(ROOT, "ann", {"scopes": ["admin"]})
    assert users.authenticate(secret).scopes == {Scope.SUBMIT, Scope.READ}
    assert users.authenticate((await users.add_key(ROOT, "ann", "root"))["key"]).is_admin


async def test_revoked_rotated_and_disabled_keys_are_worth_nothing_at_once(users: UserDirectory, world: Any) -> None:
    first = (await users.add(ROOT, "ann", ["submit"], {}))["key"]
    second = await users.rotate_key(ROOT, "ann", first["id"])
    assert (second["name"], second["scopes"]) == (first["name"], first["scopes"])
    with pytest.raises(AuthenticationError):
        users.authenticate(first["key"])
    assert users.authenticate(second["key"]).name == "ann"
    with pytest.raises(ConflictError, match="is revoked"):
        await users.rotate_key(ROOT, "ann", first["id"])
    await users.change(ROOT, "ann", {"disabled": True})
    with pytest.raises(AuthenticationError):
        users.authenticate(second["key"])
    await users.change(ROOT, "ann", {"disabled": False})
    assert users.authenticate(second["key"]).name == "ann"
    revoked = await users.revoke_key(ROOT, "ann", second["id"])
    world.clock.now += 5.0
    assert await users.revoke_key(ROOT, "ann", second["id"]) == revoked
    with pytest.raises(AuthenticationError):
        users.authenticate(second["key"])
    assert [key["revoked_at"] is not None for key in await users.keys("ann")] == [True, True]


async def test_a_key_of_one_user_is_not_found_at_another(users: UserDirectory) -> None:
    ann = (await users.add(ROOT, "ann", ["submit"], {}))["key"]
    await users.add(ROOT, "bob", ["submit"], {})
    for call in (users.revoke_key, users.rotate_key):
        with pytest.raises(NotFoundError):
            await call(ROOT, "bob", ann["id"])
    with pytest.raises(NotFoundError):
        await users.keys("nobody")
    with pytest.raises(NotFoundError):
        await users.change(ROOT, "nobody", {"share": 2.0})


async def test_administrators_cannot_lock_themselves_out(users: UserDirectory, world: Any) -> None:
    await users.add(ROOT, "ann", ["admin"], {})
    ann = Caller("ann", frozenset({Scope.ADMIN}))
    for by, name, change in (
        (ann, "ann", {"disabled": True}),
        (ann, "ann", {"scopes": ["submit"]}),
        (ann, "admin", {"disabled": True}),
    ):
        with pytest.raises(ConflictError, match="must stay an administrator"):
            await users.change(by, name, change)
    for call in (users.revoke_key, users.rotate_key):
        with pytest.raises(ConflictError, match="state folder"):
            await call(ann, "admin", "embedded")
    assert users.authenticate(key_file(world)).is_admin


async def test_a_new_key_file_replaces_the_old_key(users: UserDirectory, world: Any) -> None:
    old = key_file(world)
    assert users.authenticate(old).is_admin
    world.service.create_key()
    assert [key["last_used_at"] for key in await users.keys("admin")] == [world.clock.now]  # it is the same key
    (world.settings.state_dir / "api_key").unlink()
    world.service.create_key()
    with pytest.raises(AuthenticationError):
        users.authenticate(old)
    assert users.authenticate(key_file(world)).is_admin


@pytest.mark.parametrize(
    ("name", "scopes", "limits"),
    [
        ("*", ["submit"], {}),
        ("", ["submit"], {}),
        ("Ann", ["submit"], {}),
        ("../ann", ["submit"], {}),
        ("a" * 64, ["submit"], {}),
        ("ann\n", ["submit"], {}),
        ("ann", [], {}),
        ("ann", ["root"], {}),
        ("ann", ["submit"], {"share": -1.0}),
        ("ann", ["submit"], {"share": 0.0}),
        ("ann", ["submit"], {"share": float("nan")}),
        ("ann", ["submit"], {"max_gpus": -1}),
        ("ann", ["submit"], {"max_jobs": 10**9}),
    ],
)
async def test_an_absurd_user_is_refused(users: UserDirectory, name: str, scopes: list[str], limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        await users.add(ROOT, name, scopes, limits)
    assert [user["name"] for user in await users.users()] == ["admin"]


async def test_a_name_is_taken_once(users: UserDirectory) -> None:
    secret = (await users.add(ROOT, "ann", ["submit"], {}))["key"]["key"]
    with pytest.raises(ConflictError, match="already"):
        await users.add(ROOT, "ann", ["admin"], {})
    assert users.authenticate(secret).scopes == {Scope.SUBMIT, Scope.READ}


async def test_everything_that_was_done_is_in_the_audit_with_who_and_from_where(users: UserDirectory, world: Any) -> None:
    key = (await users.add(ROOT, "ann", ["submit"], {}))["key"]
    await users.change(ROOT, "ann", {"share": 3.0, "scopes": ["submit", "read"]})
    await users.add_key(ROOT, "ann", "ci")
    new = await users.rotate_key(ROOT, "ann", key["id"])
    await users.revoke_key(ROOT, "ann", new["id"])
    with pytest.raises(AuthenticationError):
        users.authenticate("ot-guess", "198.51.100.9")
    events = await users.audit(100)
    assert [event["action"] for event in reversed(events)] == [
        "user.add",
        "user.change",
        "key.add",
        "key.rotate",
        "key.revoke",
        "login",
    ]
    assert {(event["actor"], event["address"]) for event in events[1:]} == {("admin", "192.0.2.7")}
    assert (events[0]["actor"], events[0]["address"], events[0]["outcome"]) == ("", "198.51.100.9", "denied")
    assert events[4]["target"] == "ann scopes=read submit,share=3.0"
    assert "ot-guess" not in str(events)
    assert len(await users.audit(2)) == 2


async def test_last_use_is_known_to_the_minute(users: UserDirectory, world: Any) -> None:
    secret = (await users.add(ROOT, "ann", ["submit"], {}))["key"]["key"]

    async def last_used() -> float | None:
        users.authenticate(secret)
        used: float | None = (await users.keys("ann"))[0]["last_used_at"]
        return used

    start = world.clock.now
    assert await last_used() == start
    world.clock.now += 59.0
    assert await last_used() == start
    world.clock.now += 1.0
    assert await last_used() == start + 60.0


# Guessing


async def test_who_guesses_is_shut_out_for_a_while_and_others_are_not(users: UserDirectory, world: Any) -> None:
    secret = (await users.add(ROOT, "ann", ["submit"], {}))["key"]["key"]
    for _ in range(int(PER_ADDRESS_BURST)):
        with pytest.raises(AuthenticationError):
            users.authenticate("ot-guess", "198.51.100.9")
    with pytest.raises(RateLimitedError) as caught:
        users.authenticate(secret, "198.51.100.9")
    users.authenticate(secret, "192.0.2.1")
    for _ in range(int(PER_ADDRESS_BURST) + 5):
        with pytest.raises((AuthenticationError, RateLimitedError)):
            users.authenticate("ot-guess", "192.0.2.1")
    assert users.authenticate(secret, "192.0.2.1").name == "ann"
    world.clock.now += caught.value.retry_after_s
    assert users.authenticate(secret, "198.51.100.9").name == "ann"


async def test_a_flood_of_guesses_locks_nobody_else_out_and_fills_no_disk(users: UserDirectory, world: Any) -> None:
    secret = (await users.add(ROOT, "ann", ["submit"], {}))["key"]["key"]
    for number in range(1000):
        with pytest.raises((AuthenticationError, RateLimitedError)):
            users.authenticate("ot-guess", f"10.{number % 7}.{number // 250}.{number % 250}")
        if number % 100 == 99:
            assert users.authenticate(secret, "192.0.2.1").name == "ann"
    assert len(await users.audit(1000)) < 250


async def test_too_many_guesses_are_told_when_to_come_back(world: Any) -> None:
    transport = httpx.ASGITransport(create_app(world.service), client=("198.51.100.9", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as http:
        for _ in range(int(PER_ADDRESS_BURST)):
            assert (await http.get("/v1/jobs", headers={"Authorization": "Bearer ot-guess"})).status_code == 401
        answer = await http.get("/v1/jobs", headers={"Authorization": "Bearer ot-guess"})
        assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert (await http.get("/v1/jobs")).status_code == 401  # no key is no guess
        assert (await http.get("/health")).status_code == 200


# Clocks and disks


async def test_a_clock_set_back_neither_ends_a_living_clients_job_nor_keeps_a_dead_ones(world: Any) -> None:
    alive = await world.reach(await world.interactive(), "RUNNING")
    world.launcher.cluster = [replace(world.launcher.cluster[0], cpu_slots=2)]
    dead = await world.reach(await world.interactive(), "RUNNING")
    for jump_s in (-3600.0, 7200.0, -86400.0):
        world.jump_s += jump_s
        for _ in range(4):
            world.clock.now += 7.0
            await world.service.heartbeat("admin", alive["id"])
            await world.settle()
        assert (await world.service.job("admin", alive["id"]))["state"] == "RUNNING"
        if dead is not None and world.clock.now - 1_000_000.0 >= 30.0:
            dead = await world.service.job("admin", dead["id"])
            assert dead["cause"] == "lease expired: no heartbeat for 30 s"


async def test_a_full_disk_refuses_a_submit_whole_and_the_scheduler_goes_on_when_there_is_room(world: Any) -> None:
    first = await world.reach(await world.interactive(), "RUNNING")

    def limit(pages: int) -> None:
        with world.store._engine.connect() as connection:
            connection.execute(text(f"PRAGMA max_page_count={pages}"))

    filler = {"kind": "interactive", "base_model": "m" * 100_000}
    limit(1)  # SQLite makes it what the file has now
    before = sorted(path.name for path in world.settings.runs_dir.glob("*/*"))
    with pytest.raises(StorageError, match="cannot be written"):
        await world.service.submit("admin", filler, "k")
    assert sorted(path.name for path in world.settings.runs_dir.glob("*/*")) == before
    assert [job["id"] for job in (await world.service.jobs("admin"))["jobs"]] == [first["id"]]
    assert (await world.service.heartbeat("admin", first["id"]))["state"] == "RUNNING"
    limit(1_000_000)
    again = await world.service.submit("admin", filler, "k")
    await world.service.complete("admin", first["id"])
    await world.reach(again, "RUNNING")


@pytest.mark.parametrize("error", [StorageError("disk is full"), UnavailableError("no answer")])
async def test_a_server_that_came_up_while_the_store_was_out_is_not_forgotten(
    world: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    world.launcher.may_start.clear()
    job = await world.reach(await world.interactive(), "STARTING")

    def full(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "save", full)
        world.launcher.may_start.set()
        await world.settle()
        assert (await world.service.job("admin", job["id"]))["state"] == "STARTING"
        assert (await world.service.authenticate(key_file(world))).is_admin
        with pytest.raises(AuthenticationError):
            await world.service.authenticate("ot-guess")
        with pytest.raises(type(error)):
            await world.service.cancel("admin", job["id"])
    await world.reach(job, "RUNNING")
    job = await world.service.complete("admin", job["id"])
    assert job["state"] == "COMPLETED"
    await world.until_free(1)


async def test_a_store_that_is_out_while_a_server_stops_does_not_keep_its_slot(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.reach(await world.interactive(), "RUNNING")
    save = world.store.save
    left = {"failures": 3}

    def sometimes(*records: Any) -> None:
        if left["failures"] and any(type(record).__name__ == "Server" for record in records):
            left["failures"] -= 1
            raise StorageError("disk is full")
        save(*records)

    monkeypatch.setattr(world.store, "save", sometimes)
    await world.service.complete("admin", job["id"])
    await world.until_free(1)
    assert left["failures"] == 0
