"""How an environment is hosted."""

from dataclasses import dataclass
from typing import Literal

Isolation = Literal["thread", "process"]


@dataclass(frozen=True)
class HostSettings:
    """Limits of one environment server."""

    workers: int = 2
    """Worker processes that share the sessions; with isolation 'process', how many are kept ready."""
    max_sessions: int = 1024
    """Open sessions; one more is answered 429."""
    isolation: Isolation | None = None
    """'thread': a worker hosts many sessions. 'process': each session has a process of its own. None: what the class says."""
    idle_timeout_s: float = 900.0
    """A session that gets no request for so long is closed."""
    call_timeout_s: float = 300.0
    """The longest deadline that a request may ask for, and the one of requests that ask for none."""
    max_body_bytes: int = 4 * 2**20
    """Of a task or an action; a larger one is refused."""
    drain_s: float = 30.0
    """After SIGTERM, how long open sessions may go on."""
    lease_s: float = 20.0
    """A driver of a run that is coordinated here is lost when it gives no sign of life for so long."""
