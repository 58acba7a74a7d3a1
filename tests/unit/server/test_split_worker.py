"""A worker whose engine is elsewhere: samples go on while the trainer computes, a publish is where the two meet, and an engine
that fails, refuses or dies ends what waits for it, with the cause."""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from split_tools import Bucketed, PickledLink, StillTrainer

from opentinker.client.messages import Chunk, FloatArray, Sample, SampleRequest, SampleResult, TokenChunk
from opentinker.errors import ContextOverflowError, EngineError, InvalidRequestError, ServerLostError
from opentinker.server.carriers import InlineCarrier, SharedCarrier
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import AdapterId, NamedTensors, WeightAck
from opentinker.server.engine.host import BucketEngine, EngineHost, HostedEngine
from opentinker.server.engine.messages import Answer, Call, Message
from opentinker.server.engine.remote import RemoteEngine
from opentinker.server.protocol import CommandWork, Completion, SampleWork, Work
from opentinker.server.state import Parts
from opentinker.server.trainer.base import Trainer
from opentinker.server.worker import Worker

WAIT_S = 60.0
PROMPT = (TokenChunk(np.asarray([1, 2], np.int32)),)


class GatedEngine:
    """Answers when it is let. `fails` is what its next step raises."""

    def __init__(self) -> None:
        self.version = 0
        self.open = threading.Event()
        self.open.set()
        self.fails: Exception | None = None
        self.running: dict[str, SampleRequest] = {}

    def add(self, request: SampleRequest, adapter: AdapterId | None = None) -> None:
        if request.n > 100:
            raise ContextOverflowError("too much")
        self.running[request.request_id] = request

    def step(self) -> list[SampleResult]:
        if self.fails is not None:
            failure, self.fails = self.fails, None
            raise failure
        if not self.open.wait(0.001):
            return []
        done, self.running = self.running, {}
        return [self._answer(request) for request in done.values()]

    def _answer(self, request: SampleRequest) -> SampleResult:
        sample = Sample(np.asarray([3], np.int32), np.zeros(1, np.float32), "stop", ((self.version, 1),))
        return SampleResult(request.request_id, (sample,), request.params)

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def abort(self, request_ids: Collection[str]) -> list[SampleRequest]:
        return [self.running.pop(name) for name in list(self.running) if name in request_ids]

    def abort_all(self) -> list[SampleRequest]:
        return self.abort(set(self.running))

    def prompt_logprobs(self, prompts: Sequence[Sequence[Chunk]], adapter: AdapterId | None = None) -> list[FloatArray]:
        return [np.zeros(sum(len(chunk.tokens) for chunk in prompt), np.float32) for prompt in prompts]

    def update_weights(self, weights: NamedTensors, version: int) -> WeightAck:
        assert not self.running
        digests = {name: tensor_digest(tensor) for name, tensor in weights}
        self.version = version
        return WeightAck(digests, frozenset(digests), frozenset(digests))

    def close(self) -> None:
        pass


class SlowTrainer(StillTrainer):
    """Its `optim_step` takes until it is let go."""

    def __init__(self) -> None:
        self.computing, self.go = threading.Event(), threading.Event()

    def full_weights(self, policy: str) -> NamedTensors:
        return [(f"layers.{number}", torch.zeros(20)) for number in range(3)]

    def optim_step(self, policy: str, params: Any, **_: object) -> dict[str, float]:
        self.computing.set()
        assert self.go.wait(WAIT_S)
        return {"grad_norm": 0.0}


class Cut:
    """A link that can be cut; `swallows` is a method whose calls never arrive."""

    def __init__(self, host: EngineHost) -> None:
        self._link = PickledLink(host)
        self.cut = threading.Event()
        self.swallows = ""
        self.swallowed = threading.Event()

    def send(self, messages: Sequence[Message]) -> None:
        self._check()
        kept = [message for message in messages if not (isinstance(message, Call) and message.method == self.swallows)]
        if len(kept) < len(messages):
            self.swallowed.set()
        self._link.send(kept)

    def collect(self, timeout_s: float) -> Sequence[Answer]:
        self._check()
        answers = self._link.collect(0.01)
        self._check()
        return answers

    def _check(self) -> None:
        if self.cut.is_set():
            raise ServerLostError("the server's engine process died: it was killed")


class Server:
    def __init__(self, worker: Worker, engine: GatedEngine, trainer: SlowTrainer, link: Cut, remote: RemoteEngine) -> None:
        self.worker, self.engine, self.trainer, self.link, self.remote = worker, engine, trainer, link, remote
        self._ends: dict[str, Completion] = {}

    def end(self, operation: str) -> Completion:
        """Wait for the end of an operation."""
        while operation not in self._ends:
            found = self.worker.collect(WAIT_S)
            assert found, f"{operation} did not end"
            self._ends |= {completion.operation: completion for completion in found}
        return self._ends[operation]

    def collect_for_ever(self) -> None:
        while True:
            self.worker.collect(WAIT_S)

    def submit(self, *work: Work) -> None:
        self.worker.submit(work)


@contextmanager
def split() -> Iterator[Server]:
    engine, trainer = GatedEngine(), SlowTrainer()
    host = EngineHost(lambda: HostedEngine(cast(BucketEngine, Bucketed(engine))))
    link = Cut(host)
    remote = RemoteEngine(link, host.start(WAIT_S), bucket_bytes=64)
    canaries = ((TokenChunk(np.arange(3, dtype=np.int32)),),)
    parts = Parts(remote, cast(Trainer, trainer), Path("m"), Path("unused"), canaries, 3.0)
    worker = Worker(lambda: parts)
    worker.start(WAIT_S)
    server = Server(worker, engine, trainer, link, remote)
    try:
        server.submit(CREATE)
        assert server.end("create").problem is None
        yield server
    finally:
        trainer.go.set()
        engine.open.set()
        worker.stop()
        host.stop()


CREATE = CommandWork("create", "p", "create")
TRAIN = CommandWork("train", "p", "optim_step", {"learning_rate": 0.1})


def sample(operation: str, version: int | None = None, n: int = 1) -> SampleWork:
    return SampleWork(operation, "p", SampleRequest(operation, PROMPT, n=n, version=version))


def publish(operation: str, mode: str = "drain") -> CommandWork:
    return CommandWork(operation, "p", "publish", {"mode": mode})


def version_of(completion: Completion) -> int:
    assert completion.problem is None
    ((version, _),) = completion.result["samples"][0]["versions"]
    return int(version)


def test_samples_go_on_while_the_trainer_computes() -> None:
    with split() as server:
        server.submit(TRAIN)
        assert server.trainer.computing.wait(WAIT_S)
        server.submit(sample("meanwhile"), sample("held", 0))
        assert version_of(server.end("meanwhile")) == version_of(server.end("held")) == 0
        server.trainer.go.set()
        assert server.end("train").problem is None


def test_a_sample_behind_a_publish_waits_for_it_and_one_of_a_version_to_come_for_the_command_that_may_bring_it() -> None:
    with split() as server:
        server.submit(TRAIN, sample("ahead"), publish("p"), sample("behind"), sample("to come", 1), sample("never", 2))
        assert server.trainer.computing.wait(WAIT_S)
        assert version_of(server.end("ahead")) == 0
        assert "behind" not in server._ends
        server.trainer.go.set()
        assert server.end("p").result["version"] == 1
        assert version_of(server.end("behind")) == version_of(server.end("to come")) == 1
        assert (server.end("never").problem or {})["code"] == "version_not_served"


def test_a_publish_that_drains_lets_running_samples_end_and_one_that_aborts_starts_them_anew() -> None:
    with split() as server:
        server.engine.open.clear()
        server.submit(sample("x"), sample("pinned", 0), publish("a", "abort"))
        assert server.end("a").result["version"] == 1
        assert (server.end("pinned").problem or {})["code"] == "version_not_served"
        server.engine.open.set()
        assert version_of(server.end("x")) == 1
        server.submit(sample("y"), publish("b"))
        assert server.end("b").result["version"] == 2
        assert version_of(server.end("y")) == 1


def test_a_refused_command_leaves_no_sample_behind_that_was_before_it() -> None:
    with split() as server:
        for number in range(20):
            server.submit(sample(f"x{number}"), CommandWork(f"again{number}", "p", "create"))
            assert (server.end(f"again{number}").problem or {})["code"] == "conflict"
            assert version_of(server.end(f"x{number}")) == 0


def test_what_the_engine_refuses_fails_alone() -> None:
    with split() as server:
        server.submit(sample("too much", n=101), sample("fine"))
        assert (server.end("too much").problem or {})["code"] == "context_overflow"
        assert version_of(server.end("fine")) == 0
        assert not server.worker._running


def test_a_failed_step_fails_what_is_running_and_nothing_later() -> None:
    with split() as server:
        server.engine.fails = ZeroDivisionError("division by zero")
        server.submit(sample("x"), sample("y"))
        for operation in "xy":
            problem = server.end(operation).problem or {}
            assert problem["code"] == EngineError.code
            assert "division by zero" in problem["detail"]
        server.submit(sample("z"))
        assert version_of(server.end("z")) == 0


@pytest.mark.parametrize("method", ["begin_update", "take_bucket", "finish_update", "prompt_logprobs"])
def test_an_engine_that_dies_during_a_publish_fails_it_and_the_worker_with_the_cause(method: str) -> None:
    with split() as server:
        server.link.swallows = method
        server.submit(publish("p"))
        assert server.link.swallowed.wait(WAIT_S)
        server.link.cut.set()
        problem = server.end("p").problem or {}
        assert (problem["code"], problem["detail"]) == ("server_lost", "the server's engine process died: it was killed")
        with pytest.raises(ServerLostError, match="the server's engine process died"):
            server.collect_for_ever()


def test_an_engine_that_dies_while_it_samples_ends_the_worker_although_the_trainer_still_computes() -> None:
    with split() as server:
        server.engine.open.clear()
        server.submit(TRAIN, sample("x"))
        assert server.trainer.computing.wait(WAIT_S)
        server.link.cut.set()
        with pytest.raises(ServerLostError, match="the server's engine process died: it was killed"):
            server.collect_for_ever()
        with pytest.raises(ServerLostError, match="the server's engine process died"):
            server.submit(sample("y"))


def test_a_bucket_that_the_engine_does_not_take_in_time_is_a_fault_of_the_policy_until_a_publish_succeeds() -> None:
    with split() as server:
        server.remote._updates._ack_s, server.link.swallows = 0.05, "take_bucket"
        server.submit(publish("p"), sample("x"))
        problem = server.end("p").problem or {}
        assert problem["code"] == "deadline_exceeded"
        assert "did not acknowledge bucket 0 of trainer rank 0" in problem["detail"]
        assert (server.end("x").problem or {})["code"] == "deadline_exceeded"
        server.remote._updates._ack_s, server.link.swallows = WAIT_S, ""
        server.submit(publish("q"), sample("y"))
        assert version_of(server.end("y")) == server.end("q").result["version"] == 2


@pytest.mark.parametrize("shares_memory", [True, False])
def test_weights_reach_an_engine_on_this_machine_and_on_another(shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shares_memory:
        monkeypatch.setattr(Bucketed, "read_probes", lambda self, payload: [b""])
    with split() as server:
        for number in (1, 2):
            server.submit(publish(f"p{number}"), sample(f"s{number}"))
            assert server.end(f"p{number}").result["parameters"] == 3
            assert version_of(server.end(f"s{number}")) == number
        kind = SharedCarrier if shares_memory else InlineCarrier
        way = server.remote._updates.way
        assert way is not None
        assert [type(carrier) for carrier in way.carriers()] == [kind, kind]


def test_a_method_that_no_engine_has_is_refused() -> None:
    with split() as server, pytest.raises(InvalidRequestError, match="no method '__init__'"):
        server.remote.call("__init__")
