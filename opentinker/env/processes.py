"""Local environments of the kind `execution = "process"`: each episode has a process of its own, which can be killed."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from opentinker.env.environment import Action, Environment, Message, StepResult, Tool
from opentinker.env.execution import EnvironmentSession
from opentinker.env.frames import CLOSE, DONE, ERROR, FINALIZE, RESET, STEP, error_of, pack, unpack
from opentinker.env.reference import reference_of
from opentinker.env.threads import UserThreads
from opentinker.env.worker_process import WorkerProcess
from opentinker.errors import DeadlineError, EnvironmentFailedError, OpenTinkerError

SWEEP_S = 0.02
STARTS_AT_ONCE = max(2, os.cpu_count() or 1)
IDLE_S = 60.0
"""An unused process is ended after this."""


class Session(Protocol):
    """What an episode needs of its environment, wherever that runs; see `EnvironmentSession`."""

    seconds: float
    tools: tuple[Tool, ...]
    finalizes: bool

    async def reset(self, task: Any, timeout_s: float) -> tuple[Message, ...]: ...

    async def step(self, action: Action, timeout_s: float) -> StepResult: ...

    async def finalize(self, timeout_s: float) -> StepResult: ...

    async def close(self, timeout_s: float) -> None: ...


class SessionFactory:
    """Makes the sessions of one runner, in threads or in processes as the class declares.

    `make` is the class, or a `functools.partial` of it with its arguments; any other function is called in a thread.

    Raises:
        ConfigError: a class that wants processes cannot be loaded in one.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self.processes: EnvironmentProcesses | None = None
        environment, args = (make.func, make.keywords) if isinstance(make, partial) and not make.args else (make, {})
        if isinstance(environment, type) and issubclass(environment, Environment) and environment.execution == "process":
            self.processes = EnvironmentProcesses(environment, args)

    def session(self, threads: UserThreads) -> Session:
        """A session for one episode."""
        if self.processes is None:
            return EnvironmentSession(self._make, threads)
        return ProcessSession(self.processes)

    async def close(self) -> None:
        """End all processes."""
        if self.processes is not None:
            await self.processes.close()


class EnvironmentProcesses:
    """The processes of one class: one for each running episode, used again after an episode that closed in order.

    All of them end with `close`, or with the event loop.
    """

    def __init__(self, environment: type[Environment], args: Mapping[str, Any]) -> None:
        self.name = environment.__name__
        self.args = dict(args)
        self._reference = reference_of(environment)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._all: set[WorkerProcess] = set()
        self._idle: dict[WorkerProcess, float] = {}
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._all]

    async def acquire(self) -> WorkerProcess:
        """A process without a session.

        Raises:
            EnvironmentFailedError: it does not start.
        """
        self._bind()
        if self._idle:
            return self._idle.popitem()[0]
        async with self._starts:
            if self._idle:  # one became free while this waited
                return self._idle.popitem()[0]
            worker = WorkerProcess(self._reference, exclusive=True, on_end=self._ended)
            self._all.add(worker)
            try:
                await worker.start()
            except OpenTinkerError as error:
                raise EnvironmentFailedError(f"a process for {self.name}: {error.detail}", hint=error.hint) from error
        return worker

    def release(self, worker: WorkerProcess) -> None:
        """The process's session is closed."""
        if not worker.ended:
            self._idle[worker] = time.monotonic()

    async def close(self) -> None:
        """End all processes and wait until they are gone."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None and self._loop is asyncio.get_running_loop():
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await asyncio.gather(*(worker.stop() for worker in list(self._all)))

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._starts = loop, asyncio.Semaphore(STARTS_AT_ONCE)
            self._all, self._idle, self._keeper = set(), {}, None
        if self._keeper is None:
            self._keeper = loop.create_task(self._keep())

    def _ended(self, worker: WorkerProcess) -> None:
        self._all.discard(worker)
        self._idle.pop(worker, None)

    async def _keep(self) -> None:
        everyone = self._all
        try:
            while True:
                await asyncio.sleep(SWEEP_S)
                now = time.monotonic()
                for worker in list(everyone):
                    worker.sweep(now)
                for worker in [one for one, since in self._idle.items() if now - since > IDLE_S]:
                    worker.kill("it was not needed any more")
        finally:  # the loop ends, or `close` does it
            for worker in list(everyone):
                worker.kill("the run is over")


class ProcessSession:
    """As `EnvironmentSession`, in a process of its own."""

    def __init__(self, processes: EnvironmentProcesses) -> None:
        self._processes = processes
        self._worker: WorkerProcess | None = None
        self._id = os.urandom(16)
        self._index = 0
        self._busy = False
        self.seconds = 0.0
        self.tools: tuple[Tool, ...] = ()
        self.finalizes = False

    async def reset(self, task: Any, timeout_s: float) -> tuple[Message, ...]:
        """Take a process, construct and reset the environment in it; the first messages. Starting a process does not count.

        Raises:
            EnvironmentFailedError: it raised, its observation is malformed, or the process cannot be started or died.
            DeadlineError: it took longer than `timeout_s`; the process is killed.
        """
        self._worker = await self._processes.acquire()
        _, body = await self._call(RESET, 0, [self._processes.args, task], timeout_s, "reset")
        messages, tools, self.finalizes = unpack(body)
        self.tools = tuple(tools)
        return tuple(messages)

    async def step(self, action: Action, timeout_s: float) -> StepResult:
        """Apply an action.

        Raises:
            EnvironmentFailedError: it raised, its result is malformed, or the process died.
            DeadlineError: it took longer than `timeout_s`; the process is killed.
        """
        words = [action.text, action.truncated, action.reasoning]
        kind, body = await self._call(STEP, self._index, words, timeout_s, "step")
        self._index += 1
        reward, components, messages, metrics = unpack(body)
        return StepResult(reward, kind == DONE, tuple(messages), metrics, components)

    async def finalize(self, timeout_s: float) -> StepResult:
        """The environment's last reward, as the result of a step that is done.

        Raises:
            EnvironmentFailedError: it raised, its reward is malformed, or the process died.
            DeadlineError: it took longer than `timeout_s`; the process is killed.
        """
        _, body = await self._call(FINALIZE, 0, None, timeout_s, "finalize")
        reward, components = unpack(body)
        return StepResult(reward, True, (), {}, components)

    async def close(self, timeout_s: float) -> None:
        """Close the environment. A process whose environment did not close in order is killed.

        Raises:
            EnvironmentFailedError: it raised.
            DeadlineError: it took longer than `timeout_s`.
        """
        worker, self._worker = self._worker, None
        if worker is None or worker.ended:
            return
        clean, was_busy = False, self._busy
        try:
            await self._ask(worker, CLOSE, 0, b"", timeout_s)
            clean = not was_busy
        finally:
            if clean:
                self._processes.release(worker)
            else:
                worker.kill("its session did not close in order")

    async def _call(self, op: int, index: int, value: Any, timeout_s: float, name: str) -> tuple[int, bytes]:
        assert self._worker is not None, f"{name} follows reset"
        try:
            body = pack(value, f"what {name} is given")
        except OpenTinkerError as error:
            raise EnvironmentFailedError(error.detail, hint=error.hint) from error
        self._busy = True  # and stays so if this is cancelled
        answer = await self._ask(self._worker, op, index, body, timeout_s)
        self._busy = False
        return answer

    async def _ask(self, worker: WorkerProcess, op: int, index: int, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        start = time.perf_counter()
        try:
            kind, answer = await worker.request(op, self._id, index, max(0.001, timeout_s), body)
        finally:
            self.seconds += time.perf_counter() - start
        if kind != ERROR:
            return kind, answer
        self._busy = False
        error = error_of(answer)
        if isinstance(error, EnvironmentFailedError | DeadlineError):
            raise error
        raise EnvironmentFailedError(error.detail, hint=error.hint)
