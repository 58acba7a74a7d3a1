"""The answers of the API, as its schema describes them. They document and are tested against; they do not run per request."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from opentinker.scheduler.states import JobState, ServerState


class _View(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ServerView(_View):
    id: str
    state: ServerState
    endpoint: str
    """Where it answers, for who can reach it."""
    proxy: str
    """Where it answers behind the scheduler's own address."""
    policy: str
    token: str | None = None
    """To the job's owner only, not in lists, and not after the job's end."""
    pid: int | None
    front_pid: int | None
    base_model: str
    gpus: float
    cpu_slots: int


class JobView(_View):
    """Times are Unix seconds."""

    id: str
    name: str
    owner: str
    kind: str
    state: JobState
    config: dict[str, Any]
    cause: str
    created_at: float
    started_at: float | None
    ended_at: float | None
    waiting_for: str
    lease_s: float | None
    """Null for jobs without a lease."""
    run_dir: str
    server: ServerView | None
    servers: dict[str, ServerView]
    """Those beside its own, by name; the token tells them apart behind `proxy`."""


class JobPage(_View):
    jobs: list[JobView]
    next: str | None
    """The `cursor` of the page after this one; null on the last."""


class EventView(_View):
    at: float
    kind: str
    detail: str


class Events(_View):
    events: list[EventView]


class Logs(_View):
    text: str
    offset: int
    """Where to go on, in bytes."""
    finished: bool


class CheckpointView(_View):
    name: str
    version: int | None
    """The policy's, when it was saved; null for those of older releases."""
    policy: str | None
    """The further policy that it is of; null: the job's own."""
    ref: str
    """user/job/name@version, or user/job/policy/name@version: what `start_from` takes."""
    kind: str
    """full or lora."""
    base_model: str
    step: int
    """Optimizer steps behind its weights."""
    created_at: float
    bytes: int
    tags: list[str]
    """Other names that it was given; each can be used in place of `name@version`."""


class Checkpoints(_View):
    checkpoints: list[CheckpointView]
    """Newest first."""


class NamedCheckpoints(_View):
    checkpoints: list[str]
    """Their exact addresses, in the order in which they were asked for."""


class ModelView(_View):
    name: str
    path: str
    """A directory or a hub id; empty for a built-in model."""
    source: str
    """built-in, directory or hub."""
    parameters: int | None
    dtype: str | None
    """Of its files, or the one that it is registered for; null where it is not known here."""
    model_type: str | None


class Models(_View):
    models: list[ModelView]


class MetricRows(_View):
    rows: list[dict[str, Any]]
    next: int
    finished: bool


class _Who(_View):
    job: str | None
    """Null for another user's job."""
    name: str
    kind: str
    owner: str
    state: JobState
    gpus: float
    cpu_slots: int
    since: float
    """Held: when the job began to run; waiting: when it was submitted."""


class Held(_Who):
    server_state: ServerState
    unhealthy: str
    """Why what it holds cannot be freed, although the job has ended; empty while all is well."""


class Waiting(_Who):
    waiting_for: str


class GpuUseView(_View):
    index: int
    name: str
    busy: float
    """Share of the last moment with a kernel running, from 0 to 1."""
    memory_used_bytes: int
    memory_bytes: int


class NodeView(_View):
    id: str
    name: str
    gpus: float
    free_gpus: float
    cpu_slots: int
    free_cpu_slots: int
    held: list[Held]
    gpu_use: list[GpuUseView]
    """Empty where NVML does not tell."""


class ClusterView(_View):
    nodes: list[NodeView]
    queue: list[Waiting]
    """The first of those who wait, oldest first."""
    queued: int
    running: int


class Problem(_View):
    """RFC 9457; `code` is stable."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    hint: str
