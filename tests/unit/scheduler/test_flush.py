"""A server that stops in order first copies its job's last files, for which it has time of its own."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from opentinker.scheduler.placement import Allocation, Demand
from opentinker.scheduler.ray_launcher import RayLauncher, _Parts
from opentinker.scheduler.settings import Settings

WHERE = Allocation("n1", Demand(0, 1))


class Process:
    """An actor's handle; a call of `hanging` never ends."""

    def __init__(self, name: str, calls: list[str], hanging: str = "") -> None:
        self._name, self._calls, self._hanging = name, calls, hanging

    def __getattr__(self, method: str) -> Any:
        async def call() -> None:
            self._calls.append(f"{self._name} {method}")
            if method == self._hanging:
                await asyncio.Event().wait()

        return type("Method", (), {"remote": staticmethod(call)})


@pytest.fixture
def calls() -> list[str]:
    return []


def launcher(calls: list[str], monkeypatch: pytest.MonkeyPatch, storage_url: str | None, hanging: str = "") -> RayLauncher:
    fields: dict[str, Any] = {"state_dir": Path("/s"), "runs_dir": Path("/r"), "storage_url": storage_url}
    launcher = RayLauncher(Settings(**fields, graceful_stop_s=5.0, flush_s=0.05))
    parts = _Parts(None, Process("worker", calls, hanging), Process("front", calls), {"worker": 1, "front": 2})
    launcher._parts["srv"] = parts

    async def clear(*_: Any) -> str:
        return ""

    monkeypatch.setattr(launcher, "_clear", clear)
    monkeypatch.setattr("ray.kill", lambda actor: calls.append(f"{actor._name} killed"))
    return launcher


FRONT = ["front stop", "front killed"]


@pytest.mark.parametrize("hanging", ["", "flush"])
async def test_with_a_storage_the_worker_copies_the_last_files_before_it_stops(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    stopping = launcher(calls, monkeypatch, "s3://bucket/ot", hanging)
    assert await stopping.stop_server("srv", ["job-1"], WHERE, graceful=True) == ""
    assert calls == [*FRONT, "worker flush", "worker stop", "worker killed"]


async def test_a_server_that_is_killed_or_has_no_storage_copies_nothing(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await launcher(calls, monkeypatch, "/shared").stop_server("srv", ["job-1"], WHERE, graceful=True)
    await launcher(calls, monkeypatch, "s3://bucket/ot").stop_server("srv", ["job-1"], WHERE, graceful=False)
    assert calls == [*FRONT, "worker stop", "worker killed", "front killed", "worker killed"]
