"""What a scheduler is told at its start."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from opentinker.config.base import Config
from opentinker.config.job import Seconds

MIN_SHARE = 1e-3
"""Smallest share of an owner: shares are divided by each other."""


class Quota(Config):
    """What the jobs of one owner may hold at once; None = no limit. Jobs above it wait, and hold nobody up."""

    gpus: Annotated[float, Field(ge=0.0)] | None = None
    """GPUs."""
    jobs: Annotated[int, Field(ge=0)] | None = None
    """Jobs that hold resources."""
    max_priority: Annotated[int, Field(ge=-10, le=10)] = 10
    """Highest `scheduling.priority` that the owner may ask for."""

    @property
    def limits(self) -> bool:
        return self.gpus is not None or self.jobs is not None


class NodeType(Config):
    """A kind of node that Ray's autoscaler can add to the cluster."""

    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of one such node."""
    cpu_slots: Annotated[int, Field(ge=0)] = 0
    """CPU slots of one such node (its amount of the Ray resource `cpu_slot`)."""
    max: Annotated[int, Field(ge=1)] = 1
    """Most of them that there can be."""


class Settings(Config):
    """Import paths are `module:name`; they are resolved in the cluster's processes, never when this package is imported."""

    state_dir: Path
    """Database, server secret, API key; readable by its owner only."""
    database_url: str | None = None
    """`sqlite:///path`, or `postgresql://user@host/name` (a password goes into ~/.pgpass or `?passfile=`). Default: a SQLite
    file in the state folder."""
    runs_dir: Path
    """Each job writes into its own folder here."""
    lease_s: Seconds = 30.0
    """An interactive job that sends no heartbeat for this long is cancelled."""
    reconcile_s: Seconds = 0.5
    """Longest pause between two looks at the cluster."""
    probe_s: Seconds = 0.5
    """Pause between two liveness checks of a server."""
    unresponsive_s: Seconds = 120.0
    """A server process that lives but answers no liveness check for this long counts as dead."""
    quota: Quota = Quota()
    """Of every owner without one of their own."""
    quotas: dict[str, Quota] = Field(default_factory=dict)
    """By owner, in place of `quota`."""
    shares: dict[str, Annotated[float, Field(ge=MIN_SHARE)]] = Field(default_factory=dict)
    """By owner, their weight in fair share; 1.0 for who is not listed."""
    usage_half_life_s: Seconds = 7 * 86400.0
    """Fair share: what was used this long ago counts half."""
    patience_s: Seconds = 86400.0
    """Fair share: a job that has waited this long goes before all new ones of its priority, whatever its owner used."""
    autoscale: bool = False
    """Ask Ray's autoscaler for nodes while jobs wait for some. Nothing comes of it in a cluster without an autoscaler."""
    node_types: tuple[NodeType, ...] = ()
    """With `autoscale`, what can be added: a job that fits such a node is accepted although there is none yet."""
    placement_timeout_s: Seconds = 30.0
    """How long Ray may take to grant what the scheduler counted as free."""
    start_timeout_s: Seconds = 1800.0
    """Longest start of a server; loading a large model takes its time."""
    graceful_stop_s: Seconds = 3.0
    """How long a server may take to stop by itself before its processes are killed."""
    arrival_timeout_s: Seconds = 10.0
    """How long a stop waits for a process that is just being started, to kill it rather than miss it."""
    kill_after_s: Seconds = 1.0
    """How long processes that Ray was told to kill may take to vanish before they are killed by process id."""
    exit_timeout_s: Seconds = 10.0
    """How long a process killed like that may take; one that takes longer keeps its slot."""
    server_host: str = "auto"
    """Address that the servers' fronts bind; 'auto' is loopback for a cluster on one machine, else the front's node's own."""
    worker_class: str = "opentinker.server.actors:WorkerProcess"
    front_class: str = "opentinker.server.actors:FrontProcess"
    rl_driver: str = "opentinker.training.run:run_rl_job"
    check_model: str = "opentinker.server.models:check_model"
