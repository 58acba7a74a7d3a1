"""The policy client against a real HTTP front with a scripted worker: retries, numbering, deadlines, errors."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from opentinker.client import http
from opentinker.client.messages import AdamParams, Sample, SampleResult, SamplingParams, TokenChunk
from opentinker.client.policy import PolicyClient
from opentinker.config.server import LoraConfig
from opentinker.errors import (
    AuthenticationError,
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    RateLimitedError,
    ServerLostError,
    TrainerError,
    UnavailableError,
)
from opentinker.server.front import create_app
from opentinker.server.listener import Listener
from opentinker.server.protocol import CommandWork, Completion, SampleWork, Work

INFO = {"base_model": "tiny", "tokenizer_files": {"tokenizer.json": b"{}"}}


class EchoWorker:
    """Samples the prompt back; commands answer with their arguments, or with what `results` has for them. `delay_s` and
    `problem` apply to everything. With `hold` nothing ends before `finish`."""

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.results: dict[str, dict[str, Any]] = {}
        self.delay_s = 0.0
        self.problem: dict[str, Any] | None = None
        self.lost = False
        self.hold = False
        self._held: list[Completion] = []
        self._done: asyncio.Queue[Completion] = asyncio.Queue()

    async def submit(self, work: Sequence[Work]) -> None:
        if self.lost:
            raise ServerLostError("the worker died")
        self.work += work
        for item in work:
            result = echo(item) if isinstance(item, SampleWork) else self.results.get(item.command, item.args)
            completion = Completion(item.operation, None if self.problem else result, self.problem)
            completion = Completion(item.operation, None if self.problem else result, self.problem)
            if self.hold:
                self._held.append(completion)
            else:
                asyncio.get_running_loop().call_later(self.delay_s, self._done.put_nowait, completion)

    def finish(self) -> None:
        for completion in self._held:
            self._done.put_nowait(completion)

    async def collect(self, timeout_s: float) -> list[Completion]:
        try:
            return [await asyncio.wait_for(self._done.get(), timeout_s)]
        except TimeoutError:
            return []


def echo(work: SampleWork) -> dict[str, Any]:
    tokens = work.request.prompt[0].tokens
    sample = Sample(tokens, np.zeros(len(tokens), np.float32), "stop", ((0, len(tokens)),))
    return SampleResult(work.request.request_id, (sample,) * work.request.n, work.request.params).to_wire()


class Flaky:
    """Drops the connection of the first `failures` requests, after the app has (`late`) or has not seen them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.failures = 0
        self.late = True
        self.requests = 0
        self.polled = asyncio.Event()
        """Set when there were more requests than the first one and two polls."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.requests += 1
        if self.requests > 3:
            self.polled.set()
        if self.failures == 0:
            await self.app(scope, receive, send)
            return
        self.failures -= 1
        if self.late:

            async def swallow(message: Any) -> None:
                del message

            await self.app(scope, receive, swallow)
        # Returning without an answer makes the HTTP server answer 500; a transient status stands for the broken proxy.
        await send({"type": "http.response.start", "status": 502, "headers": []})
        await send({"type": "http.response.body", "body": b"bad gateway"})


Served = tuple[EchoWorker, Flaky, PolicyClient]
Connect = Callable[[str], Awaitable[PolicyClient]]


@pytest.fixture
async def endpoint_and_parts() -> AsyncIterator[tuple[str, EchoWorker, Flaky]]:
    worker = EchoWorker()
    flaky = Flaky(create_app(worker, {"p": "token"}, INFO))
    listener = Listener(flaky, "127.0.0.1")
    endpoint = await listener.start()
    yield endpoint, worker, flaky
    await listener.stop()


@pytest.fixture
async def served(endpoint_and_parts: tuple[str, EchoWorker, Flaky], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.002)
    endpoint, worker, flaky = endpoint_and_parts
    client = PolicyClient(endpoint, "token", "p")
    yield worker, flaky, client
    await client.close()


class Busy:
    """Answers 429 until the time has come, and says when that is."""

    def __init__(self, app: ASGIApp, wait_s: float) -> None:
        self.app, self.wait_s = app, wait_s
        self.asked: list[float] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.asked.append(time.monotonic())
        if scope["type"] != "http" or time.monotonic() - self.asked[0] >= self.wait_s:
            await self.app(scope, receive, send)
            return
        headers = [(b"retry-after", f"{self.wait_s:g}".encode()), (b"content-type", b"application/problem+json")]
        body = b'{"code": "rate_limited", "detail": "too many", "status": 429}'
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("wait_s", [1.0, 100.0])
async def test_a_server_that_says_when_is_asked_then_or_if_that_is_too_late_not_again(
    wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.002)
    busy = Busy(create_app(EchoWorker(), {"p": "token"}, INFO), wait_s)
    listener = Listener(busy, "127.0.0.1")
    client = http.HttpClient(await listener.start(), "token")
    if wait_s < 5.0:
        assert (await client.request("GET", "/v1/info", deadline_s=5.0))["base_model"] == "tiny"
        assert len(busy.asked) == 2
    else:
        with pytest.raises(RateLimitedError) as caught:
            await client.request("GET", "/v1/info", deadline_s=5.0)
        assert caught.value.retry_after_s == wait_s
        assert len(busy.asked) == 1
    await client.close()
    await listener.stop()


async def test_prompts_may_be_lists_arrays_or_chunks(served: Served) -> None:
    _, _, client = served
    for prompt in ([1, 2, 3], np.asarray([1, 2, 3]), [TokenChunk(np.asarray([1, 2, 3], np.int32))]):
        result = await client.sample(prompt, SamplingParams(max_tokens=3), n=2)
        assert [s.tokens.tolist() for s in result.samples] == [[1, 2, 3]] * 2


async def test_a_sample_may_name_its_version(served: Served) -> None:
    worker, _, client = served
    await client.sample([1], SamplingParams(), version=3)
    await client.sample([1], SamplingParams())
    assert [w.request.version for w in worker.work if isinstance(w, SampleWork)] == [3, None]


async def test_forward_asks_for_logprobs_unless_told_otherwise(served: Served) -> None:
    worker, _, client = served
    worker.results["forward"] = {"logprobs": [np.zeros(2, np.float32)], "entropy": [np.ones(2, np.float32)]}
    assert (await client.forward([])).keys() == {"logprobs"}
    scores = await client.forward([], compute=("entropy", "logprobs"), temperature=0.5)
    np.testing.assert_array_equal(scores["entropy"], np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(scores["logprobs"], np.zeros((1, 2), np.float32))
    assert [w.args for w in worker.work if not isinstance(w, SampleWork)] == [
        {"data": [], "compute": ["logprobs"], "temperature": 1.0},
        {"data": [], "compute": ["entropy", "logprobs"], "temperature": 0.5},
    ]


async def test_info_tokenizer_and_state(served: Served) -> None:
    _, _, client = served
    assert await client.info() == {"base_model": "tiny"}
    assert await client.tokenizer_files() == {"tokenizer.json": b"{}"}
    assert await client.state() == {"policy": "p", "version": None, "next_seq": 0}


@pytest.mark.parametrize("late", [True, False])
async def test_a_command_whose_connection_breaks_is_sent_again_and_runs_once(served: Served, late: bool) -> None:
    worker, flaky, client = served
    await client.publish()
    flaky.failures, flaky.late = 3, late
    assert await client.optim_step(AdamParams(learning_rate=0.5)) == AdamParams(learning_rate=0.5).model_dump()
    assert [w.operation for w in worker.work] == ["p:c:0", "p:c:1"]


async def test_a_sample_whose_connection_breaks_is_sampled_once(served: Served) -> None:
    worker, flaky, client = served
    flaky.failures = 2
    await client.sample([1], SamplingParams())
    assert len(worker.work) == 1


async def test_concurrent_commands_run_in_the_order_of_the_calls(served: Served) -> None:
    worker, _, client = served
    worker.delay_s = 0.05
    await asyncio.gather(*(client.save(f"c{n}") for n in range(10)))
    assert [w.args["name"] for w in worker.work if not isinstance(w, SampleWork)] == [f"c{n}" for n in range(10)]
    assert (await client.state())["next_seq"] == 10


async def test_a_second_client_goes_on_where_the_first_stopped(served: Served) -> None:
    worker, _, client = served
    await client.publish()
    other = PolicyClient(client._http.endpoint, "token", "p")
    await other.publish()
    await other.close()
    assert [w.operation for w in worker.work] == ["p:c:0", "p:c:1"]


async def test_a_refused_command_uses_no_number_up(served: Served) -> None:
    worker, _, client = served
    with pytest.raises(InvalidRequestError, match="unknown command"):
        await client.command("nosuch", {})
    await client.publish()
    assert [w.operation for w in worker.work] == ["p:c:0"]


async def test_256_concurrent_samples_are_answered(served: Served) -> None:
    worker, flaky, client = served
    worker.delay_s = 0.2
    results = await asyncio.gather(*(client.sample([n + 1], SamplingParams()) for n in range(256)))
    assert [r.samples[0].tokens.tolist() for r in results] == [[n + 1] for n in range(256)]
    assert flaky.requests == 256


async def test_an_answer_that_takes_longer_than_a_poll_is_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, flaky, client = served
    monkeypatch.setattr("opentinker.client.policy.POLL_S", 0.05)
    worker.hold = True
    answer = asyncio.create_task(client.sample([1], SamplingParams()))
    async with asyncio.timeout(60.0):
        await flaky.polled.wait()
        worker.finish()
        assert (await answer).samples[0].tokens.tolist() == [1]


async def test_a_deadline_is_an_error_and_a_later_retry_finds_the_answer(served: Served) -> None:
    worker, _, client = served
    worker.delay_s = 0.2
    with pytest.raises(DeadlineError):
        await client.sample([1], SamplingParams(), request_id="r", deadline_s=0.05)
    await client.sample([1], SamplingParams(), request_id="r")
    assert len(worker.work) == 1


async def test_problems_of_the_server_become_their_exceptions(served: Served) -> None:
    worker, _, client = served
    worker.problem = TrainerError("out of memory", hint="smaller packs").to_problem()
    with pytest.raises(TrainerError, match="out of memory") as caught:
        await client.publish()
    assert caught.value.hint == "smaller packs"


async def test_a_lost_worker_is_a_typed_error(served: Served) -> None:
    worker, _, client = served
    worker.lost = True
    with pytest.raises(ServerLostError, match="the worker died"):
        await client.sample([1], SamplingParams())
    with pytest.raises(ServerLostError):
        await client.publish()


async def test_a_wrong_token_is_a_typed_error(served: Served) -> None:
    _, _, client = served
    stranger = PolicyClient(client._http.endpoint, "wrong", "p")
    with pytest.raises(AuthenticationError):
        await stranger.info()
    await stranger.close()


async def test_an_unreachable_server_is_a_typed_error_after_bounded_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.002)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        client = PolicyClient(f"http://127.0.0.1:{closed.getsockname()[1]}", "token", "p")
        with pytest.raises(UnavailableError, match="cannot reach"):
            await client.info()
        await client.close()


async def test_something_that_is_no_server_is_a_typed_error() -> None:
    answer = httpx.Response(404, text="<html>")
    assert isinstance(http.error_of(answer, "http://x"), UnavailableError)


async def test_a_policy_whose_creation_has_to_be_repeated_is_created_once_and_closed_with_its_creator(served: Served) -> None:
    worker, flaky, client = served
    flaky.failures = 3
    other = await client.create_policy(LoraConfig(rank=4), name="other", seed=5)
    await other.command("save", {"name": "mine"})
    created, saved = worker.work
    assert isinstance(created, CommandWork)
    assert isinstance(saved, CommandWork)
    assert (created.policy, created.command, created.args["seed"]) == ("other", "create", 5)
    assert created.args["lora"]["rank"] == 4
    assert saved.operation == "other:c:1"
    flaky.failures = 2
    await client.delete_policy("other")
    assert [work.command for work in worker.work if isinstance(work, CommandWork)] == ["create", "save", "delete"]
    with pytest.raises(NotFoundError):
        await client.delete_policy("gone")


async def test_a_policy_that_is_refused_says_why(served: Served) -> None:
    worker, _, client = served
    worker.problem = ConflictError("no room", hint="engine.max_adapters=2").to_problem()
    with pytest.raises(ConflictError, match=r"engine\.max_adapters=2"):
        await client.create_policy(LoraConfig())
