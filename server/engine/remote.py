"""An engine in another process, seen from the worker: it goes on sampling while the worker trains."""

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, cast

from opentinker.client.messages import Chunk, FloatArray, SampleRequest, SampleResult
from opentinker.errors import DeadlineError, ServerLostError
from opentinker.server.buckets import BUCKET_BYTES
from opentinker.server.engine.base import AdapterId, LoraTensors, NamedTensors, SampleRefused, WeightAck
from opentinker.server.engine.host import image_hashes_in
from opentinker.server.engine.messages import Add, Answer, Call, EngineInfo, EngineLink, Message, Returned, StepFailed
from opentinker.server.images import ImageStore
from opentinker.server.sending import ACK_S
from opentinker.server.updates import Updates
from opentinker.server.ways import Wish, first_device, kinds_to_try

COLLECT_S = 10.0
CALL_S = 600.0
"""An engine that has not answered a call after this long counts as stuck; calls wait for one engine step at most."""


class RemoteEngine:
    """`RolloutEngine` over a link. Several threads may use it, one at a time; `wait` may be called beside them."""

    def __init__(
        self,
        link: EngineLink,
        info: EngineInfo,
        *,
        images: ImageStore | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        device: str = "cpu",
        weight_carrier: Wish = "auto",
        call_s: float = CALL_S,
        ack_s: float = ACK_S,
    ) -> None:
        """`device` is where the trainer's weights are, "cpu" or "cuda".

        Raises:
            ConfigError: `weight_carrier` is not between these devices.
        """
        self.info = info
        kinds = kinds_to_try(weight_carrier, device, info.device)
        self._updates = Updates(self, info.ranks, first_device(device), kinds, bucket_bytes=bucket_bytes, ack_s=ack_s)
        self.on_answer: Callable[[], None] = lambda: None
        """Called, from a thread of its own, when there is something for `step`, or the engine is lost."""
        self._link = link
        self._images = images
        self._call_s = call_s
        self._changed = threading.Condition()
        self._ready: list[SampleResult | SampleRefused | StepFailed] = []
        self._calls: dict[int, Future[Any]] = {}
        self._lost: ServerLostError | None = None
        self._closed = False
        self._outgoing: list[Message] = []
        self._unfinished: set[str] = set()
        self._numbers = count()
        self._version = 0
        self._thread = threading.Thread(target=self._collect, name="engine-answers", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    @property
    def needs_step(self) -> bool:
        """Whether `step` has something to send, to give, or to raise."""
        with self._changed:
            return bool(self._ready or self._outgoing) or self._lost is not None

    def wait(self, timeout_s: float) -> None:
        """Wait until `step` has something to give, or to raise, but no longer than `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._lost is not None, timeout_s)

    def add(self, request: SampleRequest, adapter: AdapterId | None = None) -> None:
        """As `RolloutEngine.add`, but a refusal comes with a later `step`. Requests leave with the next `flush`."""
        self._require()
        self._outgoing.append(Add(request, adapter, self._files(request.prompt)))
        self._unfinished.add(request.request_id)

    def flush(self) -> None:
        """Send the requests that were added.

        Raises:
            ServerLostError: the engine's process is gone.
        """
        self._require()
        messages, self._outgoing = self._outgoing, []
        if messages:
            self._link.send(messages)

    def step(self) -> Sequence[SampleResult | SampleRefused]:
        """What has come since the last call, without waiting.

        Raises:
            EngineError: the engine failed, and has given up all requests.
            ServerLostError: its process is gone.
        """
        self.flush()
        with self._changed:
            answers, self._ready = self._ready, []
        failed = [answer for answer in answers if isinstance(answer, StepFailed)]
        ended = [answer for answer in answers if not isinstance(answer, StepFailed)]
        self._unfinished.difference_update(answer.request_id for answer in ended)
        if failed:
            self._unfinished.clear()
            raise failed[0].error
        return ended

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def abort(self, request_ids: Collection[str]) -> list[SampleRequest]:
        return self._aborted(self.call("abort", list(request_ids)))

    def abort_all(self) -> list[SampleRequest]:
        stopped = self._aborted(self.call("abort_all"))
        with self._changed:
            self._ready = []
        self._unfinished.clear()
        return stopped

    def _aborted(self, requests: list[SampleRequest]) -> list[SampleRequest]:
        self._unfinished.difference_update(request.request_id for request in requests)
        return requests

    def prompt_logprobs(self, prompts: Sequence[Sequence[Chunk]], adapter: AdapterId | None = None) -> list[FloatArray]:
        files = self._files([chunk for prompt in prompts for chunk in prompt])
        return cast(list[FloatArray], self.call("prompt_logprobs", tuple(prompts), adapter, files=files))

    def update_weights(self, weights: NamedTensors, version: int) -> WeightAck:
        """See `RolloutEngine`: in buckets, each of which every rank of the engine acknowledges. Raises as `Updates.send`."""
        ack = self._updates.send(weights, version)
        self._version = version
        return ack

    def update_adapter(self, adapter: LoraTensors, at: AdapterId) -> WeightAck:
        return cast(WeightAck, self.call("update_adapter", adapter.on_host(), at))

    def drop_adapter(self, at: AdapterId) -> None:
        self.call("drop_adapter", at)

    def call(self, method: str, *args: Any, files: tuple[bytes, ...] = ()) -> Any:
        """What one of the engine's methods returns, after all that was added before.

        Raises:
            OpenTinkerError: the method's own error.
            DeadlineError: it does not answer in time.
            ServerLostError: the engine's process is gone.
        """
        answer = self.start(method, *args, files=files)
        try:
            return answer.result(self._call_s)
        except TimeoutError:
            raise DeadlineError(f"the engine did not answer '{method}' within {self._call_s:g} s") from None

    def start(self, method: str, *args: Any, files: tuple[bytes, ...] = ()) -> "Future[Any]":
        """As `call`, which waits for this."""
        number, answer = next(self._numbers), Future[Any]()
        with self._changed:
            if self._lost is not None:
                raise self._lost
            self._calls[number] = answer
        self._outgoing.append(Call(number, method, args, files))
        self.flush()
        return answer

    def close(self) -> None:
        """Let go of the engine; its process is whoever's who started it. Idempotent."""
        self._closed = True
        self._lose(ServerLostError("the server was stopped"))
        self._updates.close()

    def _files(self, chunks: Sequence[Chunk]) -> tuple[bytes, ...]:
        hashes = image_hashes_in(chunks)
        if not hashes:
            return ()
        assert self._images is not None, "only a store can have resolved the images of a request"
        return tuple(self._images.encoded(sha256) for sha256 in hashes)

    def _require(self) -> None:
        with self._changed:
            if self._lost is not None:
                raise self._lost

    def _collect(self) -> None:
        while not self._closed:
            try:
                answers = self._link.collect(COLLECT_S)
            except ServerLostError as error:
                self._lose(error)
                return
            except Exception as error:
                self._lose(ServerLostError(f"the server's engine cannot be reached: {error!r}"))
                return
            self._note(answers)

    def _note(self, answers: Sequence[Answer]) -> None:
        ends: list[tuple[Future[Any], Returned]] = []
        with self._changed:
            for answer in answers:
                if isinstance(answer, Returned):
                    if (waiting := self._calls.pop(answer.number, None)) is not None:
                        ends.append((waiting, answer))
                else:
                    self._ready.append(answer)
            self._changed.notify_all()
        for waiting, returned in ends:
            if returned.error is not None:
                waiting.set_exception(returned.error)
            else:
                waiting.set_result(returned.value)
        if answers:
            self.on_answer()

    def _lose(self, error: ServerLostError) -> None:
        with self._changed:
            if self._lost is None:
                self._lost = error
            calls, self._calls = self._calls, {}
            self._changed.notify_all()
        for waiting in calls.values():
            waiting.set_exception(self._lost)
        self.on_answer()
