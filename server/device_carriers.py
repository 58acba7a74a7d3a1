"""Carriers of weight buckets that stay on GPUs: memory that an engine maps (CUDA IPC), or a broadcast to its ranks (NCCL).

Both do as vLLM's own weight transfer engines do (`vllm.distributed.weight_transfer`, backends `ipc` and `nccl`), which answer
nothing that could be checked; here every bucket is acknowledged with digests, as with any other carrier.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from opentinker.errors import DeadlineError, WeightSyncError
from opentinker.server.carriers import Payload, read_probe
from opentinker.server.device_groups import RECEIVE_S, Group, bring, wait_for_copies

_DEVICE = 6
"""Where `rebuild_cuda_tensor` is told the device, which has another number in another process."""


def _room(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Memory of at least so many bytes, with what was there before."""
    if nbytes <= memory.numel():
        return memory
    grown = torch.empty(nbytes, dtype=torch.uint8, device=memory.device)
    grown[: memory.numel()].copy_(memory)
    return grown


class IpcPayload:
    """Memory of another process on a GPU of this machine."""

    _opened: ClassVar[dict[tuple[Any, ...], torch.Tensor]] = {}
    """What this process has mapped. Torch counts one opening for each export, which comes with every bucket."""

    def __init__(self, exports: Sequence[tuple[Any, ...]], nbytes: int) -> None:
        """`exports` has one for each engine rank: each is opened, and let go of, once."""
        self._exports = tuple(exports)
        self._nbytes = nbytes

    def open(self, rank: int = 0) -> torch.Tensor:
        if not self._nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if not rank < len(self._exports):
            raise WeightSyncError(f"the sender shares its memory with {len(self._exports)} engine ranks; this is rank {rank}")
        export = self._exports[rank]
        if export not in self._opened:
            try:
                self._opened[export] = _opened(export)
            except Exception as error:  # torch and the driver promise no exception type
                raise WeightSyncError(f"the sender's GPU memory cannot be opened here: {error}") from error
        return self._opened[export][: self._nbytes]

    @classmethod
    def let_go(cls) -> None:
        """Unmap all that this process has opened."""
        cls._opened.clear()


def read_device_probe(payload: Payload, rank: int) -> bytes:
    """`read_probe` for an engine rank, of which nothing stays mapped."""
    try:
        return read_probe(payload, rank)
    finally:
        IpcPayload.let_go()


def _exported(memory: torch.Tensor) -> tuple[Any, ...]:
    """What another process opens it by; to be opened once, and let go of once, by one process."""
    arguments: tuple[Any, ...] = reduce_tensor(memory)[1]  # type: ignore[no-untyped-call]
    return arguments


def _opened(export: tuple[Any, ...]) -> torch.Tensor:
    arguments: list[Any] = list(export)
    arguments[_DEVICE] = torch.cuda.current_device() if torch.cuda.is_available() else 0
    memory: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return memory


class IpcCarrier:
    """Memory on this process's GPU that engine ranks on this machine map."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._ranks = device, ranks
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._exports: tuple[tuple[Any, ...], ...] = ()

    def room(self, nbytes: int) -> torch.Tensor:
        if nbytes > self._memory.numel():
            self._memory, self._exports = _room(self._memory, nbytes), ()
        return self._memory[:nbytes]

    def payload(self, nbytes: int) -> IpcPayload:
        """See `Carrier`.

        Raises:
            WeightSyncError: the system does not share this memory.
        """
        if not self._exports:
            try:
                self._exports = tuple(_exported(self._memory) for _ in range(self._ranks))
            except Exception as error:
                raise WeightSyncError(f"the trainer's GPU memory cannot be shared: {error}") from error
        wait_for_copies(self._device)
        return IpcPayload(self._exports, nbytes)

    def deliver(self, nbytes: int, answer: "Future[Any]", timeout_s: float) -> None:
        """They map it."""

    def close(self) -> None:
        self._memory, self._exports = torch.empty(0, dtype=torch.uint8, device=self._device), ()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class BroadcastPayload:
    """Bytes that come to all ranks of the group that this process has joined."""

    nbytes: int

    def open(self, rank: int = 0) -> torch.Tensor:
        group = Joined.group
        if group is None:
            raise WeightSyncError(f"engine rank {rank} has not joined the trainer's group")
        try:
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device=group.device)
            if self.nbytes:
                bring(group, memory, RECEIVE_S)
        except Exception as error:
            Joined.replace(None)  # so that it does not wait for what was announced after this
            cause = f"it did not come within {RECEIVE_S:g} s" if isinstance(error, TimeoutError) else error
            raise WeightSyncError(f"engine rank {rank} did not receive a bucket: {cause}") from error
        return memory


class Joined:
    """The group that this process, of an engine rank, receives from."""

    group: ClassVar[Group | None] = None

    @classmethod
    def replace(cls, group: Group | None) -> None:
        before, cls.group = cls.group, group
        if before is not None:
            with contextlib.suppress(Exception):  # its other end may be gone
                before.close()


class BroadcastCarrier:
    """Memory on this process's GPU that is broadcast to the engine ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._memory = torch.empty(0, dtype=torch.uint8, device=group.device)

    def room(self, nbytes: int) -> torch.Tensor:
        self._memory = _room(self._memory, nbytes)
        return self._memory[:nbytes]

    def payload(self, nbytes: int) -> BroadcastPayload:
        return BroadcastPayload(nbytes)

    def deliver(self, nbytes: int, answer: "Future[Any]", timeout_s: float) -> None:
        """See `Carrier`.

        Raises:
            WeightSyncError: the group is broken.
        """
        if nbytes:
            try:
                bring(self._group, self._memory[:nbytes], timeout_s, answer)
            except TimeoutError:
                raise DeadlineError(f"a rank of the engine did not come for a bucket within {timeout_s:g} s") from None

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._group.device)
