"""A whole scheduler with its real HTTP API on a thread, for commands that run in this one."""

import asyncio
import importlib.util
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from opentinker.client.scheduler import SchedulerClient
from opentinker.scheduler.api import create_app
from opentinker.server.listener import Listener

_spec = importlib.util.spec_from_file_location("scheduler_world", Path(__file__).parents[1] / "scheduler" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
scheduler_world = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scheduler_world)


class LiveWorld:
    """The scheduler of `tests/unit/scheduler`, behind an address. Work on it is done on its own loop: `do`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = scheduler_world.World(folder)
        self.url = ""
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._listener: Listener | None = None
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, Any] | Callable[[], Any]) -> Any:
        async def called() -> Any:
            return work() if callable(work) else await work

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(30)

    def up(self) -> None:
        """Start it, or start it again on the same port with the same state."""

        async def serve() -> str:
            self.world.boot()
            self._listener = Listener(create_app(self.world.service), "127.0.0.1", self.port)
            return await self._listener.start()

        self.url = self.do(serve())
        self.port = int(self.url.rpartition(":")[2])
        (self.folder / "cluster.json").write_text(json.dumps({"url": self.url, "pid": 1}))

    def down(self) -> None:
        async def stop() -> None:
            if self._listener is not None:
                await self._listener.stop()
                self._listener = None
                await self.world.crash()

        self.do(stop())

    def close(self) -> None:
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def client(self) -> SchedulerClient:
        return SchedulerClient(self.url, (self.folder / "api_key").read_text())

    def submit(self, kind: str = "rl", **config: Any) -> dict[str, Any]:
        rest = {"environment": {"name": "arithmetic"}} if kind == "rl" else {}
        return self.client().submit({"kind": kind, "base_model": "some-model", **rest, **config})

    def reach(self, job: dict[str, Any], *states: str) -> dict[str, Any]:
        client = self.client()
        while job["state"] not in states:
            job = client.job(job["id"], wait_s=5.0, state=job["state"])
        return job


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveWorld]:
    monkeypatch.setattr("opentinker.scheduler.submission.load", lambda path: scheduler_world.check_model)
    monkeypatch.delenv("OPENTINKER_API_KEY", raising=False)
    world = LiveWorld(tmp_path)
    world.up()
    yield world
    world.close()
