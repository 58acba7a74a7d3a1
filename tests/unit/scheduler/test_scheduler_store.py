from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError

from opentinker.scheduler.records import ApiKey, Event, Job, PastUse, Policy, Server
from opentinker.scheduler.states import JobState, ServerState
from opentinker.scheduler.store import SqlStore


def job(job_id: str, state: JobState = JobState.QUEUED, owner: str = "ann", key: str | None = None) -> Job:
    return Job(job_id, owner, job_id, "rl", state, {"a": [1, None]}, "/runs/x", 0, 1, 1.5, idempotency_key=key)


def server(server_id: str, state: ServerState = ServerState.STARTING) -> Server:
    return Server(server_id, state, "m", "node", 0, 1)


@pytest.fixture
def store(tmp_path: Path) -> SqlStore:
    return SqlStore.open_sqlite(tmp_path / "s.db")


def test_what_was_saved_is_there_after_a_crash(tmp_path: Path) -> None:
    store = SqlStore.open_sqlite(tmp_path / "s.db")
    records = (job("j1"), server("s1"), Policy("p1", "j1", "s1"), Event("j1", 2.0, "submitted"), ApiKey("k", "ann", "00"))
    store.save(*records)
    again = SqlStore.open_sqlite(tmp_path / "s.db")  # the first one never closed its files
    assert again.job("j1") == records[0]
    assert again.open_servers() == [(records[1], [records[2]])]
    assert again.events("j1") == [records[3]]
    assert again.api_keys() == [records[4]]
    assert again.jobs_of("s1") == ["j1"]


def test_jobs_keep_the_order_of_their_submission_through_updates(store: SqlStore) -> None:
    for name in ("b", "a", "c"):
        store.save(job(name))
    store.save(replace(job("b"), cause="changed"))
    assert [j.id for j in store.live_jobs()] == ["b", "a", "c"]
    assert [j.id for j in store.jobs("ann")] == ["c", "a", "b"]
    assert store.jobs("bob") == []


def test_ended_jobs_and_stopped_servers_leave_the_work_lists(store: SqlStore) -> None:
    store.save(job("j1", JobState.FAILED), job("j2", JobState.RUNNING), server("s1", ServerState.STOPPED), server("s2"))
    assert [j.id for j in store.live_jobs()] == ["j2"]
    assert [s.id for s, _ in store.open_servers()] == ["s2"]


def test_an_idempotency_key_is_an_owners_own(store: SqlStore) -> None:
    store.save(job("j1", key="k"), job("j2", owner="bob", key="k"), job("j3"), job("j4"))
    found = store.job_by_key("ann", "k")
    assert found is not None
    assert found.id == "j1"
    with pytest.raises(IntegrityError):
        store.save(job("j5", key="k"))


def test_records_are_saved_together_or_not_at_all(store: SqlStore) -> None:
    with pytest.raises(IntegrityError):
        store.save(job("j1"), Policy("p", "j1", "no-such-server"))
    assert store.job("j1") is None


def test_a_fraction_of_a_gpu_is_kept_exactly(store: SqlStore) -> None:
    store.save(replace(job("j"), gpus=0.25, cpu_slots=0), replace(server("s"), gpus=0.25))
    found, (hosted, _) = store.job("j"), store.open_servers()[0]
    assert found is not None
    assert (found.gpus, hosted.gpus) == (0.25, 0.25)


def test_the_queue_is_read_without_configs_in_the_order_of_submission(store: SqlStore) -> None:
    store.save(job("b"), job("a", JobState.RUNNING), job("done", JobState.FAILED))
    assert [(row.id, row.state, row.owner) for row in store.live_queue()] == [
        ("b", JobState.QUEUED, "ann"),
        ("a", JobState.RUNNING, "ann"),
    ]


def test_past_use_runs_from_the_start_of_resources_to_the_end(store: SqlStore) -> None:
    ended = replace(job("j", JobState.COMPLETED), ended_at=50.0, gpus=2.0)
    store.save(ended, Event("j", 10.0, "starting"), replace(job("never", JobState.CANCELLED), ended_at=60.0), job("queued"))
    assert store.holding_since("j") == 10.0
    assert store.holding_since("queued") is None
    assert store.past_use(0.0) == [PastUse("ann", 2.0, 1, 10.0, 50.0)]
    assert store.past_use(50.0) == []
