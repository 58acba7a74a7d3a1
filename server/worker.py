"""The worker: one compute thread that owns the engine and the trainer. Where the engine has a process of its own, a second
thread samples while the first computes."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentinker.client.messages import ImageChunk, IntArray, SampleResult
from opentinker.errors import EngineError, ImageMissingError, OpenTinkerError, ServerLostError, TrainerError
from opentinker.server.compute_thread import ComputeThread, explained
from opentinker.server.engine.base import SampleRefused
from opentinker.server.engine.remote import RemoteEngine
from opentinker.server.execute import execute
from opentinker.server.images import ImageStore, takes_none
from opentinker.server.memory import release_free_memory
from opentinker.server.overlap import SampleGate
from opentinker.server.protocol import CommandWork, Completion, SampleWork, Work
from opentinker.server.state import Parts, Running, State

log = logging.getLogger(__name__)
PUMP_S = 1.0
"""Longest wait for an engine in another process before its running requests are looked at again."""


class Worker(ComputeThread[Parts, Work, Completion]):
    """Runs commands in the order of arrival; between them, samples, or beside them, where the engine is elsewhere. All methods
    may be called from any thread."""

    role = "worker"
    loads = "the engine and the trainer"

    def __init__(self, build: Callable[[], Parts]) -> None:
        super().__init__(build)
        self._running: dict[str, Running] = {}
        self._state: State
        self._images: ImageStore | None = None
        self._pinned: dict[str, tuple[str, ...]] = {}
        """The images that each operation needs until it ends."""
        self._gate: SampleGate | None = None
        """What is in the inbox, where the engine is elsewhere."""
        self._engines_turn = threading.Lock()
        """Held by the thread that uses an engine that is elsewhere, the running requests or the versions of policies."""
        self._claimed = False
        """The thread that runs commands wants that turn."""

    def start(self, timeout_s: float) -> Parts:
        """Build, and return what was built when work is accepted.

        Raises:
            DeadlineError: it took longer than `timeout_s`.
            Whatever `build` raises.
        """
        self._await_built(timeout_s)
        return self._state.parts

    def submit(self, work: Sequence[Work]) -> None:
        """Queue work.

        Raises:
            ServerLostError: the worker has stopped.
        """
        with self._changed:
            self._check()
            for item in work:
                try:
                    self._pin(item)
                except ImageMissingError as error:
                    self._outbox.append(Completion(item.operation, problem=error.to_problem()))
                else:
                    self._inbox.append(item)
            self._fill_gate()
            self._changed.notify_all()

    def _fill_gate(self) -> None:
        if self._gate is not None:
            while self._inbox:
                self._gate.put(self._inbox.popleft())

    def upload(self, images: Sequence[bytes]) -> dict[str, IntArray]:
        """Keep images for work that will name them; each one's tokens by its hash. Computes in the caller's thread.

        Raises:
            InvalidRequestError: an image is broken or too large, or the model takes none.
            ServerLostError: the worker has stopped.
        """
        self._check()
        if self._images is None:
            raise takes_none()
        return self._images.add(images)

    def _pin(self, work: Work) -> None:
        """Hold what the work names of images, so that none is dropped while it waits or runs.

        Raises:
            ImageMissingError: one is not here, and the work is refused before it does anything.
        """
        if self._images is not None and (hashes := tuple(image_hashes(work))):
            self._images.pin(hashes)
            self._pinned[work.operation] = hashes

    def _take(self, built: Parts) -> None:
        self._images = built.images
        self._state = State(built, pump=self._step, fail=self._fail_running, running=self._running)
        if built.apart is not None:
            self._gate = SampleGate()
            self._state.pump, self._state.turn = self._await_step, self._turn

    def _work(self) -> None:
        if self._gate is not None and (engine := self._state.parts.apart) is not None:
            self._run_beside(engine, self._gate)
        while not self._stopping:
            self._advance()

    def _close(self) -> None:
        parts = self._state.parts
        if parts.training is not None:
            parts.training.close()
        parts.engine.close()

    def _advance(self) -> None:
        """Wait for something to do, and do one thing."""
        with self._changed:
            idle = not self._running
            if idle:
                self._changed.wait_for(lambda: self._inbox or self._stopping)
            work = self._inbox.popleft() if self._inbox and not self._stopping else None
        if isinstance(work, SampleWork):
            self._add(work)
        elif work is not None:
            self._execute(work)
        elif not self._stopping:
            self._step()

    def _run_beside(self, engine: RemoteEngine, gate: SampleGate) -> None:
        """Run commands, and let another thread sample meanwhile. Only where the two meet, as in a publish, one waits."""
        with self._changed:
            self._fill_gate()
        sampling = threading.Thread(target=self._sample_beside, args=(engine, gate), name="sampling", daemon=True)
        engine.on_answer = self._notify
        sampling.start()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: gate.has_commands or self._stopping)
                    if self._stopping:
                        return
                    work = gate.next_command()
                assert work is not None
                self._execute(work)
                with self._changed:
                    gate.done()
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            sampling.join()

    def _sample_beside(self, engine: RemoteEngine, gate: SampleGate) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: (
                            self._stopping
                            or (not self._claimed and (engine.needs_step or gate.has_startable(self._state.has_version)))
                        )
                    )
                    if self._stopping:
                        return
                with self._engines_turn:
                    self._start_samples(gate)
                    self._step()
        except BaseException as error:
            log.exception("sampling failed")
            with self._changed:
                self._error = self._error or error
                self._stopping = True
                self._changed.notify_all()

    def _start_samples(self, gate: SampleGate, *, before_running: bool = False) -> None:
        with self._changed:
            ready = gate.startable(self._state.has_version, before_running=before_running)
        for work in ready:
            self._add(work)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The running command has the engine and the versions to itself; samples that were before it are started."""
        assert self._gate is not None
        with self._changed:
            self._claimed = True
        try:
            with self._engines_turn:
                self._start_samples(self._gate, before_running=True)
                yield
        finally:
            with self._changed:
                self._claimed = False
                self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _await_step(self) -> int:
        """A step of an engine that is elsewhere, for who has nothing to do but wait for it."""
        assert self._state.parts.apart is not None
        self._state.parts.apart.flush()
        self._state.parts.apart.wait(PUMP_S)
        return self._step()

    def _add(self, work: SampleWork) -> None:
        try:
            self._state.start(work)
        except Exception as error:
            self._fail([work.operation], explained(error, EngineError, "the engine refused a request"))

    def _execute(self, work: CommandWork) -> None:
        try:
            result = execute(self._state, work)
        except Exception as error:
            kind = EngineError if work.command == "publish" else TrainerError
            self._fail([work.operation], explained(error, kind, f"{work.command} failed"))
            if isinstance(error, ServerLostError):
                raise  # nothing can be done here any more; the scheduler starts another server, or fails the job
        else:
            self._complete([Completion(work.operation, result)])
        release_free_memory()
        hosted = self._state.policies.get(work.policy)
        if hosted is not None and hosted.fault is not None:
            with self._state.turn():
                self._drop_running(hosted.fault, work.policy)

    def _step(self) -> int:
        """One step of the engine; how many requests ended with it."""
        try:
            answers = self._state.parts.engine.step()
        except ServerLostError:
            raise  # there is no engine any more
        except Exception as error:
            ended = len(self._running)
            self._drop_running(explained(error, EngineError, "the engine failed"))
            return ended
        # One that has failed meanwhile has its answer.
        known = [answer for answer in answers if answer.request_id in self._running]
        for refused in known:
            if isinstance(refused, SampleRefused):
                self._fail_running(refused.request_id, refused.error)
        self._complete([Completion(r.request_id, self._answer(r)) for r in known if isinstance(r, SampleResult)])
        return len(answers)

    def _answer(self, result: SampleResult) -> dict[str, Any]:
        work = self._running.pop(result.request_id).work
        return dataclasses.replace(result, request_id=work.request.request_id).to_wire()

    def _fail_running(self, operation: str, error: OpenTinkerError) -> None:
        del self._running[operation]
        self._fail([operation], error)

    def _drop_running(self, error: OpenTinkerError, policy: str | None = None) -> None:
        """Fail the running requests of a policy, or all of them."""
        dropped = [name for name, running in self._running.items() if policy in (None, running.work.policy)]
        self._fail(dropped, error)
        for name in dropped:
            del self._running[name]
        if policy is None:
            self._state.parts.engine.abort_all()
        else:
            self._state.parts.engine.abort(dropped)

    def _fail(self, operations: Sequence[str], error: OpenTinkerError) -> None:
        self._complete([Completion(operation, problem=error.to_problem()) for operation in operations])

    def _complete(self, completions: Sequence[Completion]) -> None:
        if completions:
            with self._changed:
                for completion in completions:
                    if self._images is not None:
                        self._images.unpin(self._pinned.pop(completion.operation, ()))
                self._give(completions)


def image_hashes(work: Work) -> Iterator[str]:
    """The images that the work names; what is no image chunk is left to those who check it."""
    if isinstance(work, SampleWork):
        yield from (chunk.sha256 for chunk in work.request.prompt if isinstance(chunk, ImageChunk))
        return
    data = work.args.get("data")
    for datum in data if isinstance(data, list | tuple) else ():
        chunks = datum.get("chunks") if isinstance(datum, dict) else None
        for chunk in chunks if isinstance(chunks, list | tuple) else ():
            if isinstance(chunk, dict) and chunk.get("kind") == "image" and isinstance(chunk.get("sha256"), str):
                yield chunk["sha256"]


class InProcessWorker:
    """A `WorkerClient` for a worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def submit(self, work: Sequence[Work]) -> None:
        self._worker.submit(work)

    async def collect(self, timeout_s: float) -> list[Completion]:
        return await asyncio.to_thread(self._worker.collect, timeout_s)

    async def upload(self, images: Sequence[bytes]) -> dict[str, IntArray]:
        return await asyncio.to_thread(self._worker.upload, images)
