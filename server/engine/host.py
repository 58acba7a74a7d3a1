"""The engine's side of a split server: a compute thread that owns an engine."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from opentinker.client.messages import Chunk, FloatArray, ImageChunk, SampleRequest
from opentinker.errors import EngineError, InvalidRequestError
from opentinker.server.buckets import Bucket, BucketAck
from opentinker.server.carriers import Payload
from opentinker.server.compute_thread import ComputeThread, explained
from opentinker.server.device_groups import Invitation
from opentinker.server.engine.base import AdapterId, LoraTensors, RolloutEngine, SampleRefused, WeightAck
from opentinker.server.engine.messages import Add, Answer, Call, EngineInfo, Message, Returned, StepFailed
from opentinker.server.images import ImageStore, takes_none


class BucketEngine(RolloutEngine, Protocol):
    """An engine that takes its base weights in buckets, on each of its ranks."""

    @property
    def ranks(self) -> int: ...

    def begin_update(self, update: int) -> None:
        """Make ready for the buckets of an update; what is cached of the old weights goes. No request is running.

        Raises:
            EngineError: an earlier update was not brought to its end, and this engine cannot recover from that.
        """
        ...

    def read_probes(self, payload: Payload) -> Sequence[bytes]:
        """What each rank reads of a probe; empty where its memory is out of reach."""
        ...

    def join_group(self, invitation: Invitation) -> None:
        """Have each rank join the group of the trainer's, which waits for them.

        Raises:
            WeightSyncError: one cannot, or this engine knows no such groups.
        """
        ...

    def take_bucket(self, bucket: Bucket, payload: Payload) -> Sequence[BucketAck]:
        """Write a bucket into the model, on each rank.

        Raises:
            WeightSyncError: it is not the one that was due, it is not what was sent, or the model has no place for it.
        """
        ...

    def finish_update(self, version: int, counts: Mapping[int, int]) -> Sequence[WeightAck]:
        """End the update: what each rank has received in it. `counts` is how many buckets each sender has sent.

        Raises:
            WeightSyncError: a rank misses one.
        """
        ...


@dataclass(frozen=True)
class HostedEngine:
    """What a host is built from."""

    engine: BucketEngine
    images: ImageStore | None = None
    """The images that the engine was made with; None: the model takes none."""


class EngineHost(ComputeThread[HostedEngine, Message, Answer]):
    """Works messages off in the order of arrival; between them, the engine steps. All methods may be called from any thread."""

    role = "engine"
    loads = "the engine"

    def __init__(self, build: Callable[[], HostedEngine]) -> None:
        super().__init__(build)
        self._parts: HostedEngine
        self._pinned: dict[str, tuple[str, ...]] = {}

    def start(self, timeout_s: float) -> EngineInfo:
        """Build the engine, once; what it is when it takes messages.

        Raises:
            DeadlineError: it took longer than `timeout_s`.
            Whatever `build` raises.
        """
        self._await_built(timeout_s)
        engine = self._parts.engine
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return EngineInfo(engine.max_model_len, engine.ranks, os.getpid(), self._build_s, device)

    def submit(self, messages: Sequence[Message]) -> None:
        """Queue messages.

        Raises:
            ServerLostError: the engine has stopped.
        """
        with self._changed:
            self._check()
            self._inbox.extend(messages)
            self._changed.notify_all()

    def _take(self, built: HostedEngine) -> None:
        self._parts = built

    def _work(self) -> None:
        while not self._stopping:
            self._advance()

    def _close(self) -> None:
        self._parts.engine.close()

    def _advance(self) -> None:
        """Wait for something to do; take in what has come, or step."""
        engine = self._parts.engine
        with self._changed:
            if not engine.has_unfinished():
                self._changed.wait_for(lambda: self._inbox or self._stopping)
            messages = list(self._inbox)
            self._inbox.clear()
        if self._stopping:
            return
        for message in messages:
            if isinstance(message, Add):
                self._add(message)
            else:
                self._give([self._call(message)])
        if engine.has_unfinished():
            self._step()

    def _add(self, add: Add) -> None:
        try:
            self._hold(add.request.request_id, add.images)
            self._parts.engine.add(add.request, add.adapter)
        except Exception as error:
            self._let_go(add.request.request_id)
            self._give([SampleRefused(add.request.request_id, explained(error, EngineError, "the engine refused a request"))])

    def _step(self) -> None:
        try:
            results = list(self._parts.engine.step())
        except Exception as error:
            why = explained(error, EngineError, "the engine failed")
            for request in self._parts.engine.abort_all():
                self._let_go(request.request_id)
            self._give([StepFailed(why)])
            return
        for result in results:
            self._let_go(result.request_id)
        self._give(results)

    def _call(self, call: Call) -> Returned:
        method = _METHODS.get(call.method)
        try:
            if method is None:
                raise InvalidRequestError(f"an engine has no method '{call.method}'")
            with self._holding(call.images):
                return Returned(call.number, method(self, *call.args))
        except Exception as error:
            return Returned(call.number, error=explained(error, EngineError, f"the engine failed to {call.method}"))

    def _hold(self, request_id: str, images: Sequence[bytes]) -> None:
        """Keep images as long as the request runs."""
        if images:
            store = self._parts.images
            if store is None:
                raise takes_none()
            hashes = tuple(store.add(images))
            store.pin(hashes)
            self._pinned[request_id] = hashes

    def _let_go(self, request_id: str) -> None:
        if (hashes := self._pinned.pop(request_id, ())) and self._parts.images is not None:
            self._parts.images.unpin(hashes)

    @contextmanager
    def _holding(self, images: Sequence[bytes]) -> Iterator[None]:
        self._hold("", images)  # no request has an empty id
        try:
            yield
        finally:
            self._let_go("")

    def _abort(self, request_ids: Sequence[str]) -> list[SampleRequest]:
        return self._aborted(self._parts.engine.abort(request_ids))

    def _abort_all(self) -> list[SampleRequest]:
        return self._aborted(self._parts.engine.abort_all())

    def _aborted(self, requests: list[SampleRequest]) -> list[SampleRequest]:
        for request in requests:
            self._let_go(request.request_id)
        return requests

    def _prompt_logprobs(self, prompts: Sequence[Sequence[Chunk]], adapter: AdapterId | None) -> list[FloatArray]:
        return self._parts.engine.prompt_logprobs(prompts, adapter)

    def _begin_update(self, update: int) -> None:
        self._parts.engine.begin_update(update)

    def _take_bucket(self, bucket: Bucket, payload: Payload) -> list[BucketAck]:
        return list(self._parts.engine.take_bucket(bucket, payload))

    def _finish_update(self, version: int, counts: Mapping[int, int]) -> list[WeightAck]:
        return list(self._parts.engine.finish_update(version, counts))

    def _update_adapter(self, adapter: LoraTensors, at: AdapterId) -> WeightAck:
        return self._parts.engine.update_adapter(adapter, at)

    def _drop_adapter(self, at: AdapterId) -> None:
        self._parts.engine.drop_adapter(at)

    def _read_probes(self, payload: Payload) -> list[bytes]:
        return list(self._parts.engine.read_probes(payload))

    def _join_group(self, invitation: Invitation) -> None:
        self._parts.engine.join_group(invitation)


_METHODS: dict[str, Callable[..., Any]] = {
    "abort": EngineHost._abort,
    "abort_all": EngineHost._abort_all,
    "prompt_logprobs": EngineHost._prompt_logprobs,
    "begin_update": EngineHost._begin_update,
    "take_bucket": EngineHost._take_bucket,
    "finish_update": EngineHost._finish_update,
    "update_adapter": EngineHost._update_adapter,
    "drop_adapter": EngineHost._drop_adapter,
    "read_probes": EngineHost._read_probes,
    "join_group": EngineHost._join_group,
}


def image_hashes_in(chunks: Sequence[Chunk]) -> list[str]:
    """The images that a prompt shows, each once."""
    return list(dict.fromkeys(chunk.sha256 for chunk in chunks if isinstance(chunk, ImageChunk)))
