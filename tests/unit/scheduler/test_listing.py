"""Pages of jobs: complete, in order, stable while jobs are submitted, and nobody else's."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.errors import InvalidRequestError
from opentinker.scheduler.api import create_app
from opentinker.scheduler.listing import JobQuery
from opentinker.scheduler.records import Job
from opentinker.scheduler.states import JobState
from opentinker.scheduler.store import SqlStore


def job(number: int, owner: str = "ann", state: JobState = JobState.QUEUED, **changes: Any) -> Job:
    made = Job(f"job-{number}", owner, f"Name {number}", "rl", state, {}, "/runs", 0, 1, created_at=float(number))
    return replace(made, **changes)


@pytest.fixture
def store(tmp_path: Path) -> SqlStore:
    return SqlStore.open_sqlite(tmp_path / "s.db")


def pages(store: SqlStore, owner: str | None, query: JobQuery, between: Any = lambda: None) -> list[list[str]]:
    found = []
    while True:
        jobs = [found_job.id for found_job in store.jobs(owner, query)]
        found.append(jobs[: query.limit])
        if len(jobs) <= query.limit:
            return found
        query = query.model_copy(update={"cursor": jobs[query.limit - 1]})
        between()


@given(owners=st.lists(st.sampled_from("ab"), max_size=12), limit=st.integers(1, 5), states=st.sets(st.sampled_from(JobState)))
def test_pages_hold_every_job_once_newest_first(owners: list[str], limit: int, states: set[JobState]) -> None:
    store = SqlStore.open_sqlite(Path(":memory:"))
    kinds = list(JobState)
    made = [job(i, owner, kinds[i % len(kinds)]) for i, owner in enumerate(owners)]
    store.save(*made)
    wanted = [j.id for j in reversed(made) if j.owner == "a" and (not states or j.state in states)]
    found = pages(store, "a", JobQuery(limit=limit, state=sorted(states)))
    assert list(chain.from_iterable(found)) == wanted
    assert all(len(page) == limit for page in found[:-1])
    store.close()


def test_jobs_submitted_meanwhile_do_not_shift_the_pages(store: SqlStore) -> None:
    store.save(*(job(i) for i in range(10)))
    numbers = iter(range(100, 200))
    found = pages(store, "ann", JobQuery(limit=3), between=lambda: store.save(job(next(numbers)), job(next(numbers))))
    assert list(chain.from_iterable(found)) == [f"job-{i}" for i in range(9, -1, -1)]


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        (JobQuery(), [3, 2, 1, 0]),
        (JobQuery(kind="interactive"), [2]),
        (JobQuery(name="AME 3"), [3]),
        (JobQuery(name="%"), []),
        (JobQuery(name="_"), []),
        (JobQuery(name="' OR 1=1 --"), []),
        (JobQuery(state=[JobState.RUNNING, JobState.FAILED]), [3, 1]),
        (JobQuery(state=[JobState.RUNNING], name="3"), []),
    ],
)
def test_filters_are_all_applied(store: SqlStore, query: JobQuery, numbers: list[int]) -> None:
    store.save(
        job(0), job(1, state=JobState.RUNNING), job(2, kind="interactive"), job(3, state=JobState.FAILED), job(4, owner="bob")
    )
    assert [j.id for j in store.jobs("ann", query)] == [f"job-{n}" for n in numbers]


def test_counts_tell_the_states(store: SqlStore) -> None:
    assert store.counts() == {}
    store.save(job(0), job(1), job(2, "bob", JobState.FAILED))
    assert store.counts() == {JobState.QUEUED: 2, JobState.FAILED: 1}


async def test_a_list_of_everybodys_jobs_and_one_of_ones_own(world: Any) -> None:
    await world.interactive(owner="ann")
    mine = await world.interactive()
    service = world.service
    assert [j["owner"] for j in (await service.jobs("*"))["jobs"]] == ["admin", "ann"]
    assert [j["owner"] for j in (await service.jobs("ann"))["jobs"]] == ["ann"]
    # Not even whether it exists: another's job as a cursor is as wrong as none.
    for cursor in (mine["id"], "job-none"):
        with pytest.raises(InvalidRequestError, match="cursor"):
            await service.jobs("ann", JobQuery(cursor=cursor))


async def test_the_route_pages_and_refuses_what_it_does_not_know(world: Any) -> None:
    ids = [(await world.interactive())["id"] for _ in range(3)]
    key = {"Authorization": f"Bearer {(world.settings.state_dir / 'api_key').read_text()}"}
    transport = httpx.ASGITransport(create_app(world.service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler", headers=key) as http:
        first = (await http.get("/v1/jobs", params={"limit": 2})).json()
        assert ([j["id"] for j in first["jobs"]], first["next"]) == ([ids[2], ids[1]], ids[1])
        second = (await http.get("/v1/jobs", params={"limit": 2, "cursor": first["next"]})).json()
        assert ([j["id"] for j in second["jobs"]], second["next"]) == ([ids[0]], None)
        states = [("state", "QUEUED"), ("state", "STARTING"), ("state", "RUNNING")]
        assert len((await http.get("/v1/jobs", params=states)).json()["jobs"]) == 3
        for wrong in ({"limit": 0}, {"limit": 501}, {"state": "FLYING"}, {"colour": "red"}, {"cursor": "job-x"}):
            answer = await http.get("/v1/jobs", params=wrong)
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request"), wrong


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"kind": "interactive", "base_model": "/models/Some-Model-7B"}, "Some-Model-7B"),
        ({"kind": "rl", "base_model": "m", "environment": {"name": "games/chess.py:Endgame"}}, "Endgame"),
        ({"kind": "rl", "base_model": "m", "environment": {"name": "arithmetic"}}, "arithmetic"),
        ({"kind": "rl", "base_model": "m", "environment": {"name": "arithmetic"}, "name": "mine"}, "mine"),
    ],
)
async def test_a_job_without_a_name_gets_a_readable_one(world: Any, config: dict[str, Any], name: str) -> None:
    assert (await world.service.submit("admin", config))["name"] == name
