"""A server that stops in order first copies its job's last files, for which it has time of its own."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from opentinker.scheduler.placement import Allocation, Demand
from opentinker.scheduler.ray_launcher import RayLauncher, _Parts
from opentinker.scheduler.settings import Settings

WHERE = (Allocation("n1", Demand(0, 1)),)


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
    worker, front = Process("worker", calls, hanging), Process("front", calls)
    parts = _Parts(worker=worker, front=front, pids={"worker": 1, "front": 2})
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


async def test_a_split_server_is_stopped_with_its_engine_and_cleared_where_each_of_them_was(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = launcher(calls, monkeypatch, None)
    parts = stopping._parts["srv"]
    parts.engine, parts.pids["engine"], parts.gpus, parts.engine_gpus = Process("engine", calls), 3, (0, 1), (5,)
    cleared: list[Any] = []

    async def clear(node_id: str, job_ids: list[str], gpus: tuple[int, ...]) -> str:
        cleared.append((node_id, gpus))
        return "" if len(cleared) < 4 else "process 7 cannot be killed"

    monkeypatch.setattr(stopping, "_clear", clear)
    where = (Allocation("n1", Demand(2)), Allocation("n2", Demand(1)))
    assert await stopping.stop_server("srv", ["job-1"], where, graceful=True) == ""
    assert calls == [*FRONT, "worker stop", "worker killed", "engine stop", "engine killed"]
    assert cleared == [("n1", (0, 1)), ("n2", (5,))]
    stopping._parts["srv"] = parts
    left = await stopping.stop_server("srv", ["job-1"], where, graceful=True)
    assert left == "process 7 cannot be killed"
    assert stopping._parts["srv"] is parts
