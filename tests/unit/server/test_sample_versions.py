"""A sample that names its policy version: decided by the version that it would be sampled from, in order with publishes.

A real worker and the real commands, over an engine and a trainer that only count.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_tools import LAYOUTS, StillTrainer, placed

from opentinker.client.messages import FloatArray, IntArray, Sample, SampleRequest, SampleResult, TokenChunk
from opentinker.errors import VersionNotServedError, from_problem
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import AdapterId, NamedTensors, WeightAck
from opentinker.server.protocol import CommandWork, Completion, SampleWork, Work
from opentinker.server.state import Parts
from opentinker.server.trainer.base import Trainer
from opentinker.server.worker import Worker

PROMPT = (TokenChunk(np.asarray([1, 2], np.int32)),)
STEPS = 3


class CountingEngine:
    """Answers a request after `STEPS` steps. `reach` is whether weights that it is given get into it."""

    def __init__(self) -> None:
        self.version = 0
        self.reach = True
        self._left: dict[str, tuple[SampleRequest, int]] = {}

    def add(self, request: SampleRequest, adapter: AdapterId | None = None) -> None:
        self._left[request.request_id] = (request, STEPS)

    def step(self) -> list[SampleResult]:
        self._left = {name: (request, left - 1) for name, (request, left) in self._left.items()}
        done = [request for request, left in self._left.values() if left == 0]
        for request in done:
            del self._left[request.request_id]
        return [self._answer(request) for request in done]

    def _answer(self, request: SampleRequest) -> SampleResult:
        sample = Sample(np.asarray([3], np.int32), np.zeros(1, np.float32), "stop", ((self.version, 1),))
        return SampleResult(request.request_id, (sample,), request.params)

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def abort(self, request_ids: Collection[str]) -> list[SampleRequest]:
        return [self._left.pop(name)[0] for name in list(self._left) if name in request_ids]

    def abort_all(self) -> list[SampleRequest]:
        return self.abort(set(self._left))

    def prompt_logprobs(self, prompts: Sequence[IntArray], adapter: AdapterId | None = None) -> list[FloatArray]:
        return [np.zeros(len(prompt), np.float32) for prompt in prompts]

    def update_weights(self, weights: NamedTensors, version: int) -> WeightAck:
        digests = {name: tensor_digest(tensor) for name, tensor in weights}
        self.version = version
        return WeightAck(digests, frozenset(digests) if self.reach else frozenset(), frozenset(digests))

    def close(self) -> None:
        pass


class CountingTrainer(StillTrainer):
    """Its weights never change. An `optim_step` decides whether publishes succeed from then on: with a learning rate of 0 they
    do not."""

    def __init__(self, engine: CountingEngine) -> None:
        self._engine = engine

    def full_weights(self, policy: str) -> NamedTensors:
        return [("weight", torch.zeros(2))]

    def optim_step(self, policy: str, params: Any, **_: object) -> dict[str, float]:
        self._engine.reach = params.learning_rate > 0
        return {"grad_norm": 0.0}


@contextmanager
def working(layout: str = "colocated") -> Iterator[Worker]:
    engine = CountingEngine()
    canaries = ((TokenChunk(np.arange(3, dtype=np.int32)),),)
    with placed(engine, layout) as rollout:
        parts = Parts(rollout, cast(Trainer, CountingTrainer(engine)), Path("m"), Path("unused"), canaries, 3.0)
        worker = Worker(lambda: parts)
        worker.start(30)
        try:
            yield worker
        finally:
            worker.stop()


def run(worker: Worker, work: Sequence[Work]) -> dict[str, Completion]:
    """Hand the work over at once, so that its order is all that counts, and wait for all of its ends."""
    worker.submit(work)
    ends: dict[str, Completion] = {}
    while len(ends) < len(work):
        found = worker.collect(30)
        assert found
        for completion in found:
            assert completion.operation not in ends
            ends[completion.operation] = completion
    return ends


def sample(operation: str, version: int | None = None) -> SampleWork:
    return SampleWork(operation, "p", SampleRequest(operation, PROMPT, version=version))


def publish(operation: str, mode: str = "drain") -> CommandWork:
    return CommandWork(operation, "p", "publish", {"mode": mode})


def outcome(completion: Completion) -> int | str:
    """The version that was sampled, or the error's code."""
    if completion.problem is not None:
        return str(completion.problem["code"])
    ((version, _),) = completion.result["samples"][0]["versions"]
    return int(version)


CREATE = CommandWork("create", "p", "create")


@LAYOUTS
@pytest.mark.parametrize(
    ("version", "hint"), [(0, "leave the version out for the latest"), (5, "when a publish has answered with version 5")]
)
def test_a_version_that_is_not_live_is_an_error_that_names_the_live_one_and_says_what_to_do(
    version: int, hint: str, layout: str
) -> None:
    with working(layout) as worker:
        problem = run(worker, [CREATE, publish("a"), publish("b"), sample("s", version)])["s"].problem
    assert problem is not None
    error = from_problem(problem)
    assert isinstance(error, VersionNotServedError)
    assert error.status == 409
    assert f"version {version} of policy 'p' is not served: version 2 is live" in error.detail
    assert hint in error.hint


def test_an_abort_fails_what_was_asked_of_the_old_version_and_the_others_go_on() -> None:
    with working() as worker:
        ends = run(worker, [CREATE, sample("old", 0), sample("any"), publish("a", "abort"), sample("new", 1)])
    assert {name: outcome(ends[name]) for name in ("old", "any", "new")} == {"old": "version_not_served", "any": 1, "new": 1}
    assert ends["a"].result["version"] == 1


@LAYOUTS
def test_a_drain_finishes_what_was_asked_of_the_old_version(layout: str) -> None:
    with working(layout) as worker:
        ends = run(worker, [CREATE, sample("old", 0), sample("any"), publish("a"), sample("late", 0)])
    assert {name: outcome(ends[name]) for name in ("old", "any", "late")} == {"old": 0, "any": 0, "late": "version_not_served"}


@LAYOUTS
def test_a_version_on_a_policy_that_is_not_there_is_not_found(layout: str) -> None:
    with working(layout) as worker:
        assert outcome(run(worker, [sample("s", 0)])["s"]) == "not_found"


STEP = st.one_of(
    # How far from the live version, or any.
    st.tuples(st.just("sample"), st.none() | st.sampled_from([0, 0, -1, 1])),
    st.tuples(st.just("publish"), st.sampled_from(["drain", "abort"]), st.booleans()),
)


@LAYOUTS
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, max_size=14))
def test_no_sample_comes_from_another_version_than_it_was_asked_of(steps: list[tuple[Any, ...]], layout: str) -> None:
    work: list[Work] = [CREATE]
    early: dict[str, set[int]] = {}
    """Elsewhere, an engine may have answered before it is interrupted."""
    expected: dict[str, int | str] = {}
    running: dict[str, int | None] = {}
    live = attempted = 0
    faulty = False
    for number, step in enumerate(steps):
        name = f"{number}"
        if step[0] == "sample":
            version = None if step[1] is None else live + step[1]
            work.append(sample(name, version))
            if faulty:
                expected[name] = "weight_sync"
            elif version not in (None, live):
                expected[name] = "version_not_served"
            else:
                running[name] = version
            continue
        _, mode, good = step
        work += [
            CommandWork(f"{name}:set", "p", "optim_step", {"learning_rate": 0.1 if good else 0.0}),
            publish(name, mode),
        ]
        attempted += 1
        if mode == "abort" and layout == "split":
            for each in running:
                early.setdefault(each, set()).add(live)
        if mode == "drain":
            expected |= dict.fromkeys(running, live)
            running = {}
        elif not good:
            expected |= dict.fromkeys(running, "weight_sync")
            running = {}
        else:
            expected |= {name: "version_not_served" for name, version in running.items() if version is not None}
            running = {name: version for name, version in running.items() if version is None}
        faulty = not good
        live = attempted if good else live
    expected |= dict.fromkeys(running, live)
    with working(layout) as worker:
        ends = run(worker, work)
    for name, end in expected.items():
        assert outcome(ends[name]) in {end, *early.get(name, ())}
