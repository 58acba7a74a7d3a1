"""Opening a database: which one a URL means, its settings, and its schema brought up to this code's."""

import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, InterfaceError, NoSuchModuleError, OperationalError

from opentinker.errors import ConfigError, ConflictError, InvalidRequestError, StorageError, UnavailableError

logger = logging.getLogger(__name__)
FIRST = "0001"
"""The revision of a database that was made before there were migrations."""
MIGRATION_LOCK, WRITER_LOCK = 7_262_001, 7_262_002
"""PostgreSQL advisory locks."""
PATIENCE_S = 15.0
"""How long to wait for an earlier scheduler's session to end."""
_FULL = ("disk is full", "no space left", "disk i/o error", "readonly database")
_AWAY = ("locked", "unable to open", "busy")
_WRITING = {"opentinker_writing": True}


def connect(url: str) -> Engine:
    """An engine for `sqlite:///path` or `postgresql://...`; nothing is connected yet.

    Raises:
        ConfigError: another database, or a password in the URL.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The text may hold a password, so it is not repeated; neither is the cause.
        raise ConfigError("database_url is not a URL", hint="such as postgresql://user@host/name") from None
    kind = parsed.get_backend_name()
    if parsed.password is not None or "password" in parsed.query:
        raise ConfigError(
            "database_url must not hold a password: settings are shown and logged",
            hint="write it into ~/.pgpass, or into a file that '?passfile=/path' names (mode 0600)",
        )
    if kind == "sqlite":
        return _quiet(_sqlite(parsed))
    if kind == "postgresql":
        return _quiet(_postgres(parsed))
    raise ConfigError(f"database_url: {kind} is not supported", hint="use sqlite:///path or postgresql://user@host/name")


def _quiet(engine: Engine) -> Engine:
    """A Ctrl-C that comes while a connection closes is raised like any other; the pool shall not print a traceback, too."""
    pool = logging.getLogger(f"sqlalchemy.pool.impl.{type(engine.pool).__name__}")
    pool.addFilter(_not_interrupted)
    return engine


def _not_interrupted(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt))


def _sqlite(url: URL) -> Engine:
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # `_begin` begins; sqlite3 by itself would leave DDL outside of transactions
        cursor = connection.cursor()
        # Write-ahead log: readers never wait. Every commit is synced: an accepted job survives a power cut.
        for pragma in ("busy_timeout=5000", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A reader that becomes a writer does not wait for others, it fails; so writers are writers from the start.
        writing = connection.get_execution_options().get("opentinker_writing")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _postgres(url: URL) -> Engine:
    try:
        return create_engine(
            url.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={
                "connect_timeout": 5,
                "options": "-c statement_timeout=10000",
                "application_name": "opentinker",
                # A network that drops packets must not hold up the scheduler's one event loop for TCP's quarter of an hour.
                "keepalives_idle": 5,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                "tcp_user_timeout": 10000,
            },
        )
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise ConfigError("PostgreSQL needs the package psycopg", hint="pip install 'opentinker[cluster]'") from error


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that writes.

    Raises:
        StorageError, UnavailableError: see `translated`.
    """
    with translated(), engine.connect().execution_options(**_WRITING) as connection, connection.begin():
        yield connection


@contextmanager
def translated() -> Iterator[None]:
    """Database errors that are not bugs become ours.

    Raises:
        StorageError: the disk is full, or cannot be written.
        UnavailableError: the database cannot be reached, or is locked.
        InvalidRequestError: a text that the database cannot hold.
    """
    try:
        yield
    except DBAPIError as error:
        words = " ".join(str(error.orig).split())
        if any(full in words.lower() for full in _FULL):
            raise StorageError(f"the scheduler's store cannot be written: {words}", hint="free space on its disk") from error
        if isinstance(error, DataError):
            raise InvalidRequestError("the scheduler's store cannot hold this text") from error
        if isinstance(error.orig, sqlite3.Error):  # which calls a missing table operational, too
            away = any(word in words for word in _AWAY)
        else:
            away = isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated
        if away:
            raise UnavailableError(f"the scheduler's store does not answer: {words}") from error
        raise


def migrate(engine: Engine) -> None:
    """Bring the schema up to this code's, in one transaction. A database from before migrations is taken over.

    Raises:
        ConfigError: the database was written by a newer version, or is some other program's.
        StorageError, UnavailableError: see `translated`.
    """
    config = Config()
    config.set_main_option("script_location", "opentinker.scheduler:migrations")
    config.set_main_option("version_locations", "opentinker.scheduler.migrations:versions")
    config.set_main_option("path_separator", "newline")
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    with writing(engine) as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        config.attributes["connection"] = connection
        tables = set(inspect(connection).get_table_names())
        if "alembic_version" in tables:
            found = set(connection.execute(text("SELECT version_num FROM alembic_version")).scalars())
            if not found <= known:
                raise ConfigError(
                    f"the scheduler's database has schema {', '.join(sorted(found - known))}, which this version does not know",
                    hint="a newer OpenTinker wrote it: upgrade, or use another state folder or database",
                )
            if found == set(scripts.get_heads()):
                return
        elif {"jobs", "servers", "policies", "events", "api_keys"} <= tables:
            command.stamp(config, FIRST)
        elif tables:
            raise ConfigError(
                f"the database holds tables that are not OpenTinker's: {', '.join(sorted(tables))}",
                hint="give the scheduler a database of its own",
            )
        command.upgrade(config, "head")
    logger.info("event=migrated schema=%s", ",".join(scripts.get_heads()))


class WriterLock:
    """One scheduler per PostgreSQL database: a session that holds an advisory lock while this object is open.

    SQLite needs none: its file lies in a state folder, which one cluster holds.
    """

    def __init__(self, engine: Engine) -> None:
        """Raises: ConflictError when another scheduler uses the database."""
        self._engine = engine
        self._needed = engine.dialect.name == "postgresql"
        self._connection: Connection | None = None
        if self._needed and not self._take(PATIENCE_S):
            raise ConflictError(
                "another scheduler uses this database", hint="stop it, or give each cluster a database of its own"
            )

    def check(self) -> None:
        """Make sure before a write that the lock is held. It goes with its session, which a restart of the database ends, or
        somebody who ends sessions; then it is taken again, if it is free.

        Raises:
            UnavailableError: another scheduler has it now, or the database does not answer. Nothing may be written.
        """
        if not self._needed:
            return
        if self._connection is not None:
            try:
                self._connection.execute(text("SELECT 1"))
                return
            except DBAPIError as error:
                logger.warning("event=writer_lock_lost error=%s", type(error.orig).__name__)
                self.release()
        if not self._take(0.0):
            raise UnavailableError(
                "another scheduler has taken over this one's database, so this one writes nothing any more",
                hint="stop one of the two; whichever is left goes on by itself",
            )
        logger.warning("event=writer_lock_taken_again")

    def release(self) -> None:
        """Let go of the lock; `check` takes it again."""
        if self._connection is not None:
            self._connection.invalidate()  # closes the session, and with it goes the lock
            self._connection.close()
            self._connection = None

    def _take(self, patience_s: float) -> bool:
        with translated():
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            deadline = time.monotonic() + patience_s
            try:
                while not connection.execute(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": WRITER_LOCK}).scalar():
                    if time.monotonic() >= deadline:
                        connection.close()
                        return False
                    time.sleep(0.2)
            except BaseException:
                connection.close()
                raise
        self._connection = connection
        return True
