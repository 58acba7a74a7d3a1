"""The base weights of a model in this process, and the update that is written into them: all at once, or bucket by bucket."""

from collections.abc import Iterable, Mapping

import torch

from opentinker.errors import WeightSyncError
from opentinker.server.buckets import Arrivals, Bucket, BucketAck
from opentinker.server.carriers import Payload
from opentinker.server.device_carriers import IpcPayload
from opentinker.server.device_groups import wait_for_copies
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import NamedTensors, WeightAck


class ModelWeights:
    """`parameters` by the names under which they are sent; tied tensors are one parameter under several names."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], device: torch.device) -> None:
        self._parameters = dict(parameters)
        self._device = device
        self._arrivals = Arrivals(0, 0)
        self._received: dict[str, str] = {}
        self._written: dict[int, str] = {}
        """By parameter, the digest of what an update has put there."""

    def begin(self, update: int) -> None:
        """An update begins; whatever came of an earlier one is forgotten."""
        IpcPayload.let_go()
        self._arrivals, self._received, self._written = Arrivals(0, update), {}, {}

    def take(self, bucket: Bucket, payload: Payload) -> BucketAck:
        """Write a bucket.

        Raises:
            WeightSyncError: it is not the one that was due, or not what was sent; or see `write`.
        """
        memory = payload.open()  # also of one that is refused: the sender may be bringing it
        self._arrivals.admit(bucket)
        digests = self.write(bucket.tensors(memory))
        wait_for_copies(self._device)  # out of the sender's memory, which it fills again once this is acknowledged
        return self._arrivals.note(bucket, digests)

    @torch.no_grad()
    def write(self, weights: NamedTensors) -> dict[str, str]:
        """Write tensors; the digests of what was received.

        Raises:
            WeightSyncError: one has no place or another shape, or tied tensors differ.
        """
        digests: dict[str, str] = {}
        for name, tensor in weights:
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                place = "no place" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise WeightSyncError(f"the engine has {place} for '{name}' of shape {tuple(tensor.shape)}")
            digests[name] = tensor_digest(tensor)
            if self._written.setdefault(id(parameter), digests[name]) != digests[name]:
                raise WeightSyncError(f"'{name}' is tied to a parameter that arrived with other values")
            parameter.copy_(tensor)
        self._received.update(digests)
        return digests

    def finish(self, counts: Mapping[int, int]) -> WeightAck:
        """The last bucket was taken; what was received. `counts` is how many buckets each sender has sent.

        Raises:
            WeightSyncError: one is missing.
        """
        IpcPayload.let_go()
        self._arrivals.close(counts)
        return self.ack()

    def ack(self) -> WeightAck:
        """What was received, and which parameters it has reached."""
        parameters = self._parameters
        reached = frozenset(name for name, parameter in parameters.items() if id(parameter) in self._written)
        return WeightAck(self._received, reached, frozenset(parameters))
