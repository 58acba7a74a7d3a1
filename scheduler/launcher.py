"""The seam between decisions and processes: what a reconciler asks of whatever runs servers and drivers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from opentinker.errors import UnavailableError
from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.placement import Allocation, Demand, Node
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.warming import NextJob


class NotPlacedError(UnavailableError):
    """A server got no place to start on: its node was gone, or Ray did not grant what was counted as free."""


@dataclass(frozen=True)
class ServerSpec:
    """A server to start, and the policy to create on it."""

    server_id: str
    job_id: str
    policy_id: str
    token: str = field(repr=False)
    node_id: str
    demand: Demand
    config: dict[str, Any]
    """The fields of `ServerConfig`."""
    lora: dict[str, Any] | None
    seed: int
    checkpoint_root: str
    log_path: str
    """The file that the server's processes append their output to."""
    start_from: str = ""
    """The folder of the checkpoint whose weights the policy starts from."""
    starts: dict[str, str] = field(default_factory=dict)
    """Address -> folder of the checkpoints that policies may load on demand."""
    taken: tuple[str, ...] = ()
    """Names that no policy may be created under: those of the policies that the job's further servers begin with."""
    head: str = "lm"
    critic: dict[str, Any] | None = None
    """The fields of `LoraConfig` of the policy's critic, if it has one."""
    mark: str = ""
    """What its processes carry in place of the job's id, by which they are found: another server of the job may be on the node,
    and stop at its own pace. Empty for the job's own."""
    rollout: Allocation | None = None
    """Where the rollout engine has a process of its own; None: in the trainer's."""


@dataclass(frozen=True)
class Launched:
    """A server that answers."""

    endpoint: str
    worker_pid: int
    front_pid: int
    engine_gpus: tuple[int, ...] = ()
    """Indexes of the GPUs of an engine with a process of its own."""


@dataclass(frozen=True)
class Probe:
    """What a look at a launched server found."""

    fault: str = ""
    """Why it is dead; empty while it lives."""
    idle_s: float = 0.0
    """For how long it has had nothing to do."""


@dataclass(frozen=True)
class DriverSpec:
    job_id: str
    server_id: str
    node_id: str
    kind: str
    config: dict[str, Any]
    """The fields of the job's config."""
    endpoint: str
    policy_id: str
    token: str = field(repr=False)
    run_dir: str
    code_dir: str | None
    resume: bool
    """An earlier driver of this job was lost: go on from the last checkpoint."""
    secrets: dict[str, tuple[str, str]] = field(default_factory=dict, repr=False)
    """{environment variable: (secret's name, its value)}. The driver alone gets them, with the call that starts it."""
    servers: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    """{"endpoint", "token", "policy"} of each server beside the job's own, by name."""
    refusal: str = ""
    """Why no driver may be started for this job any more; one that runs goes on."""


class Launcher(Protocol):
    async def nodes(self) -> list[Node]:
        """The living nodes."""
        ...

    async def request_nodes(self, bundles: Sequence[Demand]) -> None:
        """Ask the cluster's autoscaler, if it has one, to make room for all of these at once, with what is there already. It
        holds until the next request."""
        ...

    async def prestart(self, job: NextJob, keep_s: float) -> None:
        """Start the processes that a queued job's server will need, so that `launch` finds them; they end by themselves after
        `keep_s`.

        Raises:
            NoPrestartError: it never can.
            Exception: of any kind; nothing depends on it.
        """
        ...

    async def forget(self, job_id: str, node_id: str) -> None:
        """End what `prestart` started on a node. Raises: anything; they end by themselves, only later."""
        ...

    def is_here(self, node_id: str) -> bool:
        """Whether a node is the one of this process."""
        ...

    async def gpu_use(self, node_ids: Collection[str] | None = None) -> dict[str, list[GpuUse]]:
        """How busy the GPUs of these nodes are, by default of all; nodes that cannot tell are left out."""
        ...

    async def launch(self, spec: ServerSpec) -> Launched:
        """Start a server and create its policy, or go on where an earlier scheduler's launch was cut off. Cancelling it is
        fine; `stop_server` cleans up in any case.

        Raises:
            NotPlacedError: there was no place for it.
            OpenTinkerError: it did not start; the message is fit for the job's cause.
        """
        ...

    def gpus_of(self, server_id: str) -> tuple[int, ...]:
        """Indexes of the GPUs that a server was given on its node; empty as long as that is not known."""
        ...

    async def probe(self, server_id: str) -> Probe:
        """How a launched server is. Also one that an earlier scheduler launched."""
        ...

    async def save(self, server_id: str, policy_id: str, name: str) -> None:
        """Have a server write a checkpoint, after what it does now.

        Raises:
            OpenTinkerError: it could not, or not in time.
        """
        ...

    async def name_checkpoints(self, server_id: str, starts: Mapping[str, str]) -> None:
        """Let the policies of a server load further checkpoints: address -> folder. To do it twice is to do it once.

        Raises:
            OpenTinkerError: the server could not be told.
        """
        ...

    async def drive(self, spec: DriverSpec) -> DriverOutcome:
        """Run a server's driver to its end, whatever that is; one that already runs, or ran, is not run again."""
        ...

    async def stop_driver(self, server_id: str) -> None:
        """Kill a server's driver, if it has one."""
        ...

    async def stop_server(self, server_id: str, marks: list[str], where: Sequence[Allocation], *, graceful: bool) -> str:
        """Stop a server (also one that is half started, or unknown after a restart) and wait for the processes with its marks
        (the ids of its jobs, or `ServerSpec.mark`) to be gone, and for the memory of GPUs that it had to itself.

        Returns:
            Why what it held is not free yet; empty when it is. Call again.
        """
        ...
