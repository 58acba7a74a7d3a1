"""The worker processes of a server: who hosts the next session, and their replacement when they end."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from opentinker.env.worker_process import WorkerProcess
from opentinker.environments.hosting.settings import HostSettings
from opentinker.errors import OpenTinkerError, UnavailableError

SWEEP_S = 0.03
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
"""Before workers are started again that failed to start."""
IDLE_S = 30.0
"""With isolation 'process': how long processes beyond `workers` are kept for the next sessions."""
STARTS_AT_ONCE = max(2, os.cpu_count() or 1)
_OVER = "its session is over"
_BUSY = "calls that missed their deadlines kept it busy"

OnLost = Callable[[WorkerProcess], None]
logger = logging.getLogger(__name__)


class WorkerPool:
    """Keeps `settings.workers` processes ready. With isolation 'process' these wait for a session each, and more are started as
    sessions need them. `on_lost` is told of each that ended."""

    def __init__(self, reference: Mapping[str, Any], settings: HostSettings, on_lost: OnLost) -> None:
        self.exclusive = settings.isolation == "process"
        self._isolation = settings.isolation
        self.replaced = 0
        """Workers that ended by themselves or had to be killed."""
        self._reference = reference
        self._size = settings.workers
        self._on_lost = on_lost
        self._workers: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._idle: dict[WorkerProcess, float] = {}
        self._keeper: WorkerProcess | None = None
        """With isolation 'process', the one that makes tasks, and keeps what it has loaded for them."""
        self._starting = 0
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._pause_s = self._not_before = 0.0
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: OpenTinkerError | None = None
        self._arrived = asyncio.Event()

    @property
    def ready(self) -> int:
        """Worker processes that have loaded the class."""
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Of all processes, those that start and those that end too."""
        return [worker.pid for worker in self._all]

    async def start(self) -> dict[str, Any]:
        """Start all workers; what the class says of itself.

        Raises:
            EnvironmentLoadError: it cannot be loaded.
            DeadlineError: loading takes too long.
        """
        first = await self._started()
        if self._isolation is None and first.info["execution"] == "process":
            self.exclusive = first.exclusive = True
            self._idle[first] = time.monotonic()
        await asyncio.gather(*(self._started() for _ in range(self._size - 1)))
        self._task(self._sweep())
        return first.info

    def pick(self) -> WorkerProcess | None:
        """A worker for one more session, which `release` gives back; None if there is none at the moment."""
        if self.exclusive:
            if not self._idle:
                return None
            worker, _ = self._idle.popitem()
            self._fill()
        else:
            free = [worker for worker in self._workers if not worker.retiring]
            if not free:
                return None
            worker = min(free, key=lambda one: one.sessions)
        worker.sessions += 1
        return worker

    async def wait_for_one(self, timeout_s: float) -> WorkerProcess:
        """As `pick`, but waits for a process to start.

        Raises:
            UnavailableError: none did in time.
        """
        if self.exclusive:
            self._starting += 1  # now, not when its turn comes, or the next look would start it a second time
            self._task(self._start_one())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (worker := self.pick()) is None:
                    self._arrived.clear()
                    await self._arrived.wait()
                return worker
        why = f": {self._failure.detail}" if self._failure is not None else ""
        raise UnavailableError(f"no worker process is ready{why}")

    async def for_tasks(self, timeout_s: float) -> WorkerProcess:
        """A worker for a request that belongs to no session; `tasks_done` gives it back. With isolation 'process' it hosts no
        session, so that neither can a late session take the request with it, nor a late request the session.

        Raises:
            UnavailableError: none was ready in time.
        """
        if self._keeper is not None and not self._keeper.ended:
            return self._keeper
        worker = self.pick() or await self.wait_for_one(timeout_s)
        if not self.exclusive:
            return worker
        if self._keeper is None or self._keeper.ended:
            self._keeper = worker
        elif worker is not self._keeper:  # somebody else was faster
            self.release(worker, clean=True)
        return self._keeper

    def tasks_done(self, worker: WorkerProcess) -> None:
        """The request is answered."""
        if not self.exclusive:
            self.release(worker, clean=True)

    def release(self, worker: WorkerProcess, *, clean: bool) -> None:
        """A session of the worker is over; `clean` if its environment closed in order."""
        worker.sessions -= 1
        if worker.ended:
            return
        if not self.exclusive:
            if worker.retiring and worker.sessions <= 0:
                worker.kill(_BUSY)
        elif clean:
            self._idle[worker] = time.monotonic()
            self._arrived.set()
        else:
            worker.kill(_OVER)

    async def stop(self) -> None:
        """End all processes and wait until they are gone."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in list(self._all)))

    async def _started(self) -> WorkerProcess:
        self._starting += 1
        return await self._start()

    async def _start(self) -> WorkerProcess:
        """Start a worker that is counted as starting already."""
        try:
            async with self._starts:
                worker = WorkerProcess(self._reference, exclusive=self.exclusive, on_end=self._ended)
                self._all.add(worker)
                await worker.start()
        finally:
            self._starting -= 1
        self._workers.append(worker)
        if self.exclusive:
            self._idle[worker] = time.monotonic()
        self._failure, self._pause_s = None, 0.0
        self._arrived.set()
        return worker

    async def _start_one(self) -> None:
        try:
            await self._start()
        except OpenTinkerError as error:
            self._failure = error
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
            self._not_before = time.monotonic() + self._pause_s
            logger.warning("environment_worker_failed error=%r", str(error))

    def _fill(self) -> None:
        """Start what is missing of the ready ones."""
        if self._closing or time.monotonic() < self._not_before:
            return
        ready = len(self._idle) if self.exclusive else sum(not worker.retiring for worker in self._workers)
        for _ in range(self._size - ready - self._starting):
            self._starting += 1  # now, not when its turn comes, or the next look would start it a second time
            self._task(self._start_one())

    def _ended(self, worker: WorkerProcess) -> None:
        self._all.discard(worker)
        self._idle.pop(worker, None)
        if worker not in self._workers:
            return  # whoever started it has the error
        self._workers.remove(worker)
        self._on_lost(worker)
        if self._closing or worker.cause == _OVER:
            return
        self.replaced += 1
        logger.warning("environment_worker_lost pid=%d cause=%r", worker.pid, worker.cause)
        self._fill()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for worker in list(self._all):
                worker.sweep(now)
                if worker.retiring and worker.sessions <= 0:
                    worker.kill(_BUSY)
            spare = len(self._idle) - self._size
            for worker in [one for one, since in self._idle.items() if now - since > IDLE_S][: max(0, spare)]:
                worker.kill(_OVER)
            self._fill()

    def _task(self, work: Any) -> None:
        if self._closing:
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
