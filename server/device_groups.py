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
RECEIVE_S = 60.0
"""How long an engine rank waits for a bucket that was announced to it. Less than `JOIN_S`: then it is free for a next group."""
LAUNCH_S = 1.0

T = TypeVar("T")


class Group(Protocol):
    """Where rank 0's memory comes to all others."""

    @property
    def device(self) -> torch.device: ...

    def broadcast(self, memory: torch.Tensor) -> None:
        """Bring rank 0's uint8[n] to the `memory` of all. Returns when it is there, and waits without end for a rank that does
        not come: see `bring`.

        Raises:
            WeightSyncError: the group was closed, before or meanwhile.
        """
        ...

    def close(self) -> None:
        """Leave, within seconds; idempotent. It ends a `broadcast` in another thread of this process; the other ranks are not
        told, and have a deadline of their own."""
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
        # Not the trainer's or the engine's: what waits for one of theirs never waits for another rank.
        self._stream = torch.cuda.Stream(communicator.device)  # type: ignore[no-untyped-call]
        self._launching = threading.Lock()
        self._closed = False

    @property
    def device(self) -> torch.device:
        device: torch.device = self._communicator.device
        return device

    def broadcast(self, memory: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            with self._launching:
                self._check()  # vLLM's communicator would let it pass
                self._communicator.broadcast(memory, src=0, stream=self._stream)
            self._stream.synchronize()
        self._check()  # what is cut off ends as if it was done

    def close(self) -> None:
        self._closed = True
        # A launch that is under way is let through, unless it waits for another rank, too: then it is cut off as well.
        launched = self._launching.acquire(timeout=LAUNCH_S)
        try:
            self._communicator.destroy()  # ncclCommAbort, for which vLLM waits 5 s
        finally:
            if launched:
                self._launching.release()

    def _check(self) -> None:
        if self._closed:
            raise WeightSyncError("the weights' NCCL group was closed")


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


def bring(group: Group, memory: torch.Tensor, timeout_s: float, answer: "Future[Any] | None" = None) -> None:
    """`group.broadcast` with an end: this thread waits for no stream that waits for another rank. If it fails, the group is
    closed. `answer` is that of the other ranks, if they give one.

    Raises:
        WeightSyncError: the group is broken.
        TimeoutError: a rank does not come in time.
        The error of `answer`: a rank failed.
    """
    wait_for_copies(memory.device)  # the group's stream does not see those of others
    brought = in_thread(lambda: group.broadcast(memory), "broadcast")
    try:
        outcome(brought, timeout_s, answer)
    except BaseException as error:
        with contextlib.suppress(Exception):  # what it failed with is the cause
            group.close()
        if brought.done() and brought.exception() is error:
            raise WeightSyncError(f"the weights' NCCL group is broken: {error}") from error
        raise


def wait_for_copies(device: torch.device) -> None:
    """Wait until what this thread copies from or to this device is done: another process does not see this one's streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


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
