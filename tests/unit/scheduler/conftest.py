"""A whole scheduler in this process: real store, real service, and a launcher whose servers are plain objects."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from opentinker.errors import ConfigError, EngineError, OpenTinkerError, UnknownModelError
from opentinker.scheduler.auth import new_server_secret
from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.launcher import DriverSpec, Launched, NotPlacedError, Probe, ServerSpec
from opentinker.scheduler.placement import Allocation, Demand, Node
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.service import SchedulerService
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.store import SqlStore
from opentinker.scheduler.warming import NextJob

LEASE_S = 30.0


def check_model(name: str) -> None:
    if name == "unheard-of":
        raise UnknownModelError(f"unknown base model '{name}'")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class LocalLauncher:
    """Servers are entries of a dict. Tests hold starts back, kill servers, end drivers, and leave processes behind."""

    def __init__(self) -> None:
        self.cluster = [Node("n1", "here", gpus=0, cpu_slots=1)]
        self.here = "n1"
        """The scheduler's own node."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.servers: dict[str, ServerSpec] = {}
        self.drivers: dict[str, DriverSpec] = {}
        self.faults: dict[str, str] = {}
        """By job, or by server."""
        self.ends: dict[str, asyncio.Future[DriverOutcome]] = {}
        self.unkillable = ""
        self.unplaced = 0
        self.idle_s: dict[str, float] = {}
        self.saved: list[str] = []
        self.warm: dict[str, str] = {}
        self.may_save = asyncio.Event()
        self.may_save.set()
        self.save_error: OpenTinkerError | None = None
        self.use: dict[str, list[GpuUse]] = {}
        self.endpoint = "http://127.0.0.1:1"
        self.calls: list[str] = []
        self.named: dict[str, dict[str, str]] = {}
        """By server, what it was told of checkpoints while it ran."""
        self.stopped: dict[str, list[str]] = {}
        """By server, by which marks its processes were looked for."""
        self.asked_for_use: list[Collection[str] | None] = []
        self.requested: list[tuple[Demand, ...]] = []

    async def nodes(self) -> list[Node]:
        return self.cluster

    async def request_nodes(self, bundles: Sequence[Demand]) -> None:
        self.requested.append(tuple(bundles))

    def is_here(self, node_id: str) -> bool:
        return node_id == self.here

    async def gpu_use(self, node_ids: Collection[str] | None = None) -> dict[str, list[GpuUse]]:
        self.asked_for_use.append(node_ids)
        return self.use

    async def prestart(self, job: NextJob, keep_s: float) -> None:
        self.warm[job.job_id] = job.node_id

    async def forget(self, job_id: str, node_id: str) -> None:
        assert self.warm.pop(job_id) == node_id

    async def launch(self, spec: ServerSpec) -> Launched:
        self.servers[spec.server_id] = spec
        await self.may_start.wait()
        if spec.config["base_model"] == "broken":
            raise EngineError("the model does not fit")
        if self.unplaced:
            self.unplaced -= 1
            raise NotPlacedError("the node died before the server started")
        return Launched(self.endpoint, os.getpid(), os.getpid())

    def gpus_of(self, server_id: str) -> tuple[int, ...]:
        return ()

    async def probe(self, server_id: str) -> Probe:
        if server_id not in self.servers:
            return Probe("its server is gone")
        job_id = self.servers[server_id].job_id
        return Probe(self.faults.get(server_id) or self.faults.get(job_id, ""), self.idle_s.get(job_id, 0.0))

    async def save(self, server_id: str, policy_id: str, name: str) -> None:
        assert self.servers[server_id].policy_id == policy_id
        await self.may_save.wait()
        if self.save_error is not None:
            raise self.save_error
        self.saved.append(f"{self.servers[server_id].job_id}/{name}")

    async def name_checkpoints(self, server_id: str, starts: Mapping[str, str]) -> None:
        self.named.setdefault(server_id, {}).update(starts)

    async def drive(self, spec: DriverSpec) -> DriverOutcome:
        """`drivers` and `ends` are by job: of the driver that runs now."""
        if spec.refusal and spec.job_id not in self.drivers:
            return DriverOutcome(spec.refusal, ConfigError.code)
        self.drivers[spec.job_id] = spec
        end = self.ends.setdefault(spec.job_id, asyncio.get_running_loop().create_future())
        return await asyncio.shield(end)

    async def stop_driver(self, server_id: str) -> None:
        for job_id in [job_id for job_id, spec in self.drivers.items() if spec.server_id == server_id]:
            del self.drivers[job_id]
            self.ends.pop(job_id, None)
            self.calls.append("stop driver")

    async def stop_server(self, server_id: str, job_ids: list[str], where: Sequence[Allocation], *, graceful: bool) -> str:
        self.calls.append("stop server" if graceful else "kill server")
        self.stopped[server_id] = job_ids
        if not self.unkillable:
            self.servers.pop(server_id, None)
        return self.unkillable


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    url: str = request.getfixturevalue("postgres").database()
    return url


class World:
    """A running service and the levers that move what is around it."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(
            state_dir=folder,
            runs_dir=folder / "runs",
            lease_s=LEASE_S,
            reconcile_s=0.01,
            probe_s=0.01,
            check_model=f"{__name__}:check_model",
        )
        self.clock = Clock()
        self.jump_s = 0.0
        """How far somebody has set the clock on the wall since; `clock` itself is steady."""
        self.launcher = LocalLauncher()
        self.secret = new_server_secret()
        self.database = folder / "scheduler.db"
        self.store: SqlStore
        self.service: SchedulerService
        self._loop: asyncio.Task[None]

    def boot(self) -> None:
        """Start the scheduler; after `crash`, with the store that the earlier one left."""
        self.store = SqlStore.open_sqlite(self.database)
        self.service = SchedulerService(self.settings, self.store, self.launcher, self.secret, self.wall, self.clock)
        self.service.create_key()
        self.service.recover()
        self._loop = asyncio.get_running_loop().create_task(self.service.run())

    def wall(self) -> float:
        return self.clock() + self.jump_s

    async def crash(self) -> None:
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)

    async def interactive(self, base_model: str = "some-model", owner: str = "admin", **options: Any) -> dict[str, Any]:
        sections = {name: options.pop(name) for name in ("resources", "scheduling", "start_from") if name in options}
        return await self.service.submit(owner, {"kind": "interactive", "base_model": base_model, **sections}, **options)

    async def rl(self, **scheduling: Any) -> dict[str, Any]:
        config = {"kind": "rl", "base_model": "some-model", "environment": {"name": "arithmetic"}, "scheduling": scheduling}
        return await self.service.submit("admin", config)

    async def reach(self, job: dict[str, Any], state: str, owner: str = "admin") -> dict[str, Any]:
        """The job once it is in `state`."""
        async with asyncio.timeout(5.0):
            while job["state"] != state:
                job = await self.service.job(owner, job["id"], job["state"], 5.0)
        return job

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)

    async def settle(self) -> None:
        """Let the scheduler look at the cluster a few times."""
        await asyncio.sleep(10 * self.settings.reconcile_s)

    async def free_slots(self) -> int:
        return sum(node["free_cpu_slots"] for node in (await self.service.cluster("admin"))["nodes"])

    async def until_free(self, slots: int) -> None:
        async with asyncio.timeout(5.0):
            while True:
                if await self.free_slots() == slots:
                    return
                await asyncio.sleep(0.005)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    # The service loads its model check by import path; this conftest is not importable by one.
    monkeypatch.setattr("opentinker.scheduler.submission.load", lambda path: check_model)
    world = World(tmp_path)
    world.boot()
    yield world
    await world.crash()
