"""How a trainer's weights reach an engine in another process: from GPU to GPU, or through the host's memory."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import torch

from opentinker.errors import ConfigError, DeadlineError, OpenTinkerError, ServerLostError, WeightSyncError
from opentinker.server.carriers import Carrier, InlineCarrier, Probe, SharedCarrier, can_share
from opentinker.server.device_carriers import BroadcastCarrier, IpcCarrier
from opentinker.server.device_groups import JOIN_S, Group, invite, join

log = logging.getLogger(__name__)

Wish = Literal["auto", "host", "ipc", "nccl"]
Kind = Literal["host", "ipc", "nccl"]
BUFFERS = 2
"""One bucket is filled while another is on its way."""


class Caller(Protocol):
    """The engine, as far as it is asked here."""

    def call(self, method: str, *args: Any) -> Any: ...

    def start(self, method: str, *args: Any) -> "Future[Any]": ...


class Way(Protocol):
    """Carriers for one update after another."""

    @property
    def kind(self) -> Kind: ...

    def carriers(self) -> Sequence[Carrier]:
        """For one update."""
        ...

    def rest(self) -> None:
        """An update is at its end: what need not be held until the next is given back."""
        ...

    def close(self) -> None:
        """Give all back; idempotent. After a failed update the engine may still be reading."""
        ...


def first_device(device: str) -> torch.device:
    """Where a trainer's weights come from: the first device of the kind ("cpu" or "cuda"), which the lead rank has."""
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def kinds_to_try(wish: Wish, trainer: str, engine: str, *, shared: bool = False) -> tuple[Kind, ...]:
    """The ways for ends on these devices ("cpu" or "cuda"), the best first. `shared`: both are on the same devices.

    IPC is one copy, on a GPU that both share or between two of one node, and needs no partner at work; NCCL also reaches other
    nodes, and refuses two ranks on one GPU.

    Raises:
        ConfigError: what is wished for is between GPUs, and an end has none; or between different ones, and both share them.
    """
    if wish == "nccl" and shared:
        raise ConfigError(
            "engine.weight_carrier=nccl is between different GPUs; this trainer and its engine share theirs",
            hint="set engine.weight_carrier=auto (ipc or host), or resources.layout=split",
        )
    if wish == "host":
        return ("host",)
    on_gpus = trainer == engine == "cuda"
    if wish == "auto":
        if not on_gpus:
            return ("host",)
        return ("ipc", "host") if shared else ("ipc", "nccl", "host")
    if not on_gpus:
        raise ConfigError(
            f"engine.weight_carrier={wish} is between GPUs; the trainer is on {trainer}, the engine on {engine}",
            hint="set engine.weight_carrier=auto, or give both GPUs (resources.gpus; split: resources.trainer.gpus, "
            "resources.rollout.gpus)",
        )
    return (wish,)


def open_way(kinds: Sequence[Kind], engine: Caller, ranks: int, device: torch.device) -> Way:
    """The first of these ways that is proved to reach every rank of the engine.

    Raises:
        WeightSyncError: none does.
        ServerLostError: the engine is gone.
    """
    reasons: list[str] = []
    for kind in kinds:
        try:
            way = _OPENERS[kind](engine, ranks, device)
        except ServerLostError:
            raise
        except OpenTinkerError as error:
            reasons.append(f"{kind}: {error.detail}")
            continue
        if reasons:
            log.warning("event=weight_carrier kind=%s because=%r", kind, "; ".join(reasons))
        else:
            log.info("event=weight_carrier kind=%s", kind)
        return way
    raise WeightSyncError(f"the trainer's weights do not reach the engine, {'; '.join(reasons)}", hint=_HINT)


_HINT = "engine.weight_carrier=host always reaches it, through the host's memory; engine.weight_carrier=auto tries all"


class HostWay:
    """The host's memory, which is kept from update to update."""

    kind: Kind = "host"

    def __init__(self, made: Sequence[Carrier]) -> None:
        self._carriers = list(made)

    def carriers(self) -> Sequence[Carrier]:
        return self._carriers

    def rest(self) -> None:
        """Host memory is plenty."""

    def close(self) -> None:
        for carrier in self._carriers:
            carrier.close()


class DeviceWay:
    """A GPU's memory, which is held during an update only; then it is the allocator's, for whatever this process computes."""

    def __init__(self, kind: Kind, make: Callable[[], Carrier], group: Group | None = None) -> None:
        self.kind = kind
        self._make, self._group = make, group
        self._carriers: list[Carrier] = []

    def carriers(self) -> Sequence[Carrier]:
        self._carriers = [self._make() for _ in range(BUFFERS)]
        return self._carriers

    def rest(self) -> None:
        carriers, self._carriers = self._carriers, []
        for carrier in carriers:
            carrier.close()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self.rest()


def _host(engine: Caller, ranks: int, device: torch.device) -> Way:
    """Memory that the engine's ranks map, if they can, and otherwise the calls themselves."""
    shares = can_share() and _reach(engine, ranks, Probe())
    return HostWay([SharedCarrier() if shares else InlineCarrier() for _ in range(BUFFERS)])


def _reach(engine: Caller, ranks: int, probe: Probe) -> bool:
    """Whether each rank reads the probe."""
    try:
        seen = engine.call("read_probes", probe.payload)
    except BaseException:
        probe.close()
        raise
    return probe.is_answer(*seen) and len(seen) == ranks


def _ipc(engine: Caller, ranks: int, device: torch.device) -> Way:
    try:
        probe = Probe(IpcCarrier(device, ranks))
    except torch.OutOfMemoryError as error:
        raise WeightSyncError(f"the trainer's GPU has no memory for a probe: {error}") from error
    if not _reach(engine, ranks, probe):
        raise WeightSyncError("an engine rank cannot read the trainer's GPU memory")
    return DeviceWay("ipc", lambda: IpcCarrier(device, ranks))


def _nccl(engine: Caller, ranks: int, device: torch.device) -> Way:
    invitation = invite(ranks)
    answer = engine.start("join_group", invitation)  # it waits there for this end
    group = join(invitation, 0, device, answer=answer)
    try:
        answer.result(JOIN_S)
    except TimeoutError:
        group.close()
        raise DeadlineError(f"the engine did not join the weights' NCCL group within {JOIN_S:g} s") from None
    except BaseException:
        group.close()
        raise
    return DeviceWay("nccl", lambda: BroadcastCarrier(group), group)


_OPENERS: dict[Kind, Callable[[Caller, int, torch.device], Way]] = {"host": _host, "ipc": _ipc, "nccl": _nccl}
