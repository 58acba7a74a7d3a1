"""Several adapters on one server: each policy has its own versions, publishes and faults, and no other hears of them.

A real worker and the real commands, over an engine and a trainer that only count.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_tools import LAYOUTS, StillTrainer, placed

from opentinker.client.messages import (
    Chunk,
    FloatArray,
    PolicySpec,
    Sample,
    SampleRequest,
    SampleResult,
    TokenChunk,
)
from opentinker.errors import ConflictError, VersionNotServedError, from_problem
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import AdapterId, LoraTensors, NamedTensors, WeightAck
from opentinker.server.protocol import CommandWork, Completion, SampleWork, Work
from opentinker.server.state import Parts
from opentinker.server.trainer.base import Trainer
from opentinker.server.worker import Worker

PROMPT = (TokenChunk(np.asarray([1, 2], np.int32)),)
STEPS = 3
ROOM, KEPT = 2, 2


class AdapterEngine:
    """Answers a request after `STEPS` steps, with the version of its adapter. `lost` are policies whose adapters do not get
    into it."""

    version = 0

    def __init__(self) -> None:
        self.held: set[AdapterId] = set()
        self.lost: set[str] = set()
        self._left: dict[str, tuple[SampleRequest, AdapterId, int]] = {}

    def add(self, request: SampleRequest, adapter: AdapterId | None = None) -> None:
        assert adapter in self.held
        self._left[request.request_id] = (request, adapter, STEPS)

    def step(self) -> list[SampleResult]:
        self._left = {name: (request, adapter, left - 1) for name, (request, adapter, left) in self._left.items()}
        done = [(request, adapter) for request, adapter, left in self._left.values() if left == 0]
        for request, _ in done:
            del self._left[request.request_id]
        return [self._answer(*ended) for ended in done]

    def _answer(self, request: SampleRequest, adapter: AdapterId) -> SampleResult:
        sample = Sample(np.asarray([3], np.int32), np.zeros(1, np.float32), "stop", ((adapter.version, 1),))
        return SampleResult(request.request_id, (sample,), request.params)

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def abort(self, request_ids: Collection[str]) -> list[SampleRequest]:
        return [self._left.pop(name)[0] for name in list(self._left) if name in request_ids]

    def abort_all(self) -> list[SampleRequest]:
        return self.abort(set(self._left))

    def prompt_logprobs(self, prompts: Sequence[Sequence[Chunk]], adapter: AdapterId | None = None) -> list[FloatArray]:
        assert adapter in self.held
        return [np.zeros(sum(len(chunk.tokens) for chunk in prompt), np.float32) for prompt in prompts]

    def update_weights(self, weights: NamedTensors, version: int) -> WeightAck:
        raise AssertionError("adapters are served")

    def update_adapter(self, adapter: LoraTensors, at: AdapterId) -> WeightAck:
        self.held.add(at)
        assert len(self.held) <= ROOM * KEPT
        digests = {name: tensor_digest(tensor) for name, tensor in adapter.tensors.items()}
        return WeightAck(digests, frozenset() if at.policy in self.lost else frozenset(digests), frozenset(digests))

    def drop_adapter(self, at: AdapterId) -> None:
        assert at not in {adapter for _, adapter, _ in self._left.values()}
        self.held.discard(at)

    def close(self) -> None:
        pass


class AdapterTrainer(StillTrainer):
    """Its weights never change. An `optim_step` decides whether a policy's publishes succeed from then on: with a learning rate
    of 0 they do not."""

    def __init__(self, engine: AdapterEngine) -> None:
        self._engine = engine
        self.lora: dict[str, bool] = {}

    def create_policy(self, policy: str, spec: PolicySpec) -> None:
        self.lora[policy] = spec.lora is not None

    def delete_policy(self, policy: str) -> None:
        del self.lora[policy]

    def is_lora(self, policy: str) -> bool:
        return self.lora[policy]

    def adapter(self, policy: str) -> LoraTensors:
        return LoraTensors(1, 1.0, ("q",), {"a": torch.zeros(2)})

    def optim_step(self, policy: str, params: Any, **_: object) -> dict[str, float]:
        (self._engine.lost.discard if params.learning_rate > 0 else self._engine.lost.add)(policy)
        return {"grad_norm": 0.0}


@dataclass
class Working:
    worker: Worker
    engine: AdapterEngine
    trainer: AdapterTrainer

    def run(self, *work: Work) -> dict[str, Completion]:
        """Hand the work over at once, so that its order is all that counts: everything is taken in before the engine makes a
        step that no command asks for. The ends, in their order."""
        self.worker.submit(work)
        ends: dict[str, Completion] = {}
        while len(ends) < len(work):
            found = self.worker.collect(30)
            assert found
            for completion in found:
                assert completion.operation not in ends
                ends[completion.operation] = completion
        return ends


@contextmanager
def working(layout: str = "colocated") -> Iterator[Working]:
    engine = AdapterEngine()
    trainer = AdapterTrainer(engine)
    canaries = ((TokenChunk(np.arange(3, dtype=np.int32)),),)
    with placed(engine, layout) as rollout:
        parts = Parts(
            rollout,
            cast(Trainer, trainer),
            Path("m"),
            Path("checkpoints"),
            canaries,
            3.0,
            adapter_serving=True,
            max_adapters=ROOM,
            kept_versions=KEPT,
        )
        worker = Worker(lambda: parts)
        worker.start(30)
        try:
            yield Working(worker, engine, trainer)
        finally:
            worker.stop()


def create(policy: str, lora: dict[str, Any] | None = {"rank": 1}) -> CommandWork:  # noqa: B006
    return CommandWork(f"create {policy}", policy, "create", {"lora": lora})


def sample(operation: str, policy: str, version: int | None = None) -> SampleWork:
    return SampleWork(operation, policy, SampleRequest(operation, PROMPT, version=version))


def publish(operation: str, policy: str, mode: str = "drain") -> CommandWork:
    return CommandWork(operation, policy, "publish", {"mode": mode})


def breaking(operation: str, policy: str, *, good: bool = False) -> CommandWork:
    return CommandWork(operation, policy, "optim_step", {"learning_rate": 0.1 if good else 0.0})


def outcome(completion: Completion) -> int | str:
    """The version that was sampled, or the error's code."""
    if completion.problem is not None:
        return str(completion.problem["code"])
    ((version, _),) = completion.result["samples"][0]["versions"]
    return int(version)


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_a_publish_waits_for_nobody_and_leaves_the_other_policys_requests_alone(mode: str) -> None:
    with working() as server:
        ends = server.run(create("a"), create("b"), sample("x", "b"), sample("y", "b", 0), publish("p", "a", mode))
    assert list(ends).index("p") < list(ends).index("x")
    assert ends["p"].result["version"] == 1
    assert [outcome(ends[name]) for name in ("x", "y")] == [0, 0]


@LAYOUTS
def test_the_newest_versions_stay_and_the_error_names_them(layout: str) -> None:
    with working(layout) as server:
        publishes = [publish(f"p{n}", "a") for n in range(3)]
        ends = server.run(create("a"), *publishes, *(sample(f"v{n}", "a", n) for n in range(5)), sample("live", "a"))
        assert server.engine.held == {AdapterId("a", 2), AdapterId("a", 3)}
    expected = {"v0": "version_not_served", "v1": "version_not_served", "v2": 2, "v3": 3, "v4": "version_not_served", "live": 3}
    assert {name: outcome(ends[name]) for name in expected} == expected
    assert ends["v1"].problem is not None
    error = from_problem(ends["v1"].problem)
    assert isinstance(error, VersionNotServedError)
    assert "version 3 is live, and the engine keeps the newest 2: 2, 3" in error.detail
    assert "2, 3; engine.kept_versions" in error.hint


def test_a_failed_publish_fails_its_own_policys_samples_only() -> None:
    with working() as server:
        work = [sample("x", "a"), sample("y", "b"), breaking("break", "a"), publish("p", "a"), sample("late", "a")]
        ends = server.run(
            create("a"), create("b"), *work, sample("z", "b"), breaking("mend", "a", good=True), publish("q", "a")
        )
        assert {name: outcome(ends[name]) for name in ("x", "late", "y", "z")} == {
            "x": "weight_sync",
            "late": "weight_sync",
            "y": 0,
            "z": 0,
        }
        assert AdapterId("a", 1) not in server.engine.held
        assert outcome(server.run(sample("again", "a"))["again"]) == 2


def test_there_is_room_for_so_many_and_the_refusal_names_the_setting() -> None:
    with working() as server:
        ends = server.run(create("a"), create("b"), create("c"), create("d", None))
        problems = [from_problem(ends[f"create {name}"].problem or {}) for name in "cd"]
        assert all(isinstance(problem, ConflictError) for problem in problems)
        assert "room for 2 policies, and has 'a', 'b'" in problems[0].detail
        assert "engine.max_adapters=3" in problems[0].hint
        assert "to itself" in problems[1].detail
        again = server.run(CommandWork("twice", "b", "create", {"lora": {"rank": 1}}))["twice"].problem or {}
        assert "already is a policy 'b'" in again["detail"]
        assert set(server.trainer.lora) == {"a", "b"}


def test_a_full_policy_is_joined_by_nobody() -> None:
    with working() as server:
        server.trainer.lora["full"] = False
        server.worker._state.policies["full"] = cast(Any, object())
        assert "to itself" in (server.run(create("a"))["create a"].problem or {})["detail"]


@LAYOUTS
def test_a_deleted_policy_leaves_nothing_and_may_come_again(layout: str) -> None:
    with working(layout) as server:
        delete = CommandWork("delete", "b", "delete")
        ends = server.run(create("a"), create("b"), publish("p", "b"), sample("x", "b"), delete, sample("late", "b"))
        assert outcome(ends["x"]) == 1
        assert outcome(ends["late"]) == "not_found"
        assert server.engine.held == {AdapterId("a", 0)}
        assert set(server.trainer.lora) == {"a"}
        ends = server.run(CommandWork("again", "b", "create", {"lora": {"rank": 1}}), sample("y", "b"), sample("z", "a"))
        assert ends["again"].result == {"policy": "b", "version": 0}
        assert (outcome(ends["y"]), outcome(ends["z"])) == (0, 0)


def test_each_policy_has_a_folder_of_its_own_for_its_checkpoints() -> None:
    with working() as server:
        server.run(create("a"), create("b"))
        state = server.worker._state
        assert state.checkpoint_root("a") == Path("checkpoints")
        assert state.checkpoint_root("b") == Path("checkpoints/policies/b")


STEP = st.one_of(
    # How far from the live version, or any.
    st.tuples(st.just("sample"), st.sampled_from("ab"), st.none() | st.sampled_from([0, 0, -1, -2, 1])),
    st.tuples(st.just("publish"), st.sampled_from("ab"), st.sampled_from(["drain", "abort"]), st.booleans()),
)


@dataclass
class Expected:
    """A policy as it has to be."""

    kept: list[int]
    live: int = 0
    attempted: int = 0
    faulty: bool = False


@dataclass
class Asked:
    policy: str
    pinned: bool
    version: int
    left: int = STEPS


@settings(max_examples=80, deadline=None)
@given(st.lists(STEP, max_size=16))
def test_no_sample_comes_from_another_version_than_it_was_asked_of(steps: list[tuple[Any, ...]]) -> None:
    work: list[Work] = [create("a"), create("b")]
    expected: dict[str, int | str] = {}
    running: dict[str, Asked] = {}
    policies = {policy: Expected([0]) for policy in "ab"}
    for number, step in enumerate(steps):
        name, policy = f"{number}", step[1]
        known = policies[policy]
        if step[0] == "sample":
            asked = None if step[2] is None else max(0, known.live + step[2])
            work.append(sample(name, policy, asked))
            if known.faulty:
                expected[name] = "weight_sync"
            elif asked is not None and asked not in known.kept:
                expected[name] = "version_not_served"
            else:
                running[name] = Asked(policy, asked is not None, known.live if asked is None else asked)
            continue
        _, _, mode, good = step
        work += [breaking(f"{name}:set", policy, good=good), publish(name, policy, mode)]
        known.attempted += 1
        leaving = known.kept[: max(0, len(known.kept) + 1 - KEPT)]
        stopped = {n: r for n, r in running.items() if r.policy == policy and (not r.pinned or r.version in leaving)}
        while mode == "drain" and any(r.policy == policy and r.version in leaving for r in running.values()):
            for request in running.values():
                request.left -= 1
            expected |= {n: r.version for n, r in running.items() if r.left == 0}
            running = {n: r for n, r in running.items() if r.left}
        known.kept = [version for version in known.kept if version not in leaving]
        known.faulty = not good
        if not good:
            expected |= {n: "weight_sync" for n, r in running.items() if r.policy == policy}
            running = {n: r for n, r in running.items() if r.policy != policy}
            continue
        known.live = known.attempted
        known.kept.append(known.live)
        for stopped_name, request in stopped.items() if mode == "abort" else ():
            if request.pinned:
                expected[stopped_name] = "version_not_served"
                del running[stopped_name]
            else:
                running[stopped_name] = Asked(policy, False, known.live)
    expected |= {name: request.version for name, request in running.items()}
    with working() as server:
        ends = server.run(*work)
        assert server.engine.held == {AdapterId(policy, v) for policy, known in policies.items() for v in known.kept}
    assert {name: outcome(ends[name]) for name in expected} == expected
