"""What a lane asks of CUDA, of which a stand-in writes it down; the rest of streaming is in test_state_stream.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opentinker.server.trainer.lanes import lanes_of

CUDA = torch.device("cuda:1")


class Cuda:
    """The streams, events and the current stream of a thread."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.streams = 0
        self.current = self._stream("main")

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.said.append(f"{name} waits for {event.after}"),
            synchronize=lambda: self.said.append(f"host waits for {name}"),
        )

    def Stream(self, device: torch.device) -> Any:
        assert device == CUDA
        self.streams += 1
        return self._stream(f"side {self.streams}")

    def Event(self) -> Any:
        event = SimpleNamespace(after=None)
        event.record = lambda stream: setattr(event, "after", stream.name)
        return event

    def current_stream(self, device: torch.device) -> Any:
        assert device == CUDA
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def test_copies_have_streams_of_their_own_beside_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    for name in ("Stream", "Event", "current_stream", "stream"):
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    lanes = lanes_of(CUDA)
    for lane in (lanes.fetching, lanes.computing, lanes.returning):
        lane.run(lambda: cuda.said.append(f"work on {cuda.current.name}"))
    lanes.computing.wait(lanes.fetching.mark())
    lanes.returning.wait(lanes.computing.mark())
    lanes.finish()
    assert cuda.said == [
        "work on side 1",
        "work on main",
        "work on side 2",
        "main waits for side 1",
        "side 2 waits for main",
        "host waits for side 1",
        "host waits for main",
        "host waits for side 2",
    ]


def test_without_cuda_work_is_done_at_once() -> None:
    lanes, done = lanes_of(torch.device("cpu")), list[int]()
    lanes.fetching.run(lambda: done.append(1))
    assert done == [1]
    lanes.computing.wait(lanes.fetching.mark())
    lanes.finish()
