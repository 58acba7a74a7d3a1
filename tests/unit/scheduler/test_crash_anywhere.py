"""The scheduler may die before and after every write to the store and every call to the cluster; nothing is lost or doubled."""

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from opentinker.scheduler.auth import new_server_secret
from opentinker.scheduler.launcher import DriverSpec, Launched, Probe, ServerSpec
from opentinker.scheduler.placement import Allocation, Node
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.records import Record
from opentinker.scheduler.service import SchedulerService
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.store import SqlStore
from opentinker.scheduler.warming import NextJob

SLOTS = 2


class CrashError(BaseException):
    """The process is dead: nothing in it may handle this."""


class Fuse:
    """Blows at the nth call, before or after its effect; from then on every call fails, as nothing runs in a dead process."""

    def __init__(self, at: int | None = None, *, after: bool = False) -> None:
        self.at, self.after, self.calls, self.blown = at, after, 0, False

    def begin(self) -> None:
        self.calls += not self.blown
        self.blown = self.blown or (self.calls == self.at and not self.after)
        if self.blown:
            raise CrashError

    def end(self) -> None:
        self.blown = self.blown or self.calls == self.at
        if self.blown:
            raise CrashError


class Cluster:
    """What outlives a scheduler: named processes, and how drivers end."""

    def __init__(self) -> None:
        self.processes: dict[str, str] = {}
        self.runs: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self.saved: list[str] = []

    def create(self, name: str, job_id: str) -> None:
        if name not in self.processes:
            self.processes[name] = job_id
            self.launched[name] += 1
        assert sum(name.endswith(".worker") for name in self.processes) <= SLOTS


class CrashingLauncher:
    """Every step is a call to the cluster of its own."""

    def __init__(self, cluster: Cluster, fuse: Fuse) -> None:
        self._cluster, self._fuse = cluster, fuse

    async def _call(self, effect: Callable[[], Any] = lambda: None) -> Any:
        self._fuse.begin()
        result = effect()
        await asyncio.sleep(0)
        self._fuse.end()
        return result

    async def nodes(self) -> list[Node]:
        return [Node("n1", "here", gpus=0, cpu_slots=SLOTS)]

    async def prestart(self, job: NextJob, keep_s: float) -> None:
        return  # tried in `test_warming.py`

    async def forget(self, job_id: str, node_id: str) -> None:
        return

    def is_here(self, node_id: str) -> bool:
        return True

    async def launch(self, spec: ServerSpec) -> Launched:
        for part in ("worker", "front"):
            await self._call(lambda part=part: self._cluster.create(f"{spec.server_id}.{part}", spec.job_id))
        await self._call()
        return Launched("http://127.0.0.1:1", 1, 2)

    async def probe(self, server_id: str) -> Probe:
        return Probe("" if f"{server_id}.worker" in self._cluster.processes else "its server is gone")

    async def save(self, server_id: str, policy_id: str, name: str) -> None:
        await self._call(lambda: self._cluster.saved.append(server_id))

    def gpus_of(self, server_id: str) -> tuple[int, ...]:
        return ()

    async def name_checkpoints(self, server_id: str, starts: Mapping[str, str]) -> None:
        raise AssertionError("no job here goes on in another one")

    async def drive(self, spec: DriverSpec) -> DriverOutcome:
        name = f"{spec.server_id}.driver"
        mortal = spec.config["name"].startswith("mortal") and not spec.resume

        def begin() -> None:
            if name not in self._cluster.processes:
                self._cluster.runs[spec.job_id] += 1
                assert not any(job_id == spec.job_id for n, job_id in self._cluster.processes.items() if n.endswith(".driver"))
            self._cluster.create(name, spec.job_id)

        await self._call(begin)
        (Path(spec.run_dir) / "driver.log").write_text("the end\n")
        await self._call()
        if spec.config["name"].endswith("endless") and not mortal:
            await asyncio.Event().wait()
        return DriverOutcome("the driver process died", lost=True) if mortal else DriverOutcome()

    async def stop_driver(self, server_id: str) -> None:
        await self._call(lambda: self._cluster.processes.pop(f"{server_id}.driver", None))

    async def stop_server(self, server_id: str, job_ids: list[str], where: Sequence[Allocation], *, graceful: bool) -> str:
        for part in ("front", "worker"):
            await self._call(lambda part=part: self._cluster.processes.pop(f"{server_id}.{part}", None))
        return ""


class CrashingStore(SqlStore):
    fuse: Fuse

    def save(self, *records: Record) -> None:
        self.fuse.begin()
        super().save(*records)
        self.fuse.end()


class Site:
    """A scheduler that is started anew whenever it dies, as Ray does it, and a user who repeats what got no answer."""

    def __init__(self, folder: Path, fuse: Fuse, storage_url: str | None = None) -> None:
        self.cluster = Cluster()
        self.settings = Settings(
            state_dir=folder,
            runs_dir=folder / "runs",
            storage_url=storage_url,
            reconcile_s=0.005,
            probe_s=0.005,
            check_model=f"{__name__}:check_model",
        )
        self.fuse = fuse
        self._secret = new_server_secret()
        self._folder = folder

    def boot(self) -> None:
        store = CrashingStore.open_sqlite(self._folder / "scheduler.db")
        assert isinstance(store, CrashingStore)
        store.fuse = self.fuse
        self.store = store
        self.service = SchedulerService(self.settings, store, CrashingLauncher(self.cluster, self.fuse), self._secret)
        with contextlib.suppress(CrashError):
            self.service.recover()
        self._loop = asyncio.get_running_loop().create_task(self.service.run())

    async def stop(self) -> None:
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)

    async def _reboot_if_dead(self) -> None:
        if self.fuse.blown:
            await self.stop()
            self.fuse = Fuse()
            self.boot()

    async def ask(self, call: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        async with asyncio.timeout(10.0):
            while True:
                answer = asyncio.ensure_future(call())
                while not answer.done() and not self.fuse.blown:
                    await asyncio.wait([answer], timeout=0.005)
                if not self.fuse.blown:
                    return answer.result()
                answer.cancel()  # whoever waits for a dead process hears of it
                await asyncio.gather(answer, return_exceptions=True)
                await self._reboot_if_dead()

    async def reach(self, job: dict[str, Any], *states: str) -> dict[str, Any]:
        async with asyncio.timeout(10.0):
            while True:
                await self._reboot_if_dead()
                job = await self.ask(partial(self.service.job, "ann", job["id"]))
                if job["state"] in states:
                    return job
                await asyncio.sleep(0.002)

    async def submit(self, kind: str, key: str, name: str = "", *, pair: bool = False) -> dict[str, Any]:
        config: dict[str, Any] = {"kind": kind, "base_model": "some-model", "name": name}
        if kind == "rl":
            config |= {"environment": {"name": "arithmetic"}, "scheduling": {"max_restarts": 1}}
        if pair:
            config |= {"servers": {"second": {}}, "agents": {"black": {}, "white": {"server": "second"}}}
        return await self.ask(lambda: self.service.submit("ann", config, idempotency_key=key))

    async def idle(self) -> None:
        async with asyncio.timeout(10.0):
            while self.store.open_servers() or self.store.live_jobs() or self.service._reconciler.copies.pending:
                await self._reboot_if_dead()
                await asyncio.sleep(0.002)


async def story(folder: Path, fuse: Fuse) -> Site:
    """Three jobs that the cluster drives, of which one loses its driver once and one is stopped with a checkpoint, one that is
    completed by its owner and one that is cancelled early, on two slots."""
    site = Site(folder, fuse)
    site.boot()
    kinds = (("rl", "mortal"), ("interactive", ""), ("rl", ""), ("interactive", ""), ("rl", "endless"))
    jobs = [await site.submit(kind, f"key-{i}", name) for i, (kind, name) in enumerate(kinds)]
    await site.ask(lambda: site.service.cancel("ann", jobs[3]["id"]))
    await site.reach(jobs[1], "RUNNING")

    async def complete() -> dict[str, Any]:
        job = await site.service.job("ann", jobs[1]["id"])
        return job if job["state"] == "COMPLETED" else await site.service.complete("ann", job["id"])

    await site.ask(complete)
    await site.reach(jobs[4], "RUNNING")
    await site.ask(lambda: site.service.stop("ann", jobs[4]["id"]))
    for job, end in zip(jobs, ("COMPLETED", "COMPLETED", "COMPLETED", "CANCELLED", "CANCELLED"), strict=True):
        ended = await site.reach(job, "COMPLETED", "FAILED", "CANCELLED")
        assert ended["state"] == end, ended["cause"]
    await site.idle()
    stored = (await site.service.jobs("ann"))["jobs"]
    assert sorted(job["id"] for job in stored) == sorted(job["id"] for job in jobs)
    assert site.cluster.processes == {}
    assert site.cluster.saved, "the stopped job's weights"
    assert site.cluster.runs - Counter({jobs[4]["id"]: 1}) == {jobs[0]["id"]: 2, jobs[2]["id"]: 1}
    assert max(site.cluster.launched.values()) == 1
    await site.stop()
    return site


async def stored_story(folder: Path, fuse: Fuse) -> Site:
    """A job whose files are copied to a storage when its server is gone."""
    site = Site(folder, fuse, f"file://{folder / 'remote'}")
    site.boot()
    job = await site.reach(await site.submit("rl", "key"), "COMPLETED", "FAILED")
    await site.idle()
    assert job["state"] == "COMPLETED", job["cause"]
    run_dir = Path(job["run_dir"])
    there = folder / "remote" / run_dir.relative_to(site.settings.runs_dir)
    assert (there / "driver.log").read_text() == "the end\n"
    kinds = [event.kind for event in site.store.events(job["id"])]
    assert (kinds.count("copying"), kinds[-1]) == (1, "copied")
    await site.stop()
    return site


async def gang_story(folder: Path, fuse: Fuse) -> Site:
    """A job with two servers, which loses its driver once, and is then stopped with a checkpoint on both."""
    site = Site(folder, fuse)
    site.boot()
    job = await site.submit("rl", "key", "mortal-endless", pair=True)

    async def again() -> dict[str, Any]:
        found = await site.service.job("ann", job["id"])
        return found if site.cluster.runs[job["id"]] == 2 and found["state"] == "RUNNING" else {"state": "", "id": job["id"]}

    running = await site.ask(again)
    async with asyncio.timeout(10.0):
        while not running["state"]:
            await asyncio.sleep(0.002)
            await site._reboot_if_dead()
            running = await site.ask(again)
    pair = {running["server"]["id"], running["servers"]["second"]["id"]}
    await site.ask(lambda: site.service.stop("ann", job["id"]))
    ended = await site.reach(job, "COMPLETED", "FAILED", "CANCELLED")
    assert ended["state"] == "CANCELLED", ended["cause"]
    await site.idle()
    assert site.cluster.processes == {}
    assert set(site.cluster.saved) == pair
    assert site.cluster.runs == {job["id"]: 2}
    assert max(site.cluster.launched.values()) == 1
    kinds = [event.kind for event in site.store.events(job["id"])]
    assert kinds.count("released") == kinds.count("starting") == 2
    await site.stop()
    return site


Story = Callable[[Path, Fuse], Awaitable[Site]]


@pytest.fixture(autouse=True)
def _no_model_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.scheduler.submission.load", lambda path: lambda name: None)


@pytest.mark.parametrize(
    ("tell", "after"),
    # To die after a call is nearly to die before the next one: for the longest story, once is enough.
    [(story, False), (story, True), (stored_story, False), (stored_story, True), (gang_story, True)],
)
async def test_a_crash_at_any_call_loses_nothing_doubles_nothing_and_leaves_nothing(
    tmp_path: Path, tell: Story, after: bool
) -> None:
    SqlStore.open_sqlite(tmp_path / "empty.db").close()

    def site(name: str) -> Path:
        """A folder with an empty database: to create the tables takes longer than many a story."""
        (tmp_path / name).mkdir()
        shutil.copyfile(tmp_path / "empty.db", tmp_path / name / "scheduler.db")
        return tmp_path / name

    whole = await tell(site("whole"), Fuse())
    calls = whole.fuse.calls
    assert calls > 12
    for at in range(1, calls + 1):
        await tell(site(str(at)), Fuse(at, after=after))
