"""The NCCL group of a trainer's rank 0 and the ranks of an engine in other processes, by vLLM's own communicator.

The ranks meet by the id that NCCL gives the first of them: it opens no port of ours, and what is exchanged there is no pickle.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from opentinker.errors import WeightSyncError

JOIN_S = 120.0
"""How long a rank waits for the others to come."""

T = TypeVar("T")


class Group(Protocol):
    """Where rank 0's memory comes to all others."""

    @property
    def device(self) -> torch.device: ...

    def broadcast(self, memory: torch.Tensor) -> None:
        """Bring rank 0's uint8[n] to the `memory` of all; on the current stream."""
        ...

    def close(self) -> None:
        """Leave; whoever waits for this rank is freed."""
        ...


@dataclass(frozen=True)
class Invitation:
    """What a rank has to know to join."""

    unique_id: bytes = field(repr=False)
    ranks: int
    """Of the engine; the trainer, rank 0 of the group, is one more."""


class NcclGroup:
    """A `Group` on vLLM's `PyNcclCommunicator`."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    @property
    def device(self) -> torch.device:
        device: torch.device = self._communicator.device
        return device

    def broadcast(self, memory: torch.Tensor) -> None:
        self._communicator.broadcast(memory, src=0, stream=torch.cuda.current_stream(self.device))

    def close(self) -> None:
        self._communicator.destroy()


def invite(ranks: int) -> Invitation:
    """An invitation to a new group, for so many ranks of an engine.

    Raises:
        WeightSyncError: vLLM or NCCL is not here.
    """
    try:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return Invitation(bytes(NCCLLibrary().ncclGetUniqueId()), ranks)
    except Exception as error:
        raise WeightSyncError(f"there is no NCCL to meet the engine by: {error}") from error


def join(
    invitation: Invitation,
    rank: int,
    device: torch.device,
    timeout_s: float = JOIN_S,
    answer: "Future[Any] | None" = None,
) -> Group:
    """Become rank `rank` of the group; returns when all have come. `answer` is that of the others, if they give one.

    Raises:
        WeightSyncError: they do not come in time, or NCCL does not connect them.
        The error of `answer`: they refused or failed.
    """

    def connect() -> Group:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        communicator = uid_init_process_group(invitation.unique_id, rank, invitation.ranks + 1, device)
        if communicator.disabled:  # it would let every broadcast pass without one
            raise WeightSyncError("vLLM's use of NCCL is turned off here")
        return NcclGroup(communicator)

    return within(connect, timeout_s, f"rank {rank} of {invitation.ranks + 1}", answer)


def within(connect: Callable[[], Group], timeout_s: float, who: str, answer: "Future[Any] | None" = None) -> Group:
    """What `connect` gives. NCCL waits without end for a peer that does not come: then its thread is left behind, and leaves
    the group if that is connected after all.

    Raises:
        WeightSyncError: it failed, or gives nothing in time.
        The error of `answer`: the others failed before it gave anything.
    """
    joined = in_thread(connect, "join-group")
    try:
        return outcome(joined, timeout_s, answer)
    except BaseException as error:
        joined.add_done_callback(_leave)
        if joined.done() and joined.exception() is error:
            raise WeightSyncError(f"{who} of the weights' NCCL group cannot join: {error}") from error
        if isinstance(error, TimeoutError):
            raise WeightSyncError(f"{who} of the weights' NCCL group waited {timeout_s:g} s for the others in vain") from None
        raise


def _leave(joined: "Future[Group]") -> None:
    if joined.exception() is None:
        with contextlib.suppress(Exception):  # the others have given up
            joined.result().close()


def in_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """The outcome of `work` in a thread of its own, which a process that ends does not wait for."""
    outcome_of = Future[T]()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            outcome_of.set_exception(error)
        else:
            outcome_of.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome_of


def outcome(work: "Future[T]", timeout_s: float, answer: "Future[Any] | None" = None) -> T:
    """What `work` gives, unless those whom it waits for fail before: that is what `answer` says.

    Raises:
        The error of `answer`, or of `work`.
        TimeoutError: neither came to an end in time.
    """
    until = time.monotonic() + timeout_s
    done, _ = wait({work} if answer is None else {work, answer}, timeout_s, FIRST_COMPLETED)
    if answer is not None and answer in done:
        answer.result()
    return work.result(max(until - time.monotonic(), 0.0))
