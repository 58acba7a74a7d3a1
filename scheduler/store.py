"""The durable store: what is written here is the truth, whatever process dies."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import (
    JSON,
    Column,
    Engine,
    Enum,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    func,
    select,
)

from opentinker.scheduler.listing import FIRST_PAGE, LIVE, JobQuery
from opentinker.scheduler.records import ApiKey, Event, Job, Policy, Record, Server
from opentinker.scheduler.states import JobState, ServerState

R = TypeVar("R", Job, Server, Policy, Event, ApiKey)


class JobStore(Protocol):
    """One writer: the scheduler. Calls are short (a local database), so its event loop makes them directly."""

    def save(self, *records: Record) -> None:
        """Insert or replace the records in one transaction; events are only ever added."""
        ...

    def job(self, job_id: str) -> Job | None: ...

    def job_by_key(self, owner: str, idempotency_key: str) -> Job | None: ...

    def jobs(self, owner: str | None, query: JobQuery = FIRST_PAGE, *, oldest_first: bool = False) -> list[Job]:
        """The page that the query asks for, newest first, and one job more if there is a next page. `owner` None is everybody;
        the query's own `owner` is not looked at."""
        ...

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state that has any."""
        ...

    def live_jobs(self) -> list[Job]:
        """Jobs that have not ended, in the order of their submission."""
        ...

    def server(self, server_id: str) -> Server | None: ...

    def open_servers(self) -> list[tuple[Server, list[Policy]]]:
        """Servers that are not STOPPED, each with its policies."""
        ...

    def policies(self, job_id: str) -> list[Policy]: ...

    def jobs_of(self, server_id: str) -> list[str]:
        """Ids of the jobs with a policy on a server."""
        ...

    def events(self, job_id: str) -> list[Event]:
        """Oldest first."""
        ...

    def api_keys(self) -> list[ApiKey]: ...

    def close(self) -> None: ...


_meta = MetaData()
# `row` keeps the order of insertion: of submissions among jobs, of happenings among events.
_jobs = Table(
    "jobs",
    _meta,
    Column("row", Integer, primary_key=True),
    Column("id", String(64), unique=True, nullable=False),
    Column("owner", String(200), nullable=False, index=True),
    Column("name", String(200), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("state", Enum(JobState, native_enum=False, length=16), nullable=False, index=True),
    Column("config", JSON, nullable=False),
    Column("run_dir", Text, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("cpu_slots", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("cause", Text, nullable=False),
    Column("lease_expires_at", Float),
    Column("idempotency_key", String(200)),
    Column("code_sha256", String(64)),
    UniqueConstraint("owner", "idempotency_key"),
)
_servers = Table(
    "servers",
    _meta,
    Column("id", String(64), primary_key=True),
    Column("state", Enum(ServerState, native_enum=False, length=16), nullable=False, index=True),
    Column("base_model", Text, nullable=False),
    Column("node_id", String(128), nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("cpu_slots", Integer, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("worker_pid", Integer),
    Column("front_pid", Integer),
)
_policies = Table(
    "policies",
    _meta,
    Column("id", String(64), primary_key=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False, index=True),
    Column("server_id", ForeignKey("servers.id"), nullable=False, index=True),
)
_events = Table(
    "events",
    _meta,
    Column("row", Integer, primary_key=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False, index=True),
    Column("at", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("detail", Text, nullable=False),
)
_api_keys = Table(
    "api_keys",
    _meta,
    Column("name", String(200), primary_key=True),
    Column("owner", String(200), nullable=False),
    Column("digest", String(64), nullable=False),
)
_TABLES: dict[type[Any], Table] = {Job: _jobs, Server: _servers, Policy: _policies, Event: _events, ApiKey: _api_keys}
_KEYS: dict[type[Any], str] = {Job: "id", Server: "id", Policy: "id", ApiKey: "name"}


class SqlStore:
    """A `JobStore` on SQLAlchemy."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        _meta.create_all(engine)

    @classmethod
    def open_sqlite(cls, path: Path) -> "SqlStore":
        engine = create_engine(f"sqlite:///{path}")

        @event.listens_for(engine, "connect")
        def _pragmas(connection: Any, _record: Any) -> None:
            cursor = connection.cursor()
            # Write-ahead log: readers never wait. Every commit is synced: an accepted job survives a power cut.
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

        return cls(engine)

    def save(self, *records: Record) -> None:
        with self._engine.begin() as connection:
            for record in records:
                kind = type(record)
                table = _TABLES[kind]
                values = {field.name: getattr(record, field.name) for field in fields(record)}
                if kind in _KEYS:
                    key = _KEYS[kind]
                    done = connection.execute(table.update().where(table.c[key] == values[key]).values(values))
                    if done.rowcount:
                        continue
                connection.execute(table.insert().values(values))

    def job(self, job_id: str) -> Job | None:
        return self._first(Job, select(_jobs).where(_jobs.c.id == job_id))

    def job_by_key(self, owner: str, idempotency_key: str) -> Job | None:
        return self._first(Job, select(_jobs).where(_jobs.c.owner == owner, _jobs.c.idempotency_key == idempotency_key))

    def jobs(self, owner: str | None, query: JobQuery = FIRST_PAGE, *, oldest_first: bool = False) -> list[Job]:
        chosen = select(_jobs).order_by(_jobs.c.row if oldest_first else _jobs.c.row.desc()).limit(query.limit + 1)
        if owner is not None:
            chosen = chosen.where(_jobs.c.owner == owner)
        if query.state:
            chosen = chosen.where(_jobs.c.state.in_(query.state))
        if query.kind is not None:
            chosen = chosen.where(_jobs.c.kind == query.kind)
        if query.name is not None:
            chosen = chosen.where(_jobs.c.name.icontains(query.name, autoescape=True))
        if query.cursor is not None:
            at = select(_jobs.c.row).where(_jobs.c.id == query.cursor).scalar_subquery()
            chosen = chosen.where(_jobs.c.row > at if oldest_first else _jobs.c.row < at)
        return self._all(Job, chosen)

    def counts(self) -> dict[JobState, int]:
        with self._engine.connect() as connection:
            rows = connection.execute(select(_jobs.c.state, func.count()).group_by(_jobs.c.state)).all()
        return {row[0]: row[1] for row in rows}

    def live_jobs(self) -> list[Job]:
        return self._all(Job, select(_jobs).where(_jobs.c.state.in_(LIVE)).order_by(_jobs.c.row))

    def server(self, server_id: str) -> Server | None:
        return self._first(Server, select(_servers).where(_servers.c.id == server_id))

    def open_servers(self) -> list[tuple[Server, list[Policy]]]:
        servers = self._all(Server, select(_servers).where(_servers.c.state != ServerState.STOPPED))
        of_servers = select(_policies).where(_policies.c.server_id.in_([server.id for server in servers]))
        policies = self._all(Policy, of_servers) if servers else []
        return [(server, [policy for policy in policies if policy.server_id == server.id]) for server in servers]

    def policies(self, job_id: str) -> list[Policy]:
        return self._all(Policy, select(_policies).where(_policies.c.job_id == job_id))

    def jobs_of(self, server_id: str) -> list[str]:
        policies = self._all(Policy, select(_policies).where(_policies.c.server_id == server_id))
        return sorted({policy.job_id for policy in policies})

    def events(self, job_id: str) -> list[Event]:
        return self._all(Event, select(_events).where(_events.c.job_id == job_id).order_by(_events.c.row))

    def api_keys(self) -> list[ApiKey]:
        return self._all(ApiKey, select(_api_keys))

    def close(self) -> None:
        self._engine.dispose()

    def _all(self, kind: type[R], query: Select[Any]) -> list[R]:
        names = [field.name for field in fields(kind)]
        with self._engine.connect() as connection:
            rows: Sequence[Any] = connection.execute(query).mappings().all()
        return [kind(**{name: row[name] for name in names}) for row in rows]

    def _first(self, kind: type[R], query: Select[Any]) -> R | None:
        return next(iter(self._all(kind, query.limit(1))), None)
