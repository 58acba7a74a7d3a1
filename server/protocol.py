"""What crosses from the HTTP front to the worker: work items in batches, completions in batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from opentinker.client.messages import IntArray, SampleRequest

COMMANDS = frozenset(
    {
        "create",
        "delete",
        "forward",
        "forward_backward",
        "optim_step",
        "train_step",
        "publish",
        "save",
        "load",
        "load_weights",
    }
)


@dataclass(frozen=True)
class SampleWork:
    """A sample request under an operation id."""

    operation: str
    policy: str
    request: SampleRequest


@dataclass(frozen=True)
class CommandWork:
    """A command, already in its policy's order. `args` is the decoded wire body."""

    operation: str
    policy: str
    command: str
    args: dict[str, Any] = field(default_factory=dict)


Work = SampleWork | CommandWork


@dataclass(frozen=True)
class Completion:
    """The end of an operation: `result` is a wire tree, or `problem` a problem document."""

    operation: str
    result: Any = None
    problem: dict[str, Any] | None = None


class WorkerClient(Protocol):
    """How a front reaches its worker: in this process for tests, or a Ray actor."""

    async def submit(self, work: Sequence[Work]) -> None:
        """Hand over a batch.

        Raises:
            ServerLostError: the worker is gone.
        """
        ...

    async def upload(self, images: Sequence[bytes]) -> dict[str, IntArray]:
        """Keep images for what will name them; each one's tokens by its hash. Does not wait for work.

        Raises:
            InvalidRequestError: an image is broken or too large, or the model takes none.
            ServerLostError: the worker is gone.
        """
        ...

    async def collect(self, timeout_s: float) -> list[Completion]:
        """Completions since the last call; waits up to `timeout_s` for the first.

        Raises:
            ServerLostError: the worker is gone.
        """
        ...
