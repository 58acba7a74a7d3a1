"""The durable store: what is written here is the truth, whatever process dies."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from sqlalchemy import URL, Connection, Engine, Select, func, select
from sqlalchemy.dialects import postgresql, sqlite

from opentinker.scheduler.database import WriterLock, connect, migrate, translated, writing
from opentinker.scheduler.listing import FIRST_PAGE, LIVE, JobQuery
from opentinker.scheduler.records import (
    STARTING,
    ApiKey,
    AuditEvent,
    Event,
    Job,
    LiveJob,
    PastUse,
    Policy,
    Record,
    Secret,
    Server,
    User,
)
from opentinker.scheduler.schema import KEYS, TABLES
from opentinker.scheduler.schema import api_keys as _api_keys
from opentinker.scheduler.schema import audit as _audit
from opentinker.scheduler.schema import events as _events
from opentinker.scheduler.schema import jobs as _jobs
from opentinker.scheduler.schema import policies as _policies
from opentinker.scheduler.schema import secrets as _secrets
from opentinker.scheduler.schema import servers as _servers
from opentinker.scheduler.schema import users as _users
from opentinker.scheduler.states import JobState, ServerState

R = TypeVar("R", Job, Server, Policy, Event, User, ApiKey, AuditEvent, Secret)


class JobStore(Protocol):
    """One writer: the scheduler. Calls are short (a local database), so its event loop makes them directly."""

    def save(self, *records: Record) -> None:
        """Insert or replace the records in one transaction; events are only ever added.

        Raises (every method): StorageError, UnavailableError, InvalidRequestError; see `database.translated`.
        """
        ...

    def accept(self, job: Job, *records: Record) -> Job:
        """Insert a new job with its records, or return the one that its owner's idempotency key already stands for."""
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

    def live_queue(self) -> list[LiveJob]:
        """As `live_jobs`, without their configs."""
        ...

    def holding_since(self, job_id: str) -> float | None:
        """When a job was given resources, the last time; None while it was not."""
        ...

    def event_counts(self, kinds: Sequence[str], job_ids: Sequence[str] | None) -> dict[tuple[str, str], int]:
        """By job and kind, how many events of these kinds these jobs (None: all) have, where there are any."""
        ...

    def last_detail(self, job_id: str, kind: str) -> str:
        """The detail of a job's last event of this kind; empty if it has none."""
        ...

    def jobs_with_last_event(self, kind: str, among: Sequence[str]) -> list[str]:
        """Jobs of whose events of these kinds the last one is of this kind."""
        ...

    def past_use(self, since: float) -> list[PastUse]:
        """What jobs held that ended after `since`; of one that was restarted, from its first start on."""
        ...

    def server(self, server_id: str) -> Server | None: ...

    def open_servers(self) -> list[tuple[Server, list[Policy]]]:
        """Servers that are not STOPPED, each with its policies."""
        ...

    def policies(self, job_id: str) -> list[Policy]: ...

    def events(self, job_id: str) -> list[Event]:
        """Oldest first."""
        ...

    def user(self, name: str) -> User | None: ...

    def users(self) -> list[User]:
        """By name."""
        ...

    def api_key(self, key_id: str) -> ApiKey | None: ...

    def api_key_by_digest(self, digest: str) -> ApiKey | None: ...

    def api_keys(self, owner: str) -> list[ApiKey]:
        """Oldest first, revoked ones too."""
        ...

    def audit(self, limit: int) -> list[AuditEvent]:
        """Newest first."""
        ...

    def secrets(self, owner: str) -> list[Secret]:
        """By name."""
        ...

    def remove_secret(self, secret_id: str, event: AuditEvent) -> None: ...

    def close(self) -> None: ...


class SqlStore:
    """A `JobStore` on SQLAlchemy."""

    def __init__(self, engine: Engine, lock: WriterLock) -> None:
        """`open` makes one."""
        self._engine = engine
        self._lock = lock

    @classmethod
    def open(cls, url: str) -> Self:
        """The store in the database at `sqlite:///path` or `postgresql://user@host/name`, its schema brought up to date.

        Raises:
            ConfigError: another database, a password in the URL, or a schema that this version does not know.
            ConflictError: another scheduler uses the database.
            StorageError, UnavailableError: it cannot be written or reached.
        """
        engine = connect(url)
        try:
            lock = WriterLock(engine)
            try:
                migrate(engine)
            except BaseException:
                lock.release()
                raise
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, lock)

    @classmethod
    def open_sqlite(cls, path: Path) -> Self:
        return cls.open(sqlite_url(path))

    def save(self, *records: Record) -> None:
        with self._writing() as connection:
            for record in records:
                _write(connection, record)

    def accept(self, job: Job, *records: Record) -> Job:
        with self._writing() as connection:
            insert = _insert(connection)(_jobs).values(_values(job))
            insert = insert.on_conflict_do_nothing(index_elements=["owner", "idempotency_key"])
            if connection.execute(insert.returning(_jobs.c.id)).first() is not None:
                for record in records:
                    _write(connection, record)
                return job
        assert job.idempotency_key is not None
        earlier = self.job_by_key(job.owner, job.idempotency_key)
        assert earlier is not None
        return earlier

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
        with translated(), self._engine.connect() as connection:
            rows = connection.execute(select(_jobs.c.state, func.count()).group_by(_jobs.c.state)).all()
        return {row[0]: row[1] for row in rows}

    def live_jobs(self) -> list[Job]:
        return self._all(Job, select(_jobs).where(_jobs.c.state.in_(LIVE)).order_by(_jobs.c.row))

    def live_queue(self) -> list[LiveJob]:
        columns = [_jobs.c[field.name] for field in fields(LiveJob)]
        query = select(*columns).where(_jobs.c.state.in_(LIVE)).order_by(_jobs.c.row)
        with translated(), self._engine.connect() as connection:
            return [LiveJob(*row) for row in connection.execute(query)]

    def holding_since(self, job_id: str) -> float | None:
        query = select(func.max(_events.c.at)).where(_events.c.job_id == job_id, _events.c.kind == STARTING)
        with translated(), self._engine.connect() as connection:
            at: float | None = connection.execute(query).scalar()
            return at

    def event_counts(self, kinds: Sequence[str], job_ids: Sequence[str] | None) -> dict[tuple[str, str], int]:
        query = select(_events.c.job_id, _events.c.kind, func.count()).where(_events.c.kind.in_(kinds))
        if job_ids is not None:
            query = query.where(_events.c.job_id.in_(job_ids))
        with translated(), self._engine.connect() as connection:
            rows = connection.execute(query.group_by(_events.c.job_id, _events.c.kind)).all()
        return {(row[0], row[1]): row[2] for row in rows}

    def last_detail(self, job_id: str, kind: str) -> str:
        query = select(_events.c.detail).where(_events.c.job_id == job_id, _events.c.kind == kind)
        with translated(), self._engine.connect() as connection:
            return str(connection.execute(query.order_by(_events.c.row.desc()).limit(1)).scalar() or "")

    def jobs_with_last_event(self, kind: str, among: Sequence[str]) -> list[str]:
        last = select(func.max(_events.c.row)).where(_events.c.kind.in_(among)).group_by(_events.c.job_id)
        query = select(_events.c.job_id).where(_events.c.kind == kind, _events.c.row.in_(last)).order_by(_events.c.row)
        with translated(), self._engine.connect() as connection:
            return list(connection.execute(query).scalars())

    def past_use(self, since: float) -> list[PastUse]:
        held = select(_events.c.job_id, func.min(_events.c.at).label("begin")).where(_events.c.kind == STARTING)
        begin = held.group_by(_events.c.job_id).subquery()
        query = (
            select(_jobs.c.owner, _jobs.c.gpus, _jobs.c.cpu_slots, begin.c.begin, _jobs.c.ended_at)
            .join(begin, begin.c.job_id == _jobs.c.id)
            .where(_jobs.c.ended_at > since)
            .order_by(_jobs.c.ended_at, _jobs.c.row)
        )
        with translated(), self._engine.connect() as connection:
            return [PastUse(*row) for row in connection.execute(query)]

    def server(self, server_id: str) -> Server | None:
        return self._first(Server, select(_servers).where(_servers.c.id == server_id))

    def open_servers(self) -> list[tuple[Server, list[Policy]]]:
        servers = self._all(Server, select(_servers).where(_servers.c.state != ServerState.STOPPED))
        of_servers = select(_policies).where(_policies.c.server_id.in_([server.id for server in servers]))
        policies = self._all(Policy, of_servers) if servers else []
        return [(server, [policy for policy in policies if policy.server_id == server.id]) for server in servers]

    def policies(self, job_id: str) -> list[Policy]:
        return self._all(Policy, select(_policies).where(_policies.c.job_id == job_id))

    def events(self, job_id: str) -> list[Event]:
        return self._all(Event, select(_events).where(_events.c.job_id == job_id).order_by(_events.c.row))

    def user(self, name: str) -> User | None:
        return self._first(User, select(_users).where(_users.c.name == name))

    def users(self) -> list[User]:
        return self._all(User, select(_users).order_by(_users.c.name))

    def api_key(self, key_id: str) -> ApiKey | None:
        return self._first(ApiKey, select(_api_keys).where(_api_keys.c.id == key_id))

    def api_key_by_digest(self, digest: str) -> ApiKey | None:
        return self._first(ApiKey, select(_api_keys).where(_api_keys.c.digest == digest))

    def api_keys(self, owner: str) -> list[ApiKey]:
        query = select(_api_keys).where(_api_keys.c.owner == owner)
        return self._all(ApiKey, query.order_by(_api_keys.c.created_at, _api_keys.c.id))

    def audit(self, limit: int) -> list[AuditEvent]:
        return self._all(AuditEvent, select(_audit).order_by(_audit.c.row.desc()).limit(limit))

    def secrets(self, owner: str) -> list[Secret]:
        return self._all(Secret, select(_secrets).where(_secrets.c.owner == owner).order_by(_secrets.c.name))

    def remove_secret(self, secret_id: str, event: AuditEvent) -> None:
        with self._writing() as connection:
            connection.execute(_secrets.delete().where(_secrets.c.id == secret_id))
            _write(connection, event)

    def close(self) -> None:
        self._lock.release()
        self._engine.dispose()

    def _writing(self) -> AbstractContextManager[Connection]:
        self._lock.check()
        return writing(self._engine)

    def _all(self, kind: type[R], query: Select[Any]) -> list[R]:
        names = [field.name for field in fields(kind)]
        with translated(), self._engine.connect() as connection:
            rows: Sequence[Any] = connection.execute(query).mappings().all()
        return [kind(**{name: row[name] for name in names}) for row in rows]

    def _first(self, kind: type[R], query: Select[Any]) -> R | None:
        return next(iter(self._all(kind, query.limit(1))), None)


def sqlite_url(path: Path) -> str:
    """The URL of a database file."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def _values(record: Record) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _insert(connection: Connection) -> Any:
    """The dialect's own insert, which knows conflicts."""
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert


def _write(connection: Connection, record: Record) -> None:
    table, values = TABLES[type(record)], _values(record)
    key = KEYS.get(type(record))
    if key is None:
        connection.execute(table.insert().values(values))
        return
    # Nearly always it is there already. If not, somebody else may insert it between these two statements.
    if not connection.execute(table.update().where(table.c[key] == values[key]).values(values)).rowcount:
        insert = _insert(connection)(table).values(values)
        connection.execute(insert.on_conflict_do_update(index_elements=[key], set_=values))
