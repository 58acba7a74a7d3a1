"""The store's promises, on SQLite and on a real PostgreSQL."""

import logging
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from opentinker.errors import ConfigError, ConflictError, InvalidRequestError, StorageError, UnavailableError
from opentinker.scheduler import database, schema
from opentinker.scheduler.database import connect, writing
from opentinker.scheduler.records import ApiKey, AuditEvent, Event, Job, PastUse, Policy, Scope, Server, User
from opentinker.scheduler.states import JobState, ServerState
from opentinker.scheduler.store import SqlStore, sqlite_url

FIRST_SCHEMA = Path(__file__).with_name("first_schema.sql")
SQL = "Robert'); DROP TABLE jobs;--"


def job(job_id: str, state: JobState = JobState.QUEUED, owner: str = "ann", key: str | None = None) -> Job:
    return Job(job_id, owner, job_id, "rl", state, {"a": [1, None]}, "/runs/x", 0, 1, 1.5, idempotency_key=key)


def server(server_id: str, state: ServerState = ServerState.STARTING) -> Server:
    return Server(server_id, state, "m", "node", 0, 1)


def user(name: str) -> User:
    return User(name, frozenset({Scope.SUBMIT, Scope.READ}), created_at=1.0)


def api_key(key_id: str, owner: str, digest: str) -> ApiKey:
    return ApiKey(key_id, owner, "laptop", frozenset({Scope.READ}), digest, 1.0)


@pytest.fixture
def store(database_url: str) -> Iterator[SqlStore]:
    store = SqlStore.open(database_url)
    yield store
    store.close()


def test_what_was_saved_is_there_after_a_crash(store: SqlStore, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records = (job("j1"), server("s1"), Policy("p1", "j1", "s1"), Event("j1", 2.0, "submitted"))
    people = (user("ann"), api_key("k", "ann", "00"), AuditEvent(3.0, "root", "user.add", "ann", "::1", "ok"))
    store.save(*records, *people)
    store._lock.release()  # the kernel does that for a process that dies
    again = SqlStore.open(database_url)  # the first one never closed its files
    assert again.job("j1") == records[0]
    assert again.open_servers() == [(records[1], [records[2]])]
    assert again.events("j1") == [records[3]]
    assert (again.user("ann"), again.users()) == (people[0], [people[0]])
    assert again.api_key("k") == again.api_key_by_digest("00") == people[1]
    assert (again.api_keys("ann"), again.api_keys("bob")) == ([people[1]], [])
    assert again.audit(10) == [people[2]]
    again.close()


def test_jobs_keep_the_order_of_their_submission_through_updates(store: SqlStore) -> None:
    for name in ("b", "a", "c"):
        store.save(job(name))
    store.save(replace(job("b"), cause="changed"))
    assert [j.id for j in store.live_jobs()] == ["b", "a", "c"]
    assert [j.id for j in store.jobs("ann")] == [j.id for j in store.jobs(None)] == ["c", "a", "b"]
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


def test_a_job_is_accepted_once_per_key_however_many_ask_at_once(store: SqlStore, database_url: str) -> None:
    answers: list[str] = []
    start = threading.Barrier(8)
    engine = connect(database_url)

    def submit(number: int) -> None:
        mine = SqlStore(engine, store._lock)
        start.wait()
        answers.append(mine.accept(job(f"j{number}", key="k"), Event(f"j{number}", 1.0, "submitted")).id)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.dispose()
    (winner,) = set(answers)
    assert len(answers) == 8
    assert [j.id for j in store.jobs("ann")] == [winner]
    assert len(store.events(winner)) == 1
    assert store.accept(job("other", owner="bob", key="k")).id == "other"
    assert store.accept(job("keyless")).id == "keyless"


def test_the_same_new_record_saved_by_two_at_once_is_there_once(store: SqlStore, database_url: str) -> None:
    engine = connect(database_url)
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def save(number: int) -> None:
        start.wait()
        try:
            SqlStore(engine, store._lock).save(user("ann"), replace(user("bob"), share=float(number + 1)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.dispose()
    assert failures == []
    assert [u.name for u in store.users()] == ["ann", "bob"]


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


def test_a_jobs_last_event_among_some_kinds_tells_what_is_left_to_do(store: SqlStore) -> None:
    told = {"none": "", "one": "b", "later": "b x", "over": "b c", "again": "b c b", "other": "x"}
    store.save(*(job(name) for name in told))
    store.save(*(Event(name, 0.0, kind) for name, kinds in told.items() for kind in kinds.split()))
    assert store.jobs_with_last_event("b", among=("b", "c")) == ["one", "later", "again"]
    assert store.jobs_with_last_event("c", among=("b", "c")) == ["over"]


def test_text_is_data_whatever_it_looks_like(store: SqlStore) -> None:
    odd = replace(job("j1", owner=SQL, key=SQL), name=SQL, cause='"; --', config={SQL: "\u0000 ☃"})
    store.save(odd)
    assert store.job("j1") == odd
    assert store.job(SQL) is None
    assert store.jobs(SQL) == [odd]
    assert store.job_by_key(SQL, SQL) == odd
    assert store.user(SQL) is None
    assert store.api_key_by_digest("' OR ''='") is None


def test_text_that_postgresql_cannot_hold_is_refused_and_not_a_crash(postgres: Any) -> None:
    store = SqlStore.open(postgres.database())
    with pytest.raises(InvalidRequestError):
        store.save(replace(job("j1"), name="a\0b"))
    assert store.job("j1") is None
    store.close()


def test_fractions_of_gpus_are_kept_and_whole_ones_stay_whole(store: SqlStore) -> None:
    store.save(replace(server("s1"), gpus=0.25), replace(server("s2"), gpus=2))
    gpus = {s.id: s.gpus for s, _ in store.open_servers()}
    assert gpus == {"s1": 0.25, "s2": 2}
    assert isinstance(gpus["s2"], int)


# Schema


def test_the_migrations_lead_to_exactly_the_schema_in_the_code(store: SqlStore) -> None:
    with store._engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), schema.meta)
        if connection.dialect.name == "sqlite":  # where a column's type binds nobody, and changing it needs copies
            differences = [found for found in differences if found[0][:4] != ("modify_type", None, found[0][2], "gpus")]
    assert differences == []


def test_a_database_from_before_migrations_is_taken_over_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.db"
    old = sqlite3.connect(path)
    old.executescript(FIRST_SCHEMA.read_text())
    rows = {name: old.execute(f"SELECT * FROM {name}").fetchall() for name in ("jobs", "servers", "policies", "events")}
    old.close()
    for _ in range(2):  # the second time there is nothing left to do
        store = SqlStore.open_sqlite(path)
        first, second = reversed(store.jobs("admin"))
        assert (first.id, first.state, first.name) == ("job-1", JobState.RUNNING, "it's; DROP TABLE jobs;--")
        assert (first.config, first.idempotency_key) == ({"kind": "rl", "a": [1, None]}, "k")
        assert (second.state, second.lease_expires_at) == (JobState.QUEUED, 33.5)
        assert [(s.id, s.endpoint, [p.id for p in ps]) for s, ps in store.open_servers()] == [
            ("srv-1", "http://127.0.0.1:1", ["pol-1"])
        ]
        key = store.api_key_by_digest("d" * 64)
        assert key is not None
        assert (key.id, key.owner, key.scopes) == ("embedded", "admin", {Scope.ADMIN})
        assert [(u.name, u.scopes) for u in store.users()] == [("admin", {Scope.ADMIN})]
        store.save(replace(second, state=JobState.STARTING), Event("job-2", 9.0, "starting"))
        store.save(replace(second))
        store.close()
    new = sqlite3.connect(path)
    assert rows["policies"] == new.execute("SELECT * FROM policies").fetchall()
    assert rows["events"] == new.execute("SELECT * FROM events WHERE kind != 'starting'").fetchall()
    assert new.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert new.execute("PRAGMA foreign_key_check").fetchall() == []


def test_a_takeover_that_is_cut_short_leaves_the_old_database_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scheduler.db"
    old = sqlite3.connect(path)
    old.executescript(FIRST_SCHEMA.read_text())
    before = list(old.iterdump())
    old.close()

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # After the last statement of the last migration, before the commit.
        patch.setattr("alembic.runtime.migration.HeadMaintainer.update_to_step", cut)
        with pytest.raises(KeyboardInterrupt):
            SqlStore.open_sqlite(path)
    assert list(sqlite3.connect(path).iterdump()) == before
    store = SqlStore.open_sqlite(path)
    assert len(store.jobs("admin")) == 2
    store.close()


def test_a_database_that_is_newer_than_the_code_is_refused_and_not_touched(store: SqlStore, database_url: str) -> None:
    store.save(job("j1"))
    with writing(store._engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(ConfigError, match=r"9999.*newer OpenTinker"):
        SqlStore.open(database_url)
    with connect(database_url).connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
        assert connection.execute(text("SELECT count(*) FROM jobs")).scalar() == 1


def test_somebody_elses_database_is_refused(database_url: str) -> None:
    engine = connect(database_url)
    with writing(engine) as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER)"))
    engine.dispose()
    with pytest.raises(ConfigError, match=r"not OpenTinker's: orders"):
        SqlStore.open(database_url)


# Which database


def test_a_password_does_not_belong_into_the_url_and_is_repeated_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for url in (
        "postgresql://ot:s3cret@db.example/ot",
        "postgresql://ot@db.example/ot?password=s3cret",
        "postgresql://ot:s3cret@db.example:port/ot",
        "s3cret",
    ):
        with pytest.raises(ConfigError) as caught:
            SqlStore.open(url)
        assert "s3cret" not in str(caught.value) + caplog.text
        assert caught.value.__cause__ is None


def test_an_unsupported_database_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mysql is not supported"):
        SqlStore.open("mysql://ot@db.example/ot")
    with pytest.raises(UnavailableError, match="unable to open database file"):
        SqlStore.open_sqlite(tmp_path / "no-such-folder" / "s.db")


def test_a_path_with_odd_characters_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "100% of? #it & ü"
    folder.mkdir()
    store = SqlStore.open_sqlite(folder / "s.db")
    store.save(job("j1"))
    store.close()
    assert (folder / "s.db").is_file()


def test_a_database_that_does_not_answer_is_unavailable_and_the_wrong_password_says_so(postgres: Any, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="does not answer"):
        SqlStore.open(f"postgresql://ot@/ot?host={tmp_path}")
    url = postgres.database()
    wrong = tmp_path / "wrong"
    wrong.write_text("*:*:*:ot:wrong-one")
    wrong.chmod(0o600)
    with pytest.raises(UnavailableError, match="password authentication failed") as caught:
        SqlStore.open(url.replace(str(postgres.passfile), str(wrong)))
    assert "wrong-one" not in str(caught.value)


def test_two_schedulers_cannot_share_a_postgresql_database(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = postgres.database()
    store = SqlStore.open(url)
    monkeypatch.setattr(database, "PATIENCE_S", 0.1)
    with pytest.raises(ConflictError, match="another scheduler"):
        SqlStore.open(url)
    store.close()
    SqlStore.open(url).close()


def test_a_restart_of_the_database_is_survived(postgres: Any) -> None:
    store = SqlStore.open(postgres.database())
    store.save(job("j1"))
    with writing(store._engine) as connection:
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid() AND usename = 'ot'"
        connection.execute(text(others))
    store.save(job("j2"))
    assert [j.id for j in store.live_jobs()] == ["j1", "j2"]
    store.close()


def end_sessions(url: str) -> None:
    """As a restart of the database does."""
    engine = database.connect(url)
    with writing(engine) as connection:
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid() AND usename = 'ot'"
        connection.execute(text(others))
    engine.dispose()


def test_a_writer_whose_lock_was_lost_takes_it_again_or_writes_nothing_more(
    postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.database()
    store = SqlStore.open(url)
    end_sessions(url)
    store.save(job("j1"))
    monkeypatch.setattr(database, "PATIENCE_S", 0.1)
    with pytest.raises(ConflictError, match="another scheduler"):
        SqlStore.open(url)  # the lock is the first one's again
    end_sessions(url)
    other = SqlStore.open(url)
    for write in (lambda: store.save(job("j2")), lambda: store.accept(job("j3")), lambda: store.save(Event("j1", 1.0, "x"))):
        with pytest.raises(UnavailableError, match="another scheduler has taken over"):
            write()
    assert [j.id for j in store.live_jobs()] == ["j1"]
    other.save(job("j4"))
    other.close()
    store.save(job("j5"))
    assert [j.id for j in store.live_jobs()] == ["j1", "j4", "j5"]
    store.close()


# A full disk


def test_a_full_disk_loses_nothing_that_was_there_and_takes_nothing_half(tmp_path: Path) -> None:
    store = SqlStore.open_sqlite(tmp_path / "s.db")
    store.save(job("j1"))
    with store._engine.connect() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar()
        connection.execute(text(f"PRAGMA max_page_count={pages}"))
    big = replace(job("j2"), config={"x": "y" * 100_000})
    with pytest.raises(StorageError, match="disk is full") as caught:
        store.save(big, Event("j2", 1.0, "submitted"))
    assert caught.value.status == 507
    with pytest.raises(StorageError):
        store.accept(big, Event("j2", 1.0, "submitted"))
    assert [j.id for j in store.jobs(None)] == ["j1"]
    with store._engine.connect() as connection:
        connection.execute(text("PRAGMA max_page_count=1000000"))
    store.save(big)
    store.close()
    assert sqlite3.connect(tmp_path / "s.db").execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_disk_that_really_takes_no_more_is_survived(tmp_path: Path) -> None:
    """The kernel refuses writes beyond a file size, as it does on a full disk. In its own process, to limit only that."""
    code = """if True:
        import resource, signal, sys
        from pathlib import Path
        from opentinker.errors import StorageError
        from opentinker.scheduler.records import Event, Job
        from opentinker.scheduler.states import JobState
        from opentinker.scheduler.store import SqlStore

        def job(number):
            return Job(f"j{number}", "ann", "n", "rl", JobState.QUEUED, {"x": "y" * 20_000}, "/runs", 0, 1, 1.0)

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = SqlStore.open_sqlite(Path(sys.argv[1]))
        accepted = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
        refused = 0
        for number in range(60):
            try:
                store.accept(job(number), Event(f"j{number}", 1.0, "submitted"))
                accepted.append(f"j{number}")
            except StorageError as error:
                refused += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert refused and accepted, (refused, accepted)
        assert [j.id for j in store.live_jobs()] == accepted
        store.accept(job(99), Event("j99", 1.0, "submitted"))
        print(*accepted, "j99")
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s.db")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    store = SqlStore.open_sqlite(tmp_path / "s.db")
    assert [j.id for j in store.live_jobs()] == done.stdout.split()
    assert all(len(store.events(j.id)) == 1 for j in store.live_jobs())
    store.close()
    assert sqlite3.connect(tmp_path / "s.db").execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_database_that_must_not_be_written_says_so(tmp_path: Path) -> None:
    SqlStore.open_sqlite(tmp_path / "s.db").close()
    (tmp_path / "s.db").chmod(0o400)
    with pytest.raises(StorageError):
        SqlStore.open_sqlite(tmp_path / "s.db").save(job("j1"))


def test_a_file_urls_path_is_escaped() -> None:
    assert connect(sqlite_url(Path("/a b/%41?x"))).url.database == "/a b/%41?x"


def test_ctrl_c_while_a_connection_closes_prints_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = connect(f"sqlite:///{tmp_path / 'store.db'}")
    for error, logged in ((KeyboardInterrupt(), False), (OSError("gone"), True)):
        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(engine.dialect, "do_close", Mock(side_effect=error))
            engine.pool._close_connection(Mock())
        assert ("Exception closing connection" in caplog.text) is logged
    engine.dispose()
