"""What the scheduler remembers. A policy binds a job to a server, so the three are kept apart."""

from dataclasses import dataclass
from typing import Any

from opentinker.scheduler.states import JobState, ServerState


@dataclass(frozen=True)
class Job:
    """Times are Unix seconds."""

    id: str
    owner: str
    name: str
    kind: str
    state: JobState
    config: dict[str, Any]
    run_dir: str
    gpus: float
    cpu_slots: int
    created_at: float
    started_at: float | None = None
    """When it became RUNNING."""
    ended_at: float | None = None
    cause: str = ""
    """Why it FAILED or was CANCELLED, in one line."""
    lease_expires_at: float | None = None
    """Interactive jobs only: a job without a lease is driven by the cluster."""
    idempotency_key: str | None = None
    code_sha256: str | None = None
    """Of the user's code, unpacked in run_dir/code."""


@dataclass(frozen=True)
class Server:
    """One base model on one node, and what it occupies there until it is STOPPED."""

    id: str
    state: ServerState
    base_model: str
    node_id: str
    gpus: float
    cpu_slots: int
    endpoint: str = ""
    worker_pid: int | None = None
    front_pid: int | None = None


@dataclass(frozen=True)
class Policy:
    """Trainable weights of a job on a server. Its token is derived from its id (`auth.policy_token`)."""

    id: str
    job_id: str
    server_id: str


@dataclass(frozen=True)
class Event:
    """Something that happened to a job; the list of them explains it."""

    job_id: str
    at: float
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class ApiKey:
    """`digest` is `auth.key_digest` of the key."""

    name: str
    owner: str
    digest: str


@dataclass(frozen=True)
class LiveJob:
    """What a look at the cluster needs of a job that has not ended: few columns, because there may be thousands."""

    id: str
    owner: str
    state: JobState
    gpus: float
    cpu_slots: int
    created_at: float
    lease_expires_at: float | None


@dataclass(frozen=True)
class PastUse:
    """What an ended job held, and from when to when."""

    owner: str
    gpus: float
    cpu_slots: int
    begin: float
    end: float


Record = Job | Server | Policy | Event | ApiKey
