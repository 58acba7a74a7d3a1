"""The front over a scripted worker: order, retries, access, formats and faults, without a model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from opentinker.client import wire
from opentinker.errors import ServerLostError
from opentinker.server.front import create_app
from opentinker.server.protocol import CommandWork, Completion, Work

TOKENS = {"alpha": "token-a", "beta": "token-b"}
INFO = {"base_model": "tiny", "vocab_size": 7, "tokenizer_files": {"tokenizer.json": b"{}"}}


class ScriptedWorker:
    """Answers each work item at once, or holds everything back while `held`; records the batches it got."""

    def __init__(self) -> None:
        self.batches: list[list[Work]] = []
        self.held = False
        self._done: asyncio.Queue[Completion | Exception] = asyncio.Queue()

    @property
    def work(self) -> list[Work]:
        return [item for batch in self.batches for item in batch]

    async def submit(self, work: Sequence[Work]) -> None:
        self.batches.append(list(work))
        if not self.held:
            for item in work:
                self._done.put_nowait(Completion(item.operation, {"version": 3, "logprobs": np.ones(2, np.float32)}))

    async def collect(self, timeout_s: float) -> list[Completion]:
        try:
            done = await asyncio.wait_for(self._done.get(), timeout_s)
        except TimeoutError:
            return []
        if isinstance(done, Exception):
            raise done
        return [done]

    def die(self) -> None:
        self._done.put_nowait(ServerLostError("the worker died", hint="out of memory?"))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def serving(
    worker: ScriptedWorker, info: dict[str, Any] | None = INFO, clock: Clock | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(worker, TOKENS, info, clock=clock or Clock())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://t", headers={"Authorization": "Bearer token-a"}) as client,
    ):
        yield client


@pytest.fixture
def worker() -> ScriptedWorker:
    return ScriptedWorker()


def sample_body(request_id: str = "r", prompt: Sequence[int] = (1, 2)) -> dict[str, Any]:
    return {"request_id": request_id, "prompt": list(prompt), "params": {"max_tokens": 4}}


async def command(
    client: httpx.AsyncClient, seq: int, wait_s: float = 5.0, name: str = "optim_step", **args: Any
) -> httpx.Response:
    body = {"seq": seq, "command": name, "args": args}
    return await client.post(f"/v1/policies/alpha/commands?wait_s={wait_s}", json=body)


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic token-a", "token-a", "Bearer "])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/info"),
        ("GET", "/v1/tokenizer"),
        ("GET", "/v1/policies/alpha"),
        ("GET", "/v1/policies/nosuch"),
        ("POST", "/v1/policies/alpha/sample"),
        ("POST", "/v1/policies/alpha/commands"),
        ("GET", "/v1/operations/alpha:c:0"),
    ],
)
async def test_without_a_valid_token_every_route_answers_the_same_401(
    worker: ScriptedWorker, authorization: str | None, method: str, path: str
) -> None:
    async with serving(worker) as client:
        client.headers.pop("Authorization")
        headers = {"Authorization": authorization} if authorization else {}
        answer = await client.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["code"] == "unauthenticated"
    assert answer.json()["hint"]
    assert not any(secret in answer.text for secret in ("alpha", "token-a", "token-b", "tiny"))
    assert worker.batches == []


async def test_health_needs_no_token(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        answer = await client.get("/health", headers={"Authorization": ""})
    assert answer.json() == {"status": "ok"}


async def test_a_token_opens_its_own_policy_and_operations_only(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        mine = (await client.post("/v1/policies/alpha/sample?wait_s=5", json=sample_body())).json()
        theirs = {"Authorization": "Bearer token-b"}
        for path in (f"/v1/operations/{mine['operation_id']}", "/v1/policies/alpha"):
            assert (await client.get(path)).status_code == 200
            foreign = await client.get(path, headers=theirs)
            assert foreign.status_code == 404
            assert foreign.json()["code"] == "not_found"
        assert (await client.post("/v1/policies/alpha/sample", json=sample_body("x"), headers=theirs)).status_code == 404


async def test_before_the_worker_is_ready_routes_answer_503(worker: ScriptedWorker) -> None:
    async with serving(worker, info=None) as client:
        answer = await client.get("/v1/info")
    assert answer.status_code == 503
    assert "starting" in answer.json()["detail"]


async def test_info_and_tokenizer_come_as_json_and_as_msgpack(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        assert (await client.get("/v1/info")).json() == {"base_model": "tiny", "vocab_size": 7}
        assert (await client.get("/v1/tokenizer")).json() == {"files": {"tokenizer.json": "{}"}}
        packed = await client.get("/v1/tokenizer", headers={"Accept": wire.MSGPACK})
    assert packed.headers["content-type"] == wire.MSGPACK
    assert wire.unpack(packed.content) == {"files": {"tokenizer.json": b"{}"}}


async def test_a_retried_command_runs_once_and_gets_the_first_answer(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        answers = [await command(client, 0, learning_rate=0.1) for _ in range(3)]
        conflict = await command(client, 0, learning_rate=0.2)
    assert len(worker.work) == 1
    assert {a.status_code for a in answers} == {200}
    assert len({a.text for a in answers}) == 1
    assert conflict.status_code == 409
    assert conflict.json()["code"] == "conflict"


async def test_a_retried_sample_is_sampled_once_and_another_body_is_a_conflict(worker: ScriptedWorker) -> None:
    worker.held = True
    async with serving(worker) as client:
        for _ in range(3):
            answer = await client.post("/v1/policies/alpha/sample", json=sample_body())
            assert answer.status_code == 202
        conflict = await client.post("/v1/policies/alpha/sample", json=sample_body(prompt=(3,)))
        await asyncio.sleep(0.02)
    assert len(worker.work) == 1
    assert conflict.json()["code"] == "conflict"


async def test_commands_reach_the_worker_in_order_whatever_order_they_arrive_in(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        answers = await asyncio.gather(*(command(client, seq) for seq in (3, 1, 2, 0)))
        state = (await client.get("/v1/policies/alpha")).json()
    assert [w.operation for w in worker.work] == [f"alpha:c:{n}" for n in range(4)]
    assert all(a.json()["status"] == "done" for a in answers)
    assert state == {"policy": "alpha", "version": 3, "next_seq": 4}


async def test_a_gap_expires_with_an_error_and_the_command_may_be_sent_again(worker: ScriptedWorker) -> None:
    clock = Clock()
    async with serving(worker, clock=clock) as client:
        assert (await command(client, 1, wait_s=0)).status_code == 202
        clock.now = 31.0
        late = (await client.get("/v1/operations/alpha:c:1?wait_s=5")).json()
        assert late["status"] == "failed"
        assert late["problem"]["code"] == "sequence_gap"
        assert worker.work == []
        first, again = await asyncio.gather(command(client, 0), command(client, 1))
    assert first.json()["status"] == again.json()["status"] == "done"
    assert [w.operation for w in worker.work] == ["alpha:c:0", "alpha:c:1"]


async def test_samples_that_arrive_together_reach_the_worker_together(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        posts = (client.post("/v1/policies/alpha/sample?wait_s=5", json=sample_body(str(n))) for n in range(40))
        answers = await asyncio.gather(*posts)
    assert {a.status_code for a in answers} == {200}
    assert len(worker.work) == 40
    assert len(worker.batches) < 20


async def test_request_ids_may_hold_any_characters(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        answer = (await client.post("/v1/policies/alpha/sample?wait_s=5", json=sample_body("a/b?c#d %é:1"))).json()
        assert (await client.get(f"/v1/operations/{quote(answer['operation_id'], safe='')}")).json() == answer


async def test_losing_the_worker_fails_pending_operations_and_later_requests(worker: ScriptedWorker) -> None:
    worker.held = True
    async with serving(worker) as client:
        waiting = asyncio.create_task(command(client, 0))
        await asyncio.sleep(0.02)
        worker.die()
        failed = (await waiting).json()
        assert failed["status"] == "failed"
        assert failed["problem"]["code"] == "server_lost"
        assert failed["problem"]["hint"] == "out of memory?"
        for answer in (
            await command(client, 1),
            await client.post("/v1/policies/alpha/sample", json=sample_body()),
            await client.get("/v1/policies/alpha"),
            await client.get("/v1/info"),
        ):
            assert answer.status_code == 409
            assert answer.json()["code"] == "server_lost"
        assert (await client.get("/health")).status_code == 503


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("sample", {"request_id": "r", "prompt": []}),
        ("sample", {"request_id": "r", "prompt": [1], "temprature": 2}),
        ("sample", {"prompt": [1]}),
        ("sample", {"request_id": "r", "prompt": [1], "params": {"top_p": 7}}),
        ("sample", [1, 2]),
        ("commands", {"seq": -1, "command": "optim_step"}),
        ("commands", {"seq": True, "command": "optim_step"}),
        ("commands", {"seq": 0, "command": "optim_stepp"}),
        ("commands", {"seq": 0, "command": "optim_step", "args": [1]}),
        ("commands", {"seq": 0, "command": "optim_step", "extra": 1}),
        ("commands", "text"),
    ],
)
async def test_a_malformed_request_is_a_400_that_uses_no_number_up(worker: ScriptedWorker, path: str, body: Any) -> None:
    async with serving(worker) as client:
        answer = await client.post(f"/v1/policies/alpha/{path}", json=body)
        assert answer.status_code == 400
        assert answer.json()["code"] == "invalid_request"
        assert (await client.get("/v1/policies/alpha")).json()["next_seq"] == 0
    assert worker.work == []


async def test_an_unknown_command_names_the_nearest(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        answer = await command(client, 0, name="optim_stepp")
    assert "optim_step" in answer.json()["hint"]


async def test_undecodable_and_oversized_bodies_are_refused(worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.server.front.MAX_BODY_BYTES", 1000)

    async def chunked() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 500

    async with serving(worker) as client:
        url = "/v1/policies/alpha/commands"
        for content, content_type in (
            (b"{", wire.JSON),
            (b"\xc1", wire.MSGPACK),
            (b" " * 1001, wire.JSON),
            (chunked(), wire.JSON),
        ):
            answer = await client.post(url, content=content, headers={"Content-Type": content_type})
            assert answer.status_code == 400
            assert answer.json()["code"] == "invalid_request"


@pytest.mark.parametrize("wait_s", ["x", "-1", "nan"])
async def test_a_wrong_wait_is_refused(worker: ScriptedWorker, wait_s: str) -> None:
    async with serving(worker) as client:
        answer = await client.get(f"/v1/operations/alpha:c:0?wait_s={wait_s}")
    assert answer.status_code in (400, 404)
    assert worker.work == []


async def test_unknown_routes_and_methods_are_problems_too(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        assert (await client.get("/nosuch")).json()["code"] == "not_found"
        assert (await client.get("/v1/policies/alpha/sample")).json()["code"] == "invalid_request"


async def test_arguments_and_results_are_arrays_in_msgpack_and_lists_in_json(worker: ScriptedWorker) -> None:
    async with serving(worker) as client:
        body = wire.pack({"seq": 0, "command": "forward", "args": {"data": [np.arange(3, dtype=np.int32)]}})
        headers = {"Content-Type": wire.MSGPACK, "Accept": wire.MSGPACK}
        packed = await client.post("/v1/policies/alpha/commands?wait_s=5", content=body, headers=headers)
        plain = await client.get("/v1/operations/alpha:c:0")
    result = wire.unpack(packed.content)["result"]
    np.testing.assert_array_equal(result["logprobs"], np.ones(2, np.float32))
    assert plain.json()["result"]["logprobs"] == [1.0, 1.0]
    (work,) = worker.work
    assert isinstance(work, CommandWork)
    np.testing.assert_array_equal(work.args["data"][0], np.arange(3))
