"""What the ranks of a trainer compute together: sums and gathers of rows, votes, and a model whose layers are sharded.

A tensor is dealt out by the rows of its first axis, as `torch.chunk` cuts them, which is also how FSDP2 does it; so a rank may
have fewer rows than others, or none. N = ranks, W = numbers of one rank.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    GroupName,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from opentinker.errors import ConfigError
from opentinker.server.trainer.model import PackedModel
from opentinker.server.vision import language_prefix

BUCKET_BYTES = 64 * 2**20
"""Tensors are exchanged together up to this size."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one trainer find each other: a file in memory that they have open and that ends with them; no port."""

    count: int
    timeout_s: float
    """How long a rank waits for the others in any one exchange."""
    descriptor: int = field(default_factory=lambda: os.memfd_create("opentinker-ranks"))
    """Inherited by the other ranks."""
    name: str = field(default_factory=lambda: f"opentinker-{uuid.uuid4().hex}")

    @property
    def file(self) -> str:
        return f"/proc/self/fd/{self.descriptor}"


class Ranks:
    """One rank's side. All ranks call the same methods in the same order, each with its own part.

    The process group is none of PyTorch's default one, which an engine in this process may have for itself.
    """

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        """Waits for the other ranks.

        Raises:
            RuntimeError: they do not come in time.
        """
        self.rank, self.count, self.device = rank, meeting.count, device
        self._meeting = meeting
        store = PrefixStore(meeting.name, FileStore(meeting.file, meeting.count))
        store.set_timeout(timedelta(seconds=meeting.timeout_s))
        self._group = ProcessGroup(store, rank, meeting.count)
        kind, backend = _backend(device, store, rank, meeting)
        self._group._set_default_backend(kind)
        self._group._register_backend(torch.device(device.type), kind, backend)
        self._group._set_group_name(GroupName(meeting.name))
        _register_process_group(GroupName(meeting.name), self._group)
        self._mesh = DeviceMesh(device.type, torch.arange(meeting.count), _init_backend=False, _rank=rank)
        self._mesh._dim_group_names = [GroupName(meeting.name)]
        self._mesh._pg_registry[meeting.name] = self._group

    def abort(self) -> None:
        """Free whoever waits in an exchange: another rank is gone. From any thread; the ranks are of no use after it."""
        if self.device.type == "cuda":  # gloo finds out by itself, when the connection breaks
            self._group.abort()

    def close(self) -> None:
        """Forget the others. Nothing else is called after it."""
        # The file stays open until the process ends: torch's store opens it once more whenever it is destroyed, and would find
        # under a number that was closed whatever has got it since, and abort.
        _unregister_process_group(GroupName(self._meeting.name))

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows, a view."""
        start, stop = rows_of(tensor.shape[0], self.count, self.rank)
        return tensor[start:stop]

    def agree(self, fine: bool) -> bool:
        """Whether it is fine with all ranks."""
        against = torch.tensor([0.0 if fine else 1.0], device=self.device)
        return float(self.sum(against)) == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks, in place."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of all ranks, entry by entry, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor

    def sum_rows(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of the sums of full tensors."""
        summed: list[torch.Tensor] = []
        for bucket in buckets(tensors):
            flat_NW = torch.cat([self._dealt(tensor) for tensor in bucket], 1)
            own_W = flat_NW.new_empty(flat_NW.shape[1])
            dist.reduce_scatter_single(own_W, flat_NW.view(-1), group=self._group)
            parts = torch.split(own_W, [self._width(tensor.shape) for tensor in bucket])
            for part, tensor in zip(parts, bucket, strict=True):
                own = self.rows(tensor)
                summed.append(part[: own.numel()].view(own.shape))
        return summed

    def gather(self, rows: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> Iterator[torch.Tensor]:
        """The full tensors of these shapes, of which each rank gives its rows. All that is yielded has to be taken."""
        alike = groupby(zip(rows, shapes, strict=True), lambda pair: pair[0].dtype)
        pairs = [list(group) for _, group in alike]
        for bucket in (bucket for group in pairs for bucket in buckets(group, lambda p: p[0].element_size() * p[1].numel())):
            widths = [self._width(shape) for _, shape in bucket]
            own_W = torch.zeros(sum(widths), dtype=bucket[0][0].dtype, device=self.device)  # rows may be in the host's memory
            for part, (tensor, _) in zip(torch.split(own_W, widths), bucket, strict=True):
                part[: tensor.numel()].copy_(tensor.reshape(-1))
            flat = own_W.new_empty(self.count * len(own_W))
            dist.all_gather_single(flat, own_W, group=self._group)
            for part_NW, (_, shape) in zip(torch.split(flat.view(self.count, -1), widths, 1), bucket, strict=True):
                # A clone, for a view of one number could keep a stride that other code stumbles over.
                yield part_NW.reshape(-1)[: shape.numel()].clone(memory_format=torch.contiguous_format).view(shape)

    def shard(self, packed: PackedModel) -> None:
        """Deal out the parameters of the model's layers, in place: a layer is whole while it is computed, and gradients are
        summed over the ranks. What is no layer (embeddings, last norm, head), or of a vision tower, is whole on every rank.

        Raises:
            ConfigError: the model does not say what its layers are.
        """
        trunk, layers = packed.model.base_model, _layers(packed)
        if not layers:
            raise ConfigError(
                f"{type(packed.model).__name__} has no layers that could be sharded",
                hint="set trainer.ranks=1, or train an adapter",
            )
        # Layers that have held adapters keep their parameters, but under other names than the model's own.
        held = {id(p): (module, name) for module in packed.model.modules() for name, p in module._parameters.items()}
        places = {name: held[id(parameter)] for name, parameter in packed.names.items()}
        for layer in layers:
            fully_shard(layer, mesh=self._mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
            layer.set_gradient_divide_factor(1.0)  # losses are sums
            layer.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        whole = {parameter for parameter in trunk.parameters() if id(parameter) not in inside}
        fully_shard(trunk, mesh=self._mesh, ignored_params=whole)  # orders the layers' exchanges; it shards nothing itself
        packed.names.update({name: getattr(*place) for name, place in places.items()})

    @staticmethod
    def wholes(packed: PackedModel) -> list[torch.nn.Parameter]:
        """The parameters that `shard` leaves, or has left, whole on every rank."""
        inside = {id(parameter) for layer in _layers(packed) for parameter in layer.parameters()}
        return [parameter for parameter in packed.trainable().values() if id(parameter) not in inside]

    @staticmethod
    def layer_bytes(packed: PackedModel) -> int:
        """Of the largest layer, whole."""
        return max((sum(p.nbytes for p in layer.parameters()) for layer in _layers(packed)), default=0)

    def _width(self, shape: torch.Size) -> int:
        """Numbers of the rank that has most of a tensor."""
        first, last = rows_of(shape[0], self.count, 0)
        return (last - first) * shape[1:].numel()

    def _dealt(self, tensor: torch.Tensor) -> torch.Tensor:
        """[N, W]: the rows of each rank, with zeros behind the last ones."""
        missing = self.count * self._width(tensor.shape) - tensor.numel()
        return torch.nn.functional.pad(tensor.reshape(-1), (0, missing)).view(self.count, -1)


def _layers(packed: PackedModel) -> list[Any]:
    """Those of the language model, which every pass computes: a vision tower's, only those that show images."""
    prefix = language_prefix(packed.model)
    modules = packed.model.named_modules()
    return [m for name, m in modules if name.startswith(prefix) and isinstance(m, GradientCheckpointingLayer)]


def rows_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """[start, stop) of a rank's rows, of so many."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def buckets(items: Sequence[Any], bytes_of: Any = lambda tensor: tensor.nbytes) -> list[list[Any]]:
    """The items in their order, in lists of up to `BUCKET_BYTES`, or of one that is larger."""
    lists: list[list[Any]] = []
    room = 0
    for item in items:
        room -= bytes_of(item)
        if room < 0 or not lists:
            lists.append([])
            room = BUCKET_BYTES - bytes_of(item)
        lists[-1].append(item)
    return lists


def _backend(device: torch.device, store: Any, rank: int, meeting: Meeting) -> tuple[Any, Any]:
    timeout, store = timedelta(seconds=meeting.timeout_s), PrefixStore(device.type, store)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroup.BackendType.NCCL, ProcessGroupNCCL(store, rank, meeting.count, options)
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # all ranks are on one node
    return ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, rank, meeting.count, options)
