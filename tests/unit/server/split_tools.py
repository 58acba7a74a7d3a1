"""A worker whose engine is elsewhere, for tests: a host in this process, and fakes: an engine that takes buckets, a trainer."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest

from opentinker.client.messages import Datum, FloatArray
from opentinker.server.buckets import Arrivals, Bucket, BucketAck
from opentinker.server.carriers import Payload, read_probe
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import NamedTensors, RolloutEngine, WeightAck
from opentinker.server.engine.host import BucketEngine, EngineHost, HostedEngine
from opentinker.server.engine.links import LocalLink
from opentinker.server.engine.messages import Answer, Message
from opentinker.server.engine.remote import RemoteEngine

START_S = 60.0
LAYOUTS = pytest.mark.parametrize("layout", ["colocated", "split"])


class PickledLink(LocalLink):
    """Hands over copies, as between processes."""

    def send(self, messages: Sequence[Message]) -> None:
        super().send(pickle.loads(pickle.dumps(messages)))

    def collect(self, timeout_s: float) -> Sequence[Answer]:
        answers: Sequence[Answer] = pickle.loads(pickle.dumps(super().collect(timeout_s)))
        return answers


class Bucketed:
    """A fake engine, which only knows `update_weights`, as one that takes buckets."""

    ranks = 1
    max_model_len = 64

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def read_probes(self, payload: Payload) -> Sequence[bytes]:
        return [read_probe(payload)]

    def begin_update(self, update: int) -> None:
        self._arrivals = Arrivals(0, update)
        self._tensors: list[Any] = []

    def take_bucket(self, bucket: Bucket, payload: Payload) -> Sequence[BucketAck]:
        self._arrivals.admit(bucket)
        received = [(name, tensor.clone()) for name, tensor in bucket.tensors(payload.open())]
        self._tensors += received
        return [self._arrivals.note(bucket, {name: tensor_digest(tensor) for name, tensor in received})]

    def finish_update(self, version: int, counts: Mapping[int, int]) -> Sequence[WeightAck]:
        self._arrivals.close(counts)
        return [self._engine.update_weights(cast(NamedTensors, self._tensors), version)]


class StillTrainer:
    """A fake trainer of full parameters, under which every token has the logprob 0."""

    def create_policy(self, *_: object) -> None:
        pass

    def samples(self, policy: str) -> bool:
        return True

    def is_lora(self, policy: str) -> bool:
        return False

    def forward(self, policy: str, data: Sequence[Datum], **_: object) -> dict[str, list[FloatArray]]:
        return {"logprobs": [np.zeros(len(datum), np.float32) for datum in data]}

    def close(self) -> None:
        pass


@contextmanager
def placed(engine: Any, layout: str) -> Iterator[RolloutEngine]:
    """The fake engine as a worker of this layout has it."""
    if layout == "colocated":
        yield engine
        return
    host = EngineHost(lambda: HostedEngine(cast(BucketEngine, Bucketed(engine))))
    remote = RemoteEngine(PickledLink(host), host.start(START_S), bucket_bytes=64)
    try:
        yield remote
    finally:
        remote.close()
        host.stop()
