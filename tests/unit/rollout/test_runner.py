"""Groups come back whole whatever single episodes do, nothing outlives the call, and a run repeats."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from opentinker.client.messages import IntArray, Sample, SamplingParams
from opentinker.config.rollout import RolloutConfig, SamplingConfig
from opentinker.env.environment import Action, Environment, Message, StepResult, Tool
from opentinker.errors import (
    ContextOverflowError,
    DeadlineError,
    EngineError,
    OpenTinkerError,
    RenderingError,
    ServerLostError,
    UnavailableError,
)
from opentinker.rendering.chunks import NO_IMAGES, Images
from opentinker.rollout import sampler as sampler_module
from opentinker.rollout.runner import RolloutRunner
from opentinker.rollout.types import Episode, Termination

STOP = 1


class ByteRenderer:
    """Renders a message as its characters' codes; STOP ends a turn."""

    stop_token_ids = (STOP,)
    preserves_prefix = True

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), images: Images = NO_IMAGES) -> list[int]:
        if any(m["content"] == "unspeakable" for m in messages):
            raise RenderingError("the template has no word for it")
        return [ord(c) for m in messages for c in m["content"]] + [STOP]

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action:
        return Action("".join(chr(t) for t in action_tokens if t != STOP), truncated=action_tokens[-1] != STOP)

    def observation_delta(
        self,
        action_tokens: Sequence[int],
        observation: Sequence[Message],
        tools: Sequence[Tool] = (),
        images: Images = NO_IMAGES,
    ) -> list[int]:
        return self.render_prompt(observation)


class Policy:
    """Answers with a digit drawn by the request's seed. `script` may raise or answer first, by request id or count."""

    def __init__(self, script: Callable[[str, int], Any] = lambda request_id, calls: None) -> None:
        self.script = script
        self.requests: list[tuple[str, SamplingParams]] = []
        self.running = self.peak = 0

    async def __call__(self, prompt: IntArray, params: SamplingParams, request_id: str) -> Sample:
        self.requests.append((request_id, params))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(0.001)
            scripted = self.script(request_id, len(self.requests))
            if isinstance(scripted, Exception):
                raise scripted
            if scripted is not None:
                return await scripted() if callable(scripted) else scripted
            assert params.seed is not None
            return sample([48 + params.seed % 10, STOP][: params.max_tokens])
        finally:
            self.running -= 1


def sample(tokens: list[int], finish: Any = "stop") -> Sample:
    return Sample(np.array(tokens, np.int32), np.full(len(tokens), -1, np.float32), finish, ((0, len(tokens)),))


class Echo(Environment):
    """Two turns; the reward is the digit that was said."""

    closed: list[Any]

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, task: Any) -> str:
        self.task = task
        return f"task {task}"

    def step(self, action: Action) -> StepResult:
        self.turns += 1
        return StepResult(float(action.text), done=self.turns == 2, observation="go on", metrics={"turns": self.turns})

    def close(self) -> None:
        type(self).closed.append(getattr(self, "task", None))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    Echo.closed = []
    monkeypatch.setattr(sampler_module, "FIRST_BACKOFF_S", 0.001)


def runner(
    generate: Any, environment: Callable[[], Environment] = Echo, run_seed: int = 0, room: int = 64, **config: Any
) -> RolloutRunner:
    sampling = SamplingConfig(temperature=0.7, max_tokens=6)
    return RolloutRunner(ByteRenderer(), generate, environment, RolloutConfig(**config), sampling, room, run_seed)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not happen within 30 s")


def fingerprint(groups: Any) -> Any:
    return [[(e.member, e.termination, e.rewards, e.trajectories[0].tokens.tolist()) for e in g.episodes] for g in groups]


async def test_groups_come_back_in_order_with_all_their_members() -> None:
    seen: list[Episode] = []
    groups = await runner(Policy()).run(["a", "b", "c"], 4, step=0, on_episode=seen.append)
    assert [(g.task, g.index, [e.member for e in g.episodes]) for g in groups] == [
        ("a", 0, [0, 1, 2, 3]),
        ("b", 1, [0, 1, 2, 3]),
        ("c", 2, [0, 1, 2, 3]),
    ]
    assert len(seen) == 12
    for group in groups:
        assert (group.failures, group.dropped, group.replaced) == ([], 0, 0)
        for episode in group.episodes:
            assert episode.termination is Termination.DONE
            assert episode.reward == sum(episode.rewards)
            assert episode.turns == 2
            assert episode.metrics == {"turns": 2.0}
            assert episode.generation_s > 0
            assert episode.environment_s > 0
            assert len(episode.trajectories) == 1
    assert Counter(Echo.closed) == {"a": 4, "b": 4, "c": 4}


async def test_a_run_repeats_and_another_seed_or_step_differs() -> None:
    first = fingerprint(await runner(Policy()).run(["a", "b"], 4, step=3))
    assert fingerprint(await runner(Policy(), max_concurrent_episodes=1).run(["a", "b"], 4, step=3)) == first
    assert fingerprint(await runner(Policy()).run(["a", "b"], 4, step=4)) != first
    assert fingerprint(await runner(Policy(), run_seed=1).run(["a", "b"], 4, step=3)) != first


async def test_the_effective_sampling_parameters_are_sent_with_every_request() -> None:
    policy = Policy()
    await runner(policy).run(["a"], 2, step=0)
    ids = [request_id for request_id, _ in policy.requests]
    assert len(set(ids)) == len(ids) == 4
    assert len({p.seed for _, p in policy.requests}) == 4
    assert {(p.temperature, p.max_tokens, p.stop_token_ids) for _, p in policy.requests} == {(0.7, 6, (STOP,))}
    again = Policy()
    await runner(again).run(["a"], 2, step=0)
    assert not {request_id for request_id, _ in again.requests} & set(ids), "another call's answers are never found"


async def test_no_more_episodes_run_at_once_than_allowed() -> None:
    policy = Policy()
    await runner(policy, max_concurrent_episodes=3).run(list("abcdef"), 4, step=0)
    assert policy.peak == 3


class Unlucky(Echo):
    """Its first episodes fail in the way that `fault` says."""

    fault: str = ""
    left = 0
    lock = threading.Lock()
    release = threading.Event()

    def reset(self, task: Any) -> str:
        with Unlucky.lock:
            self.strikes = Unlucky.left > 0
            Unlucky.left -= 1
        self.strike("reset")
        return super().reset(task)

    def step(self, action: Action) -> StepResult:
        self.strike("step")
        return super().step(action)

    def strike(self, method: str) -> None:
        if self.strikes and Unlucky.fault == f"{method} raises":
            raise RuntimeError("struck")
        if self.strikes and Unlucky.fault == f"{method} hangs":
            Unlucky.release.wait(20)


@pytest.mark.parametrize(
    ("fault", "termination"),
    [
        ("reset raises", Termination.ERROR_ENV),
        ("step raises", Termination.ERROR_ENV),
        ("reset hangs", Termination.ERROR_TIMEOUT),
        ("step hangs", Termination.ERROR_TIMEOUT),
    ],
)
@pytest.mark.parametrize(("strikes", "replaced", "dropped"), [(1, 1, 0), (8, 4, 4)])
async def test_a_member_that_fails_is_run_anew_and_dropped_if_it_fails_again(
    fault: str, termination: Termination, strikes: int, replaced: int, dropped: int
) -> None:
    Unlucky.fault, Unlucky.left = fault, strikes
    Unlucky.release.clear()
    start = time.perf_counter()
    # The deadline is for those that work, too, and a machine may stall for a moment.
    (group,) = await runner(Policy(), Unlucky, reset_timeout_s=1.5, step_timeout_s=1.5).run(["a"], 4, step=0)
    Unlucky.release.set()
    assert time.perf_counter() - start < 15, "nobody waited for a hung one"
    assert (group.replaced, group.dropped, len(group.episodes), len(group.failures)) == (
        replaced,
        dropped,
        4 - dropped,
        strikes,
    )
    for failure in group.failures:
        assert failure.termination is termination
        assert not failure.trains
        assert f"Unlucky.{fault.split()[0]}" in failure.error


async def test_one_straggler_does_not_hold_up_the_others() -> None:
    finished: list[Termination | None] = []

    def on_episode(episode: Episode) -> None:
        finished.append(episode.termination)
        if len(finished) == 7:
            Unlucky.release.set()

    Unlucky.fault, Unlucky.left = "step hangs", 1
    Unlucky.release.clear()
    await runner(Policy(), Unlucky, step_timeout_s=15, member_retries=0, max_concurrent_episodes=2).run(
        list("abcdefgh"), 1, 0, on_episode=on_episode
    )
    Unlucky.release.set()
    assert finished == [Termination.DONE] * 8, "the straggler was released by the end of the seventh other one"


class Spinning(Unlucky):
    """Burns the processor where `Unlucky` waits."""

    def strike(self, method: str) -> None:
        while self.strikes and Unlucky.fault == f"{method} hangs":
            pass


@pytest.mark.parametrize("straggler", [Unlucky, Spinning])
async def test_a_group_with_a_straggler_delays_the_step_by_no_more_than_the_deadline(straggler: type[Unlucky]) -> None:
    async def step() -> tuple[float, Any]:
        start = time.perf_counter()
        groups = await runner(Policy(), straggler, step_timeout_s=2.0).run(list("abcd"), 4, step=0)
        return time.perf_counter() - start, groups

    threads = threading.active_count()
    Unlucky.fault, Unlucky.left = "step hangs", 0
    usual_s, _ = await step()
    Unlucky.left = 1
    Unlucky.release.clear()
    late_s, groups = await step()
    Unlucky.release.set()
    assert [len(group.episodes) for group in groups] == [4] * 4, "the straggler was replaced"
    assert sum(group.replaced for group in groups) == 1
    assert 2.0 <= late_s <= usual_s + 2.0 + 1.9, "the deadline, and a little for playing its replacement on a busy machine"
    await until(lambda: threading.active_count() <= threads)


async def test_a_late_answer_changes_nothing() -> None:
    Unlucky.fault, Unlucky.left = "step hangs", 1
    Unlucky.release.clear()
    (group,) = await runner(Policy(), Unlucky, step_timeout_s=0.1, member_retries=0).run(["a"], 2, step=0)
    before = fingerprint([group]), group.failures[0].rewards
    Unlucky.release.set()
    await asyncio.sleep(0.05)
    assert (fingerprint([group]), group.failures[0].rewards) == before
    assert group.failures[0].rewards == []


async def test_the_whole_episode_has_a_deadline() -> None:
    class Endless(Echo):
        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            await asyncio.sleep(0.01)
            return StepResult(observation="x")

    (group,) = await runner(Policy(), Endless, episode_timeout_s=0.2, member_retries=0, max_turns=1000, room=9999).run(
        ["a"], 1, 0
    )
    assert group.failures[0].termination is Termination.ERROR_TIMEOUT
    assert Echo.closed == ["a"]


async def test_a_policy_that_never_answers_has_a_deadline() -> None:
    policy = Policy(lambda request_id, calls: lambda: asyncio.sleep(60))
    (group,) = await runner(policy, generation_timeout_s=0.1, member_retries=0).run(["a"], 1, 0)
    assert group.failures[0].termination is Termination.ERROR_TIMEOUT
    assert "did not answer within 0.1 s" in group.failures[0].error
    assert policy.running == 0


@pytest.mark.parametrize("error", [UnavailableError("down"), EngineError("oops"), "abort"])
async def test_a_failed_generation_is_tried_again_with_the_same_seed(error: Any) -> None:
    trouble = sample([50], "abort") if error == "abort" else error
    policy = Policy(lambda request_id, calls: trouble if calls == 1 else None)
    (group,) = await runner(policy).run(["a"], 1, step=0)
    assert group.failures == []
    (first_id, first), (second_id, second), *_ = policy.requests
    assert first == second
    assert (first_id == second_id) == isinstance(error, UnavailableError), "only an unanswered request keeps its id"
    assert fingerprint([group]) == fingerprint(await runner(Policy()).run(["a"], 1, step=0))


@pytest.mark.parametrize(
    ("error", "termination", "tries"),
    [
        (UnavailableError("down"), Termination.ERROR_GENERATION, 3),
        (EngineError("oops"), Termination.ERROR_GENERATION, 3),
        (ContextOverflowError("too long"), Termination.ERROR_GENERATION, 1),
        (DeadlineError("slow"), Termination.ERROR_TIMEOUT, 1),
    ],
)
async def test_retries_are_bounded(error: OpenTinkerError, termination: Termination, tries: int) -> None:
    policy = Policy(lambda request_id, calls: error)
    (group,) = await runner(policy, member_retries=0).run(["a"], 1, 0)
    assert (group.failures[0].termination, group.failures[0].error) == (termination, error.detail)
    assert len(policy.requests) == tries
    assert Echo.closed == ["a"]


async def test_a_lost_server_ends_the_run_and_leaves_nothing_running() -> None:
    policy = Policy(lambda request_id, calls: ServerLostError("gone") if calls >= 20 else None)
    threads = threading.active_count()
    with pytest.raises(ServerLostError, match="gone"):
        await runner(policy, max_concurrent_episodes=8).run(list("abcdefgh"), 4, step=0)
    assert policy.running == 0
    assert len(asyncio.all_tasks()) == 1
    await until(lambda: threading.active_count() <= threads)


async def test_cancelling_a_run_closes_every_environment_that_was_reset() -> None:
    policy = Policy(lambda request_id, calls: lambda: asyncio.sleep(60))
    run = asyncio.ensure_future(runner(policy).run(["a", "b"], 3, step=0))
    await until(lambda: policy.running == 6)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert Counter(Echo.closed) == {"a": 3, "b": 3}
    assert policy.running == 0
    assert len(asyncio.all_tasks()) == 1


async def test_an_environment_that_cannot_be_closed_is_logged_and_its_episode_counts(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(Echo):
        def close(self) -> None:
            raise OSError("still open")

    (group,) = await runner(Policy(), Sticky).run(["a"], 1, 0)
    assert len(group.episodes) == 1
    assert "environment_not_closed" in caplog.text
    assert "still open" in caplog.text


async def test_an_observation_that_does_not_fit_truncates_the_episode_which_still_trains() -> None:
    class Wordy(Echo):
        def step(self, action: Action) -> StepResult:
            return StepResult(0.5, observation="x" * 100)

    (group,) = await runner(Policy(), Wordy).run(["a"], 2, 0)
    assert [e.termination for e in group.episodes] == [Termination.TRUNCATED_CONTEXT] * 2
    assert all(e.trains and e.reward == 0.5 for e in group.episodes)


async def test_an_episode_that_never_acted_does_not_train() -> None:
    class Wordy(Echo):
        def reset(self, task: Any) -> str:
            return "x" * 100

    (group,) = await runner(Policy(), Wordy).run(["a"], 1, 0)
    assert not group.episodes[0].trains
    assert group.failures == []


async def test_an_observation_that_the_template_refuses_is_the_environments_error() -> None:
    class Rude(Echo):
        def reset(self, task: Any) -> str:
            return "unspeakable"

    (group,) = await runner(Policy(), Rude, member_retries=0).run(["a"], 1, 0)
    assert group.failures[0].termination is Termination.ERROR_ENV
    assert "no word for it" in group.failures[0].error
