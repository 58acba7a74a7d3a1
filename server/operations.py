"""The table of operations: what was asked for, whether it is done, and for how long its answer is kept."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from opentinker.errors import ConflictError, NotFoundError, OpenTinkerError

Status = Literal["pending", "done", "failed"]
MAX_FINISHED = 10_000
MAX_BYTES = 256 * 2**20


@dataclass
class Operation:
    """One sample request or command, from its arrival until its answer is forgotten."""

    id: str
    policy: str
    digest: bytes
    status: Status = "pending"
    result: Any = None
    problem: dict[str, Any] | None = None
    size_bytes: int = 0
    _finished: asyncio.Event = field(default_factory=asyncio.Event)

    def to_wire(self) -> dict[str, Any]:
        return {"operation_id": self.id, "status": self.status, "result": self.result, "problem": self.problem}

    async def wait(self, timeout_s: float) -> None:
        """Return when it is finished, or after `timeout_s`."""
        if self.status == "pending" and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._finished.wait()
            except TimeoutError:
                return

    def finish(self, result: Any, problem: dict[str, Any] | None) -> None:
        self.status = "done" if problem is None else "failed"
        self.result, self.problem = result, problem
        self.size_bytes = tree_bytes(result)
        self._finished.set()


def tree_bytes(value: Any) -> int:
    """About how much memory a wire tree holds, in bytes."""
    if isinstance(value, np.ndarray):
        return 100 + value.nbytes
    if isinstance(value, bytes | str):
        return 50 + len(value)
    if isinstance(value, dict):
        return 100 + sum(tree_bytes(k) + tree_bytes(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return 60 + sum(tree_bytes(v) for v in value)
    return 32


class OperationTable:
    """All operations of one front. Finished ones are kept up to a number and a size, newest first, and at least the last
    of each policy; pending ones always."""

    def __init__(self, *, max_finished: int = MAX_FINISHED, max_bytes: int = MAX_BYTES) -> None:
        self._max_finished = max_finished
        self._max_bytes = max_bytes
        self._operations: dict[str, Operation] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._last: dict[str, str] = {}
        self._bytes = 0
        self._pending = 0

    @property
    def pending(self) -> int:
        """How many operations have not finished."""
        return self._pending

    def open(self, operation_id: str, policy: str, digest: bytes) -> tuple[Operation, bool]:
        """The operation of this id and whether it is new.

        Raises:
            ConflictError: the id was used with another body.
        """
        known = self._operations.get(operation_id)
        if known is None:
            operation = self._operations[operation_id] = Operation(operation_id, policy, digest)
            self._pending += 1
            return operation, True
        if known.digest != digest or known.policy != policy:
            raise ConflictError(
                f"operation {operation_id} was already started with another body", hint="use a fresh request_id"
            )
        return known, False

    def get(self, operation_id: str, policy: str) -> Operation:
        """The operation, if it belongs to `policy`.

        Raises:
            NotFoundError: there is none, it belongs to another policy, or its answer was dropped.
        """
        operation = self._operations.get(operation_id)
        if operation is None or operation.policy != policy:
            raise NotFoundError(f"no operation {operation_id}", hint="answers are kept for the newest operations only")
        return operation

    def finish(self, operation_id: str, result: Any = None, problem: dict[str, Any] | None = None) -> Operation | None:
        """Record the end of a pending operation; None if there is no such operation."""
        operation = self._operations.get(operation_id)
        if operation is None or operation.status != "pending":
            return None
        operation.finish(result, problem)
        self._pending -= 1
        self._finished[operation_id] = None
        self._last[operation.policy] = operation_id
        self._bytes += operation.size_bytes
        self._drop_old()
        return operation

    def forget(self, operation_id: str) -> None:
        """Drop a finished operation, so that its id may be used again."""
        operation = self._operations.get(operation_id)
        if operation is not None and operation.status != "pending":
            del self._operations[operation_id]
            del self._finished[operation_id]
            self._bytes -= operation.size_bytes

    def release(self, policy: str) -> None:
        """Keep the last operation of a policy that is gone no longer than any other."""
        self._last.pop(policy, None)

    def fail_pending(self, error: OpenTinkerError) -> None:
        """Fail everything that is still pending."""
        for operation_id in [o.id for o in self._operations.values() if o.status == "pending"]:
            self.finish(operation_id, problem=error.to_problem())

    def _drop_old(self) -> None:
        kept = set(self._last.values())
        count, size, old = len(self._finished), self._bytes, []
        for operation_id in self._finished:
            if count <= self._max_finished and size <= self._max_bytes:
                break
            if operation_id not in kept:
                old.append(operation_id)
                count -= 1
                size -= self._operations[operation_id].size_bytes
        for operation_id in old:
            self.forget(operation_id)
