"""The scheduler's address leads to job servers: real HTTP on both sides, and a real server front behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from opentinker.client.policy import PolicyClient
from opentinker.config.server import LoraConfig
from opentinker.errors import AuthenticationError, JobFailedError, NotFoundError, ServerLostError
from opentinker.policy_tokens import further_token
from opentinker.scheduler import api
from opentinker.scheduler.api import create_app
from opentinker.scheduler.auth import new_api_key, new_server_secret, policy_token
from opentinker.scheduler.proxy import TOKEN_PREFIX, is_proxied
from opentinker.server.listener import Listener


class Upstream:
    """A job server that shows what arrives."""

    def __init__(self) -> None:
        self.hung_up = asyncio.Event()
        self.holding = asyncio.Event()
        self.taken = 0
        self.made = 0
        self.app = Starlette(
            routes=[
                Route("/v1/echo/{rest:path}", self.echo, methods=["GET", "POST"]),
                Route("/v1/hold", self.hold),
                Route("/v1/endless", self.endless),
                Route("/v1/slow", self.slow, methods=["POST"]),
                Route("/v1/breaks", self.breaks),
            ]
        )

    async def echo(self, request: Request) -> Response:
        body = await request.body()
        headers = {
            "x-raw-path": request.scope["raw_path"].decode(),
            "x-query": request.url.query,
            "x-auth": request.headers["authorization"],
            "x-names": ",".join(sorted(request.headers)),
            "content-type": request.headers.get("content-type", "none"),
        }
        return Response(body, 202, headers)

    async def hold(self, request: Request) -> Response:
        self.holding.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.hung_up.set()
        return Response()

    async def endless(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    self.made += 2**16
                    yield bytes(2**16)
                    await asyncio.sleep(0)
            finally:
                self.hung_up.set()

        return StreamingResponse(parts())

    async def slow(self, request: Request) -> Response:
        async for part in request.stream():
            self.taken += len(part)
            await asyncio.sleep(0.05)
        return Response()

    async def breaks(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"the first half"
            await asyncio.sleep(0.1)
            raise ConnectionError

        return StreamingResponse(parts())


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    listener = Listener(app, "127.0.0.1")
    try:
        yield await listener.start()
    finally:
        await listener.stop()


@pytest.fixture
async def upstream(world: Any) -> AsyncIterator[Upstream]:
    upstream = Upstream()
    async with served(upstream.app) as world.launcher.endpoint:
        yield upstream


@pytest.fixture
async def url(world: Any) -> AsyncIterator[str]:
    app = create_app(world.service)
    async with served(app) as url:
        yield url


@pytest.fixture
def key(world: Any) -> str:
    return str((world.settings.state_dir / "api_key").read_text())


@pytest.fixture
async def job(world: Any, upstream: Upstream) -> dict[str, Any]:
    running: dict[str, Any] = await world.reach(await world.interactive(), "RUNNING")
    return running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("credential", ["api key", "policy token"])
async def test_requests_pass_unchanged_but_for_the_credential(url: str, key: str, job: Any, credential: str) -> None:
    token = job["server"]["token"]
    headers = bearer(key if credential == "api key" else token) | {"Content-Type": "application/msgpack", "X-Mine": "1"}
    body = bytes(range(256)) * 5000
    async with httpx.AsyncClient() as http:
        path = f"{url}{job['server']['proxy']}/v1/echo/a%2Fb%3Ac"
        answer = await http.post(path, params={"wait_s": "0.5"}, headers=headers, content=body)
        assert answer.content == body
        assert answer.status_code == 202
        assert answer.headers["x-raw-path"] == "/v1/echo/a%2Fb%3Ac"
        assert answer.headers["x-query"] == "wait_s=0.5"
        assert answer.headers["x-auth"] == f"Bearer {token}"
        assert answer.headers["content-type"] == "application/msgpack"
        assert "x-mine" in answer.headers["x-names"]
        assert "cookie" not in answer.headers["x-names"]

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"part"

        assert (await http.post(path, headers=headers, content=parts())).content == b"part" * 3
        assert (await http.get(path, headers=headers)).content == b""


async def test_a_job_is_open_to_its_owner_and_its_own_token_only(world: Any, url: str, key: str, job: Any) -> None:
    theirs = await world.interactive(owner="ann")
    foreign = policy_token(world.secret, "pol-of-another")
    async with httpx.AsyncClient() as http:
        for path, credential, status in [
            (job["server"]["proxy"], "ot-wrong", 401),
            (job["server"]["proxy"], foreign, 401),
            (job["server"]["proxy"], TOKEN_PREFIX, 401),
            ("/v1/jobs/job-none/server", job["server"]["token"], 401),
            (f"/v1/jobs/{theirs['id']}/server", key, 404),
            ("/v1/jobs/job-none/server", key, 404),
        ]:
            answer = await http.get(f"{url}{path}/v1/echo/x", headers=bearer(credential))
            assert answer.status_code == status, (path, credential)
            assert answer.headers["content-type"] == "application/problem+json"
        # A policy's token opens the proxy and nothing else of the scheduler.
        for path in ("/v1/jobs", f"/v1/jobs/{job['id']}", "/v1/cluster", "/metrics", "/v1/jobs/x/servers", "/v1/x/x/server/y"):
            assert (await http.get(url + path, headers=bearer(job["server"]["token"]))).status_code == 401, path


async def test_a_client_that_hangs_up_ends_the_servers_work(url: str, key: str, job: Any, upstream: Upstream) -> None:
    async with httpx.AsyncClient(headers=bearer(key)) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.get(f"{url}{job['server']['proxy']}/v1/hold", timeout=0.2)
        assert upstream.holding.is_set()
        async with asyncio.timeout(5.0):
            await upstream.hung_up.wait()


async def test_who_waits_at_too_many_servers_is_told_when_to_come_back(
    world: Any, key: str, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MAX_PROXIED_EACH", 2)
    async with served(create_app(world.service)) as url, httpx.AsyncClient() as http:
        path, token = f"{url}{job['server']['proxy']}/v1", bearer(job["server"]["token"])
        # With the key and with the token, it is the same user who waits.
        holding = [asyncio.create_task(http.get(f"{path}/hold", headers=headers)) for headers in (bearer(key), token)]
        await asyncio.sleep(0.3)
        for headers in (bearer(key), token):
            refused = await http.get(f"{path}/echo/x", headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
            assert int(refused.headers["Retry-After"]) >= 1
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        await asyncio.sleep(0.3)
        assert (await http.get(f"{path}/echo/x", headers=token)).status_code == 202


async def test_an_answer_that_breaks_off_does_not_look_whole(url: str, key: str, job: Any) -> None:
    async with httpx.AsyncClient(headers=bearer(key)) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(f"{url}{job['server']['proxy']}/v1/breaks")
        assert (await http.get(f"{url}{job['server']['proxy']}/v1/echo/x")).status_code == 202


async def test_a_slow_reader_slows_the_server_down(url: str, key: str, job: Any, upstream: Upstream) -> None:
    async with httpx.AsyncClient(headers=bearer(key)) as http:
        async with http.stream("GET", f"{url}{job['server']['proxy']}/v1/endless") as answer:
            async for _ in answer.aiter_raw():
                break
            await asyncio.sleep(0.5)
            made = upstream.made
            await asyncio.sleep(0.5)
            assert upstream.made == made, "nobody reads, so nothing more is made"
            assert made < 64 * 2**20
        async with asyncio.timeout(5.0):
            await upstream.hung_up.wait()


async def test_a_slow_server_slows_the_sender_down(url: str, key: str, job: Any, upstream: Upstream) -> None:
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            yield bytes(2**16)
            sent += 2**16

    async with httpx.AsyncClient(headers=bearer(key), timeout=60.0) as http:
        sending = asyncio.create_task(http.post(f"{url}{job['server']['proxy']}/v1/slow", content=parts()))
        async with asyncio.timeout(30.0):
            before = -1
            # What is on the way stops growing when the buffers are full: from then on no more is sent than is taken.
            while not upstream.taken or (sent - upstream.taken) - before > 2**20:
                before = sent - upstream.taken
                await asyncio.sleep(0.5)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_server_that_is_not_there_is_a_typed_error(world: Any, url: str, key: str) -> None:
    world.launcher.endpoint = "http://127.0.0.1:9"
    world.launcher.may_start.clear()
    job = await world.reach(await world.interactive(), "STARTING")
    path = f"{url}/v1/jobs/{job['id']}/server/v1/info"
    async with httpx.AsyncClient(headers=bearer(key)) as http:
        starting = await http.get(path)
        assert (starting.status_code, starting.json()["code"]) == (503, "unavailable")
        assert "its server starts" in starting.json()["hint"]
        world.launcher.may_start.set()
        job = await world.reach(job, "RUNNING")
        deaf = await http.get(path)
        assert (deaf.status_code, deaf.json()["code"]) == (503, "unavailable")
        world.launcher.faults[job["id"]] = "killed by signal 9"
        await world.reach(job, "FAILED")
        lost = (await http.get(path)).json()
        assert lost["code"] == ServerLostError.code
        assert "killed by signal 9" in lost["detail"]
        done = await world.reach(await world.interactive(), "RUNNING")
        await world.service.complete("admin", done["id"])
        ended = (await http.get(f"{url}/v1/jobs/{done['id']}/server/v1/info", headers=bearer(done["server"]["token"]))).json()
        assert ended["code"] == JobFailedError.code
        assert "COMPLETED" in ended["detail"]


async def test_the_policy_client_works_through_the_proxy_as_it_does_directly(world: Any, url: str) -> None:
    from opentinker.server.front import create_app as create_front
    from opentinker.server.protocol import Completion

    class Worker:
        def __init__(self) -> None:
            self.done: asyncio.Queue[Completion] = asyncio.Queue()

        async def submit(self, work: Any) -> None:
            for item in work:
                sample = {"tokens": np.arange(3, dtype=np.int32), "logprobs": np.zeros(3, np.float32), "finish_reason": "stop"}
                sequences = [{**sample, "versions": [[0, 3]]}]
                self.done.put_nowait(Completion(item.operation, {"sequences": sequences, "version": 1}))

        async def collect(self, timeout_s: float) -> list[Completion]:
            try:
                return [await asyncio.wait_for(self.done.get(), timeout_s)]
            except TimeoutError:
                return []

    info = {"base_model": "tiny", "tokenizer_files": {"tokenizer.json": b"\x00\xff"}}
    tokens: dict[str, str] = {}
    world.launcher.may_start.clear()
    job = await world.reach(await world.interactive(), "STARTING")
    (policy,) = world.store.policies(job["id"])
    tokens[policy.id] = policy_token(world.secret, policy.id)
    async with served(create_front(Worker(), tokens, info)) as world.launcher.endpoint:
        world.launcher.may_start.set()
        job = await world.reach(job, "RUNNING")
        server = job["server"]
        client = PolicyClient(url + server["proxy"], server["token"], server["policy"])
        assert (await client.tokenizer_files()) == info["tokenizer_files"]
        assert (await client.state())["next_seq"] == 0
        results = await asyncio.gather(*(client.command("save", {"name": str(i)}) for i in range(20)))
        assert all(result["version"] == 1 for result in results)
        assert (await client.state())["next_seq"] == 20
        other = await client.create_policy(LoraConfig(), name="other")  # the scheduler has never heard of it
        assert await other.state() == {"policy": "other", "version": 1, "next_seq": 1}
        assert (await other.command("save", {"name": "mine"}))["version"] == 1
        with pytest.raises(NotFoundError):
            await other.delete_policy("other")
        stranger = PolicyClient(other._http.endpoint, further_token(server["token"], "never-created"), "never-created")
        with pytest.raises(AuthenticationError):
            await stranger.state()
        await stranger.close()
        await client.delete_policy("other")
        await client.close()


def test_tokens_and_keys_cannot_be_mistaken_for_each_other() -> None:
    assert policy_token(new_server_secret(), "pol-1").startswith(TOKEN_PREFIX)
    assert not new_api_key().startswith(TOKEN_PREFIX)


@pytest.mark.parametrize(
    ("path", "proxied"),
    [
        ("/v1/jobs/job-1/server/v1/info", True),
        ("/v1/jobs/job-1/server/", True),
        ("/v1/jobs/job-1/servers/x", False),
        ("/v1/jobs/job-1/cancel", False),
        ("/v1/jobs/server", False),
        ("//v1/jobs/job-1/server/x", False),
        ("/v1/other/job-1/server/x", False),
    ],
)
def test_what_counts_as_a_job_servers_path(path: str, proxied: bool) -> None:
    assert is_proxied(path) == proxied
