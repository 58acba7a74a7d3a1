"""What a scheduler is told at its start."""

from pathlib import Path

from opentinker.config.base import Config
from opentinker.config.job import Seconds


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
    server_host: str = "127.0.0.1"
    """Address that the servers' fronts bind."""
    worker_class: str = "opentinker.server.actors:WorkerProcess"
    front_class: str = "opentinker.server.actors:FrontProcess"
    rl_driver: str = "opentinker.training.run:run_rl_job"
    check_model: str = "opentinker.server.models:check_model"
