"""What crosses between a server's worker and an engine that has a process of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opentinker.client.messages import SampleRequest, SampleResult
from opentinker.errors import OpenTinkerError
from opentinker.server.engine.base import AdapterId, SampleRefused


@dataclass(frozen=True)
class Add:
    """A request, with the files of the images in its prompt."""

    request: SampleRequest
    adapter: AdapterId | None
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Call:
    """One of the engine's methods, whose answer is waited for."""

    number: int
    method: str
    args: tuple[Any, ...]
    images: tuple[bytes, ...] = ()


Message = Add | Call


@dataclass(frozen=True)
class Returned:
    """The end of a call."""

    number: int
    value: Any = None
    error: OpenTinkerError | None = None


@dataclass(frozen=True)
class StepFailed:
    """The engine failed, and has given up all requests that it had."""

    error: OpenTinkerError


Answer = SampleResult | SampleRefused | Returned | StepFailed


@dataclass(frozen=True)
class EngineInfo:
    """What the worker has to know of an engine that it does not hold."""

    max_model_len: int
    ranks: int
    """Processes, or devices, that each hold a part of the model."""
    pid: int
    seconds: float = 0.0
    """What it took to load."""
    device: str = "cpu"
    """"cpu" or "cuda"."""


class EngineLink(Protocol):
    """How a worker reaches its engine. `send` and `collect` may be called from two threads at once."""

    def send(self, messages: Sequence[Message]) -> None:
        """Hand messages over; they are worked off in the order of the calls.

        Raises:
            ServerLostError: the engine's process is gone.
        """
        ...

    def collect(self, timeout_s: float) -> Sequence[Answer]:
        """Answers since the last call, in their order; waits up to `timeout_s` for the first.

        Raises:
            ServerLostError: the engine's process is gone.
        """
        ...
