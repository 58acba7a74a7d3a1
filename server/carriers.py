"""What carries the bytes of weight buckets from one process to another: memory that both map, or the call itself."""

import mmap
import os
import secrets
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from opentinker.errors import WeightSyncError

NONCE_BYTES = 32


class Payload(Protocol):
    """How a receiver gets at a bucket's bytes. It crosses between processes."""

    def open(self, rank: int = 0) -> torch.Tensor:
        """The bytes, uint8[n], for an engine rank; they may change once the bucket was acknowledged. To be called by every
        rank, once for each bucket: some are brought to all at a time.

        Raises:
            WeightSyncError: they cannot be reached from here.
        """
        ...


class Carrier(Protocol):
    """A place for one bucket after another. Its memory is the sender's until `payload`, and again after the acknowledgement."""

    def room(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] to write into; what was there is kept as far as it fits."""
        ...

    def payload(self, nbytes: int) -> Payload:
        """What the receivers are sent for the first `nbytes`."""
        ...

    def deliver(self, nbytes: int, answer: "Future[Any]", timeout_s: float) -> None:
        """Bring these to receivers that do not fetch them; they have been sent the payload, and `answer` will be their
        acknowledgement.

        Raises:
            The error of `answer`: a receiver failed before it came for them.
            DeadlineError: a receiver does not come in time.
        """
        ...

    def close(self) -> None:
        """Give the memory back; idempotent."""
        ...


def can_share() -> bool:
    """Whether this system has memory that is shared without a file (Linux)."""
    return hasattr(os, "memfd_create")


class SharedPayload:
    """Memory of another process on this machine. It needs no file system and no limit of /dev/shm, and dies with its owner."""

    def __init__(self, path: str, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes

    def open(self, rank: int = 0) -> torch.Tensor:
        if not self._nbytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            fd = os.open(self._path, os.O_RDWR)
            try:
                mapped = mmap.mmap(fd, self._nbytes)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise WeightSyncError(f"the sender's memory cannot be reached at {self._path}: {error}") from error
        return torch.frombuffer(mapped, dtype=torch.uint8)


class SharedCarrier:
    """Anonymous memory that other processes of this user on this machine can map, by this one's file descriptor."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("opentinker-weights", os.MFD_CLOEXEC)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def room(self, nbytes: int) -> torch.Tensor:
        if nbytes > self._memory.numel():
            os.ftruncate(self._fd, nbytes)
            self._memory = torch.frombuffer(mmap.mmap(self._fd, nbytes), dtype=torch.uint8)
        return self._memory[:nbytes]

    def payload(self, nbytes: int) -> SharedPayload:
        return SharedPayload(f"/proc/{os.getpid()}/fd/{self._fd}", nbytes)

    def deliver(self, nbytes: int, answer: "Future[Any]", timeout_s: float) -> None:
        """They map it."""

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class InlinePayload:
    """The bytes themselves, which travel with the call: for processes on different machines."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data

    def open(self, rank: int = 0) -> torch.Tensor:
        # What Ray hands out is read-only, which torch has no word for.
        return torch.from_numpy(self._data if self._data.flags.writeable else self._data.copy())


class InlineCarrier:
    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def room(self, nbytes: int) -> torch.Tensor:
        if nbytes > self._memory.numel():
            grown = torch.empty(nbytes, dtype=torch.uint8)
            grown[: self._memory.numel()] = self._memory
            self._memory = grown
        return self._memory[:nbytes]

    def payload(self, nbytes: int) -> InlinePayload:
        return InlinePayload(self._memory[:nbytes].numpy())

    def deliver(self, nbytes: int, answer: "Future[Any]", timeout_s: float) -> None:
        """They have it."""

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


class Probe:
    """Finds out whether another process reaches this one's memory: it has to read there what only this one knows."""

    def __init__(self, carrier: Carrier | None = None) -> None:
        """`carrier` is where that is put, by default `SharedCarrier`; it is closed with the probe."""
        self._carrier = SharedCarrier() if carrier is None else carrier
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._carrier.room(NONCE_BYTES).copy_(torch.frombuffer(bytearray(self._nonce), dtype=torch.uint8))

    @property
    def payload(self) -> Payload:
        return self._carrier.payload(NONCE_BYTES)

    def is_answer(self, *seen: bytes) -> bool:
        """Whether that is what `read_probe` gives where the memory is reached, of every receiver; closes the probe."""
        self.close()
        return all(each == self._nonce for each in seen)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._carrier.close()


def read_probe(payload: Payload, rank: int = 0) -> bytes:
    """What is read of a probe in the receiver's process; empty where its memory is out of reach."""
    try:
        return bytes(payload.open(rank).cpu().numpy().tobytes())
    except WeightSyncError:
        return b""
