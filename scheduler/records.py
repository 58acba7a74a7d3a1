"""What the scheduler remembers. A policy binds a job to a server, so the three are kept apart."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from opentinker.scheduler.states import JobState, ServerState


class ServerAmounts(NamedTuple):
    """What a server of a job beside its own occupies; the words are those of `Server`."""

    name: str
    gpus: float = 0
    cpu_slots: int = 0
    rollout_gpus: float = 0
    rollout_cpu_slots: int = 0


@dataclass(frozen=True)
class Job:
    """`gpus` and `cpu_slots` are what all its servers occupy. Times are Unix seconds."""

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
    """Why it ended, unless its work was done; in one line."""
    lease_expires_at: float | None = None
    """None: it has no lease, and goes on without a client."""
    idempotency_key: str | None = None
    code_sha256: str | None = None
    """Of the user's code, unpacked in run_dir/code."""
    rollout_gpus: float = 0
    """Of `gpus`, those of its own server's rollout engine, if that is split from its trainer."""
    rollout_cpu_slots: int = 0
    further: tuple[ServerAmounts, ...] = ()
    """Of `gpus` and `cpu_slots`, those of the servers beside its own."""


@dataclass(frozen=True)
class Server:
    """One base model on one node, or on two if its rollout engine is split from its trainer, and what it occupies there until
    it is STOPPED."""

    id: str
    """Of one beside the job's own: that one's id, "-" and its name."""
    state: ServerState
    base_model: str
    node_id: str
    gpus: float
    cpu_slots: int
    endpoint: str = ""
    worker_pid: int | None = None
    front_pid: int | None = None
    gpu_indexes: tuple[int, ...] = ()
    """Of the GPUs that it was given; empty before it is READY."""
    rollout_gpus: float = 0
    """Of `gpus`, those of an engine that is split from the trainer, which are on `rollout_node_id`."""
    rollout_cpu_slots: int = 0
    rollout_node_id: str = ""
    rollout_gpu_indexes: tuple[int, ...] = ()
    name: str = ""
    """Which of its job's servers it is; empty for the job's own."""


@dataclass(frozen=True)
class Policy:
    """Trainable weights of a job on a server. Its token is derived from its id (`auth.policy_token`)."""

    id: str
    job_id: str
    server_id: str


STARTING = "starting"
"""The kind of the event of a job that is given resources, and a server to come."""
RESTARTING = "restarting"
"""The kind of the event of a job that goes back into the queue after it was lost; they are counted."""
RETURNED = "returned"
"""The same of a job whose server could not even be placed."""
STOP_REQUESTED = "stop_requested"
"""The kind of the event that asks for an end with a checkpoint; its detail becomes the cause."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a job; the list of them explains it."""

    job_id: str
    at: float
    kind: str
    detail: str = ""


class Scope(StrEnum):
    """What a key may do. `submit` and `admin` may read, too."""

    READ = "read"
    """See its user's own jobs."""
    SUBMIT = "submit"
    """Submit jobs, and renew, complete, stop and cancel them; manage its user's own secrets."""
    ADMIN = "admin"
    """All of that for everybody's jobs, and manage users and keys."""


@dataclass(frozen=True)
class User:
    name: str
    scopes: frozenset[Scope]
    """The most that a key of this user may do."""
    share: float = 1.0
    """Weight in fair sharing of the cluster."""
    max_gpus: float | None = None
    max_jobs: int | None = None
    """Held at once; None: no limit of this user's own."""
    disabled: bool = False
    """None of the user's keys is valid."""
    created_at: float = 0.0


@dataclass(frozen=True)
class ApiKey:
    """`digest` is `auth.key_digest` of the key, which itself is kept nowhere."""

    id: str
    owner: str
    name: str
    scopes: frozenset[Scope]
    digest: str = field(repr=False)
    created_at: float = 0.0
    last_used_at: float | None = None
    """To the minute."""
    revoked_at: float | None = None


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
    rollout_gpus: float
    rollout_cpu_slots: int
    further: tuple[ServerAmounts, ...]


@dataclass(frozen=True)
class PastUse:
    """What an ended job held, and from when to when."""

    owner: str
    gpus: float
    cpu_slots: int
    begin: float
    end: float


@dataclass(frozen=True)
class AuditEvent:
    """Who did what to whom, from where, and how it went; never changed."""

    at: float
    actor: str
    """A user's name; empty for somebody without a valid key."""
    action: str
    target: str = ""
    address: str = ""
    outcome: str = "ok"


@dataclass(frozen=True)
class Secret:
    """A user's secret; `sealed` is `vault.seal` of its value, which itself is kept nowhere."""

    id: str
    """OWNER/NAME."""
    owner: str
    name: str
    sealed: str = field(repr=False)
    created_at: float = 0.0
    updated_at: float = 0.0


Record = Job | Server | Policy | Event | User | ApiKey | AuditEvent | Secret
