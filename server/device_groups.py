"""The NCCL group of a trainer's rank 0 and the ranks of an engine in other processes, by vLLM's own communicator.

The ranks meet by the id that NCCL gives the first of them: it opens no port of ours, and what is exchanged there is no pickle.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from opentinker.errors import WeightSyncError

JOIN_S = 120.0
"""How long a rank waits for the others to come."""


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


def join(invitation: Invitation, rank: int, device: torch.device, timeout_s: float = JOIN_S) -> Group:
    """Become rank `rank` of the group; returns when all have come.

    Raises:
        WeightSyncError: they do not come in time, or NCCL does not connect them.
    """

    def connect() -> Group:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        communicator = uid_init_process_group(invitation.unique_id, rank, invitation.ranks + 1, device)
        if communicator.disabled:  # it would let every broadcast pass without one
            raise WeightSyncError("vLLM's use of NCCL is turned off here")
        return NcclGroup(communicator)

    return within(connect, timeout_s, f"rank {rank} of {invitation.ranks + 1}")


def within(connect: Callable[[], Group], timeout_s: float, who: str) -> Group:
    """What `connect` gives. NCCL waits without end for a peer that does not come: then its thread is left behind.

    Raises:
        WeightSyncError: it failed, or gives nothing in time.
    """
    found: list[Group | Exception] = []

    def run() -> None:
        try:
            found.append(connect())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="join-group", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise WeightSyncError(f"{who} of the weights' NCCL group waited {timeout_s:g} s for the others in vain")
    if isinstance(found[0], Exception):
        raise WeightSyncError(f"{who} of the weights' NCCL group cannot join: {found[0]}") from found[0]
    return found[0]
