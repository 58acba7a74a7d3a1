"""The state machines of jobs and servers. Pure: an illegal move raises, everything else is a lookup."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from opentinker.errors import ConflictError


class JobState(StrEnum):
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return not JOB_MOVES[self]


class ServerState(StrEnum):
    """STOPPED means that its processes are gone and its GPUs' memory is back: only then is what it held free again."""

    STARTING = "STARTING"
    READY = "READY"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


JOB_MOVES: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.FAILED, JobState.CANCELLED}),
    # Back to QUEUED: a restart.
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.COMPLETED, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
SERVER_MOVES: Mapping[ServerState, frozenset[ServerState]] = {
    ServerState.STARTING: frozenset({ServerState.READY, ServerState.STOPPING}),
    ServerState.READY: frozenset({ServerState.STOPPING}),
    ServerState.STOPPING: frozenset({ServerState.STOPPED}),
    ServerState.STOPPED: frozenset(),
}
S = TypeVar("S", JobState, ServerState)


def _move(moves: Mapping[S, frozenset[S]], what: str, now: S, to: S) -> S:
    if to not in moves[now]:
        raise ConflictError(f"a {what} that is {now} cannot become {to}")
    return to


def move_job(now: JobState, to: JobState) -> JobState:
    """Raises: ConflictError when the move is illegal."""
    return _move(JOB_MOVES, "job", now, to)


def move_server(now: ServerState, to: ServerState) -> ServerState:
    """Raises: ConflictError when the move is illegal."""
    return _move(SERVER_MOVES, "server", now, to)
