"""What stands between the HTTP routes and the worker: ordering, batching, and the end of every operation."""

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from opentinker.client.messages import IntArray, SampleRequest
from opentinker.errors import NotFoundError, SequenceGapError, ServerLostError
from opentinker.server.commands import GAP_TIMEOUT_S, CommandQueue, Duplicate
from opentinker.server.operations import Operation, OperationTable
from opentinker.server.protocol import CommandWork, Completion, SampleWork, Work, WorkerClient

log = logging.getLogger(__name__)
BATCH_S = 0.002
"""Requests that arrive within this time go to the worker together: one call per request halves the throughput."""
COLLECT_S = 10.0
SWEEP_S = 0.5


class Dispatcher:
    """Owns the operations of all policies on one worker. Lives in one event loop; `clock` is monotonic, in seconds."""

    def __init__(self, worker: WorkerClient, clock: Callable[[], float], *, gap_timeout_s: float = GAP_TIMEOUT_S) -> None:
        self._worker = worker
        self._clock = clock
        self._gap_timeout_s = gap_timeout_s
        self._operations = OperationTable()
        self._queues: defaultdict[str, CommandQueue[CommandWork]] = defaultdict(
            lambda: CommandQueue(gap_timeout_s=gap_timeout_s)
        )
        self._versions: dict[str, int] = {}
        self._keys: dict[str, str] = {}
        """What the operations of a further policy are called after."""
        self._creating: dict[str, str] = {}
        """The policy that each operation of another one creates."""
        self._then: dict[str, Callable[[Operation], None]] = {}
        self._outbox: list[Work] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._busy_at = clock()
        self.lost: ServerLostError | None = None
        """Why the worker is gone; None while it works."""

    def start(self) -> None:
        loops = (self._ship, self._collect, self._sweep)
        self._tasks = [asyncio.create_task(self._guard(loop)) for loop in loops]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(ServerLostError("the server was stopped"))

    def sample(self, policy: str, request: SampleRequest, digest: bytes) -> Operation:
        """The operation of a sample request; a retry gets the first attempt's.

        Raises:
            ConflictError: the request id was used with another body.
            ServerLostError: the worker is gone.
        """
        self.check()
        operation, is_new = self._operations.open(f"{self._key(policy)}:s:{request.request_id}", policy, digest)
        if is_new:
            self._send([SampleWork(operation.id, policy, request)])
        return operation

    def command(self, policy: str, seq: int, digest: bytes, command: str, args: dict[str, Any]) -> Operation:
        """The operation of a command; it is handed to the worker when its predecessors were.

        Raises:
            ConflictError: the number was used with another body.
            NotFoundError: it ran, and its answer is no longer kept.
            ServerLostError: the worker is gone.
        """
        self.check()
        operation_id = f"{self._key(policy)}:c:{seq}"
        work = CommandWork(operation_id, policy, command, args)
        outcome = self._queues[policy].offer(seq, digest, work, self._clock())
        if isinstance(outcome, Duplicate):
            return self._operations.get(operation_id, policy)
        self._operations.forget(operation_id)  # an earlier attempt may have failed with a gap
        operation, _ = self._operations.open(operation_id, policy, digest)
        self._send(outcome.ready)
        return operation

    def aside(self, policy: str, command: str, args: dict[str, Any]) -> Operation:
        """The operation of a command of the cluster's own, which has no number: it runs after what the worker was given so far.

        Raises:
            ServerLostError: the worker is gone.
        """
        self.check()
        operation, _ = self._operations.open(f"{self._key(policy)}:x:{secrets.token_hex(8)}", policy, b"")
        self._send((CommandWork(operation.id, policy, command, args),))
        return operation

    def create(
        self, caller: str, policy: str, key: str, digest: bytes, args: dict[str, Any], then: Callable[[Operation], None]
    ) -> Operation:
        """The operation, of `caller`, that creates a further policy; a retry gets the first attempt's. `key` is a name that no
        policy before it had; `then` hears of the end, if it is not the server's.

        Raises:
            ServerLostError: the worker is gone.
        """
        self.check()
        operation, is_new = self._operations.open(f"{self._key(caller)}:p:{key}", caller, digest)
        if is_new:
            self._keys[policy] = key
            self._queues[policy] = CommandQueue(1, gap_timeout_s=self._gap_timeout_s)  # 0 is what the scheduler creates by
            self._creating[operation.id] = policy
            self._then[operation.id] = then
            self._send((CommandWork(operation.id, policy, "create", args),))
        return operation

    def delete(self, caller: str, policy: str, key: str, then: Callable[[Operation], None]) -> Operation:
        """The operation, of `caller`, that deletes a further policy, after what the worker was given so far; one that is under
        way is found again, and one that failed is tried anew.

        Raises:
            ServerLostError: the worker is gone.
        """
        self.check()
        operation_id = f"{self._key(caller)}:d:{key}"
        operation, is_new = self._operations.open(operation_id, caller, b"")
        if not is_new and operation.status == "failed":
            self._operations.forget(operation_id)
            operation, is_new = self._operations.open(operation_id, caller, b"")
        if is_new:
            self._then[operation.id] = then
            self._send((CommandWork(operation.id, policy, "delete"),))
        return operation

    def deleted(self, caller: str, key: str) -> Operation:
        """The operation by which `caller` deleted a policy that is gone.

        Raises:
            NotFoundError: it did not, or the answer is no longer kept.
        """
        return self._operations.get(f"{self._key(caller)}:d:{key}", caller)

    def forget(self, policy: str) -> None:
        """Let go of a further policy that is gone."""
        queue = self._queues.pop(policy, None)
        gone = NotFoundError(f"policy '{policy}' was deleted; this command was not run").to_problem()
        for work in queue.close() if queue is not None else ():
            self._operations.finish(work.operation, problem=gone)
        self._versions.pop(policy, None)
        self._keys.pop(policy, None)
        self._operations.release(policy)

    def _key(self, policy: str) -> str:
        return self._keys.get(policy, policy)

    async def upload(self, images: Sequence[bytes]) -> dict[str, IntArray]:
        """Give the worker images; see `WorkerClient.upload`."""
        self.check()
        self._busy_at = self._clock()
        return await self._worker.upload(images)

    @property
    def idle_s(self) -> float:
        """For how long there has been nothing to do."""
        if self._operations.pending:
            self._busy_at = self._clock()
        return self._clock() - self._busy_at

    def operation(self, operation_id: str, policy: str) -> Operation:
        """An operation of `policy`, also one that failed with the worker.

        Raises:
            NotFoundError: there is none.
        """
        return self._operations.get(operation_id, policy)

    def policy(self, policy: str) -> dict[str, Any]:
        """Its version (None before `create` is done) and the sequence number that its next command must carry.

        Raises:
            ServerLostError: the worker is gone.
        """
        self.check()
        return {"policy": policy, "version": self._versions.get(policy), "next_seq": self._queues[policy].next_seq}

    def check(self) -> None:
        """Raises ServerLostError if the worker is gone."""
        if self.lost is not None:
            raise self.lost

    def _send(self, work: list[SampleWork] | tuple[CommandWork, ...]) -> None:
        self._outbox.extend(work)
        if self._outbox:
            self._wake.set()

    async def _ship(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(BATCH_S)
            self._wake.clear()
            batch, self._outbox = self._outbox, []
            await self._worker.submit(batch)

    async def _collect(self) -> None:
        while True:
            for completion in await self._worker.collect(COLLECT_S):
                self._finish(completion)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._clock()
            for policy, queue in self._queues.items():
                for work in queue.expire(now):
                    error = SequenceGapError(
                        f"command {queue.next_seq} of policy {policy} did not arrive, so this later one was not run",
                        hint="send the missing command, then this one again",
                    )
                    self._operations.finish(work.operation, problem=error.to_problem())

    def _finish(self, completion: Completion) -> None:
        self._busy_at = self._clock()
        operation = self._operations.finish(completion.operation, completion.result, completion.problem)
        if operation is None:
            return
        policy = self._creating.pop(operation.id, operation.policy)
        if isinstance(completion.result, dict):
            version = completion.result.get("version")
            if isinstance(version, int):
                self._versions[policy] = version
        if (then := self._then.pop(operation.id, None)) is not None:
            then(operation)

    async def _guard(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except Exception as error:
            log.error("server lost cause=%r", error, exc_info=not isinstance(error, ServerLostError))
            self._end(error if isinstance(error, ServerLostError) else ServerLostError(f"the server's front failed: {error!r}"))

    def _end(self, error: ServerLostError) -> None:
        """Fail everything pending and everything to come; the first cause counts."""
        self.lost = self.lost or error
        self._operations.fail_pending(self.lost)
