"""Copies to a device and back, and computations there, side by side: CUDA's streams, or, on a CPU, one after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Lane(Protocol):
    """Work that is done in its order. What lanes do has no order between them but where one waits for another."""

    def run(self, work: Callable[[], None]) -> None:
        """Do it when everything before it is done; maybe later."""
        ...

    def mark(self) -> Any:
        """What to `wait` for: all work so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Later work of this lane begins when another's, up to its mark, is done."""
        ...


@dataclass(frozen=True)
class Lanes:
    """Those that state goes through on its way to the device and back."""

    device: torch.device
    fetching: Lane
    computing: Lane
    returning: Lane
    finish: Callable[[], None]
    """Wait until all work is done."""


class AtOnce:
    """A lane of the processor, whose work is done when `run` returns."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        """It is done."""


class CudaLane:
    """A CUDA stream: one of its own, or the one that is current."""

    def __init__(self, device: torch.device, *, current: bool = False) -> None:
        self._device = device
        self._own = None if current else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        self.stream.wait_event(mark)


def lanes_of(device: torch.device) -> Lanes:
    """On CUDA a stream for the copies of each direction, beside the one that is current."""
    if device.type != "cuda":
        lane = AtOnce()
        return Lanes(device, lane, lane, lane, lambda: None)
    fetching, computing, returning = CudaLane(device), CudaLane(device, current=True), CudaLane(device)

    def finish() -> None:
        for each in (fetching, computing, returning):
            each.stream.synchronize()

    return Lanes(device, fetching, computing, returning, finish)
