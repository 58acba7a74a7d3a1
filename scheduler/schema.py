"""The tables. A change here needs a migration beside it (`scheduler/migrations/versions`); a test compares the two."""

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Enum,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

from opentinker.scheduler.records import ApiKey, AuditEvent, Event, Job, Policy, Scope, Secret, Server, ServerAmounts, User
from opentinker.scheduler.states import JobState, ServerState


class Scopes(TypeDecorator[frozenset[Scope]]):
    """A set of scopes as their names, sorted."""

    impl = String(100)
    cache_ok = True

    def process_bind_param(self, value: Iterable[Scope] | None, dialect: Dialect) -> str | None:
        return None if value is None else " ".join(sorted(value))

    def process_result_value(self, value: str | None, dialect: Dialect) -> frozenset[Scope] | None:
        return None if value is None else frozenset(Scope(name) for name in value.split())


class Amount(TypeDecorator[float]):
    """A number of GPUs; whole ones come back as integers."""

    impl = Float
    cache_ok = True

    def process_result_value(self, value: float | None, dialect: Dialect) -> float | None:
        return int(value) if value is not None and float(value).is_integer() else value


class Indexes(TypeDecorator[tuple[int, ...]]):
    """Small numbers, as text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Iterable[int] | None, dialect: Dialect) -> str | None:
        return None if value is None else " ".join(map(str, value))

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[int, ...]:
        return tuple(map(int, (value or "").split()))


class Further(TypeDecorator[tuple[ServerAmounts, ...]]):
    """What servers beside a job's own occupy, as text; empty for the many jobs that have none."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Iterable[ServerAmounts] | None, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(list(value)) if value else ""

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[ServerAmounts, ...]:
        return tuple(ServerAmounts(*amounts) for amounts in json.loads(value)) if value else ()


def _row() -> Column[int]:
    """Keeps the order of insertion: of submissions among jobs, of happenings among events. SQLite counts in INTEGER only."""
    return Column("row", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)


meta = MetaData()
jobs = Table(
    "jobs",
    meta,
    _row(),
    Column("id", String(64), unique=True, nullable=False),
    Column("owner", String(200), nullable=False, index=True),
    Column("name", String(200), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("state", Enum(JobState, native_enum=False, length=16), nullable=False, index=True),
    Column("config", JSON, nullable=False),
    Column("run_dir", Text, nullable=False),
    Column("gpus", Amount, nullable=False),
    Column("cpu_slots", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("cause", Text, nullable=False),
    Column("lease_expires_at", Float),
    Column("idempotency_key", String(200)),
    Column("code_sha256", String(64)),
    Column("rollout_gpus", Amount, nullable=False, server_default="0"),
    Column("rollout_cpu_slots", Integer, nullable=False, server_default="0"),
    Column("further", Further, nullable=False, server_default=""),
    UniqueConstraint("owner", "idempotency_key"),
)
servers = Table(
    "servers",
    meta,
    Column("id", String(64), primary_key=True),
    Column("state", Enum(ServerState, native_enum=False, length=16), nullable=False, index=True),
    Column("base_model", Text, nullable=False),
    Column("node_id", String(128), nullable=False),
    Column("gpus", Amount, nullable=False),
    Column("cpu_slots", Integer, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("worker_pid", Integer),
    Column("front_pid", Integer),
    Column("gpu_indexes", Indexes, nullable=False, server_default=""),
    Column("rollout_gpus", Amount, nullable=False, server_default="0"),
    Column("rollout_cpu_slots", Integer, nullable=False, server_default="0"),
    Column("rollout_node_id", String(128), nullable=False, server_default=""),
    Column("rollout_gpu_indexes", Indexes, nullable=False, server_default=""),
    Column("name", String(64), nullable=False, server_default=""),
)
policies = Table(
    "policies",
    meta,
    Column("id", String(64), primary_key=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False, index=True),
    Column("server_id", ForeignKey("servers.id"), nullable=False, index=True),
)
events = Table(
    "events",
    meta,
    _row(),
    Column("job_id", ForeignKey("jobs.id"), nullable=False, index=True),
    Column("at", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("detail", Text, nullable=False),
)
users = Table(
    "users",
    meta,
    Column("name", String(64), primary_key=True),
    Column("scopes", Scopes, nullable=False),
    Column("share", Float, nullable=False),
    Column("max_gpus", Amount),
    Column("max_jobs", Integer),
    Column("disabled", Boolean(create_constraint=False), nullable=False),
    Column("created_at", Float, nullable=False),
)
api_keys = Table(
    "api_keys",
    meta,
    Column("id", String(64), primary_key=True),
    Column("owner", ForeignKey("users.name"), nullable=False, index=True),
    Column("name", String(64), nullable=False),
    Column("scopes", Scopes, nullable=False),
    Column("digest", String(64), nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("last_used_at", Float),
    Column("revoked_at", Float),
)
audit = Table(
    "audit",
    meta,
    _row(),
    Column("at", Float, nullable=False),
    Column("actor", String(64), nullable=False, index=True),
    Column("action", String(64), nullable=False),
    Column("target", String(200), nullable=False),
    Column("address", String(64), nullable=False),
    Column("outcome", String(200), nullable=False),
)
secrets = Table(
    "secrets",
    meta,
    Column("id", String(130), primary_key=True),
    Column("owner", ForeignKey("users.name"), nullable=False, index=True),
    Column("name", String(64), nullable=False),
    Column("sealed", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)
TABLES: dict[type[Any], Table] = {
    Job: jobs,
    Server: servers,
    Policy: policies,
    Event: events,
    User: users,
    ApiKey: api_keys,
    AuditEvent: audit,
    Secret: secrets,
}
KEYS: dict[type[Any], str] = {Job: "id", Server: "id", Policy: "id", User: "name", ApiKey: "id", Secret: "id"}
"""The column that tells a record from others of its kind; kinds without one are only ever added."""
