"""What a scheduler is told at its start."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from opentinker.config.base import Config, Seconds

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


HUB = "hub:"
"""Before the hub id of a registered model that a server has to download."""
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def _path_or_hub_id(path: str) -> str:
    if not path.startswith("/") and not _HUB_ID.fullmatch(path):
        raise ValueError(f"'{path}' is neither an absolute path nor a hub id such as Qwen/Qwen3-0.6B")
    return path


def _folder_or_url(text: str) -> str:
    if "://" not in text and not text.startswith("/"):
        raise ValueError(f"'{text}' is neither an absolute path nor a URL such as s3://bucket/path")
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise ValueError("a URL must not hold credentials; give them as its fsspec package reads them from the environment")
    return text


class RegisteredModel(Config):
    """A base model that jobs may name."""

    path: Annotated[str, AfterValidator(_path_or_hub_id)]
    """A directory with a Hugging Face model, the same on every node; or a hub id, which the node that hosts a
    server downloads."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """The one `trainer.dtype` that jobs may use it with; None = any."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Parameters; None = counted in its files, where they are here."""

    @property
    def location(self) -> str:
        """What a server is told to load."""
        return self.path if self.path.startswith("/") else HUB + self.path


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
    """Each job writes into its own folder here, `<user>/<job>`."""
    storage_url: Annotated[str, AfterValidator(_folder_or_url)] | None = None
    """A folder that all nodes share, in place of `runs_dir`; or an fsspec URL (`s3://bucket/path`, `file:///path`), to which
    what jobs write below `runs_dir` is copied (docs/storage.md)."""
    lease_s: Seconds = 30.0
    """A job with a lease whose client sends no heartbeat for this long is cancelled."""
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
    prestart_jobs: Annotated[int, Field(ge=0)] = 4
    """For how many of the jobs that wait, processes are started ahead. Each takes about a second of a core and 100 MB."""
    placement_timeout_s: Seconds = 30.0
    """How long Ray may take to grant what the scheduler counted as free."""
    start_timeout_s: Seconds = 1800.0
    """Longest start of a server; loading a large model takes its time."""
    install_timeout_s: Seconds = 900.0
    """Longest installation of what a submitted environment requires."""
    graceful_stop_s: Seconds = 3.0
    """How long a server may take to stop by itself before its processes are killed."""
    flush_s: Seconds = 60.0
    """With a `storage_url` that is a URL: how long a server that stops may take before that to copy the job's last files."""
    arrival_timeout_s: Seconds = 10.0
    """How long a stop waits for a process that is just being started, to kill it rather than miss it."""
    kill_after_s: Seconds = 1.0
    """How long processes that Ray was told to kill may take to vanish before they are killed by process id."""
    exit_timeout_s: Seconds = 10.0
    """How long a process killed like that, and then its GPUs' memory, may take to go; until then its place stays taken."""
    gpu_free_bytes: Annotated[int, Field(ge=0)] | None = 2 * 2**30
    """A whole GPU is free again when NVML shows no more than this in use; None = as soon as the processes are gone."""
    last_checkpoint_s: Seconds = 300.0
    """How long the checkpoint may take that is written before a job is stopped, or ended at one of its limits."""
    server_host: str = "auto"
    """Address that the servers' fronts bind; 'auto' is loopback for a cluster on one machine, else the front's node's own."""
    worker_class: str = "opentinker.server.actors:WorkerProcess"
    front_class: str = "opentinker.server.actors:FrontProcess"
    engine_class: str = "opentinker.server.engine_process:EngineProcess"
    """The engine of a job in the layout `split`; otherwise it is a part of the worker."""
    drivers: dict[str, str] = Field(
        default_factory=lambda: {
            "rl": "opentinker.training.run:run_rl_job",
            "sft": "opentinker.training.run:run_sft_job",
            "preference": "opentinker.training.run:run_preference_job",
        }
    )
    """By kind of job, what drives it on the cluster."""
    check_model: str = "opentinker.server.models:check_model"
    known_models: str = "opentinker.server.models:known_models"
    describe_model: str = "opentinker.server.models:describe_model"
    models: dict[str, RegisteredModel] = Field(default_factory=dict)
    """By the name that jobs use, beside the built-in ones (docs/storage.md)."""
    only_registered_models: bool = False
    """Jobs may not name a directory of their own choice."""

    @property
    def run_root(self) -> Path:
        """The folder of all runs."""
        return self.runs_dir if self.storage_url is None or self.remote_storage else Path(self.storage_url)

    @property
    def remote_storage(self) -> str:
        """The URL that runs are copied to; empty if they are not."""
        return self.storage_url if self.storage_url is not None and "://" in self.storage_url else ""
