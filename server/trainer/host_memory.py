"""Tensors in the host's memory that a GPU copies from and to by itself, beside its computations."""

import contextlib
import mmap
from collections.abc import Callable, Sequence

import torch

from opentinker.errors import TooLargeError, TrainerError
from opentinker.server.buckets import aligned, typed

BLOCK_BYTES = 4 * 2**20
"""Small tensors share a block of this size, for each is locked by a call of its own."""

Lock = Callable[[torch.Tensor], Callable[[], None]]
"""Keep the pages of a block, uint8[n], where they are, so that a GPU may read and write them; how to undo that."""


class HostMemory:
    """Memory of one owner, in blocks of whole pages, page-locked.

    torch's own allocator of pinned memory takes the next power of two for each tensor, up to twice as much.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._unlock: list[Callable[[], None]] = []
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of its own memory.

        Raises:
            TooLargeError: the system has not so much.
            TrainerError: it cannot be locked.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes > BLOCK_BYTES:
            return typed(self._new(nbytes), dtype, shape)
        if aligned(self._used) + nbytes > len(self._block):
            self._block, self._used = self._new(BLOCK_BYTES), 0
        start = aligned(self._used)
        self._used = start + nbytes
        return typed(self._block[start : self._used], dtype, shape)

    def _new(self, nbytes: int) -> torch.Tensor:
        try:
            # Shared, so that a fork does not give this process, at its next write, other pages than the locked ones.
            block = torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        except OSError as error:
            raise TooLargeError(
                f"the host has no {nbytes} bytes for optimizer state: {error}",
                hint="set trainer.optimizer_state=device, train an adapter (lora), or give the server more memory",
            ) from error
        self._unlock.append(self._lock(block))
        return block

    def close(self) -> None:
        """Unlock it; idempotent. Tensors stay what they are for as long as they are held."""
        while self._unlock:
            self._unlock.pop()()


def host_memory(device: torch.device) -> HostMemory:
    """For state that is stepped on this device."""
    return HostMemory(_locked_for_cuda if device.type == "cuda" else lambda block: lambda: None)


def _locked_for_cuda(block: torch.Tensor) -> Callable[[], None]:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)):
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # CUDA reports an error once more, at the next kernel
        raise TrainerError(
            f"CUDA cannot lock {block.nbytes} bytes of the host's memory (cudaHostRegister: error {code})",
            hint="set trainer.optimizer_state=device, or let the server lock more memory (ulimit -l)",
        )

    def unlock() -> None:
        runtime.cudaHostUnregister(block.data_ptr())

    return unlock
