"""The way to a job's server through the scheduler's address: one reachable port is enough for a laptop.

Bodies are streamed both ways and never read whole, so a slow reader slows the sender down. Who may pass: the job's owner with
an API key, which is exchanged here for the policy's token; or whoever holds the policy's token, which opens this one server.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response

from opentinker.errors import DeadlineError, NotFoundError, UnavailableError
from opentinker.scheduler.waits import Waits

logger = logging.getLogger(__name__)
PREFIX = "/v1/jobs/"
TOKEN_PREFIX = "otp-"
"""What policy tokens begin with, and API keys don't."""
CONNECT_S = 5.0
ANSWER_S = 30.0
"""How long a server may be silent, beyond the wait that the request asks for."""
MAX_WAIT_S = 60.0
KNOWN_S = 1.0
"""How long the scheduler's word on a job's server holds."""
MOST_KNOWN = 1000
IDLE_S = 30.0
"""Connections that nobody used for this long are closed."""
_NOT_PASSED_ON = frozenset(
    {
        b"authorization",
        b"connection",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_PASSED_BACK = (_NOT_PASSED_ON - {b"authorization"}) | {b"date", b"server"}

Resolve = Callable[[str, str | None, str | None, str], Awaitable[dict[str, str]]]
"""(job id, owner, policy token, the client's address) -> {"endpoint", "token", "owner"}; raises what the client is told."""
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def is_proxied(path: str) -> bool:
    """Whether a request's path is that of a job's server."""
    parts = path.split("/", 5)
    return path.startswith(PREFIX) and len(parts) > 4 and parts[4] == "server"


class Proxy:
    """Passes requests on to job servers."""

    def __init__(self, resolve: Resolve, waits: Waits) -> None:
        """`waits` counts the requests of each job's owner that have no answer yet."""
        self._resolve = resolve
        self._waits = waits
        self._known: dict[tuple[str, str | None, str | None], tuple[float, dict[str, str]]] = {}
        self._connections = _Connections()

    async def pass_on(self, request: Request, job_id: str, *, owner: str | None, token: str | None) -> Response:
        """The server's answer, headers first.

        Raises:
            AuthenticationError, NotFoundError: the job is not the caller's.
            UnavailableError: its server is not up yet, or does not answer.
            RateLimitedError: too many requests to the owner's servers wait.
            DeadlineError: the server is silent for longer than the request's `wait_s` and 30 s.
            ServerLostError, JobFailedError: the job has ended.
        """
        address = request.client.host if request.client else ""
        target = await self._target(job_id, owner, token, address)
        with self._waits.held(target["owner"]):
            return await self._answer(request, job_id, target, lambda: self._resolve(job_id, owner, token, address))

    async def _answer(
        self, request: Request, job_id: str, target: dict[str, str], ask_again: Callable[[], Awaitable[dict[str, str]]]
    ) -> Response:
        client = self._connections.take(target["endpoint"])
        body = _Body(request)
        answer: httpx.Response | None = None
        try:
            answer = await _unless_gone(client.send(self._outgoing(client, request, target, body), stream=True), body)
            if answer is None:
                return Response(status_code=499)
            return _Relayed(answer, body, lambda: self._connections.give(target["endpoint"], client))
        except httpx.TimeoutException as error:
            await ask_again()
            raise DeadlineError(f"the server of job {job_id} did not answer in time") from error
        except httpx.TransportError as error:
            # The scheduler may know by now why: then that is what the client hears.
            await ask_again()
            raise UnavailableError(
                f"the server of job {job_id} does not answer: {type(error).__name__}", hint="try again in a few seconds"
            ) from error
        finally:
            if answer is None:
                await client.aclose()

    async def _target(self, job_id: str, owner: str | None, token: str | None, address: str) -> dict[str, str]:
        """What the scheduler said within the last second, or says now: a step of a job is hundreds of requests. A server that
        has ended meanwhile refuses the connection, and its successor at that address the token."""
        now, asked = time.monotonic(), (job_id, owner, token)
        until, target = self._known.get(asked, (-math.inf, {}))
        if now >= until:
            target = await self._resolve(job_id, owner, token, address)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[asked] = (now + KNOWN_S, target)
        return target

    @staticmethod
    def _outgoing(client: httpx.AsyncClient, request: Request, target: dict[str, str], body: "_Body") -> httpx.Request:
        raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
        parts = raw.split(b"/", 5)
        if len(parts) < 6:  # an encoded slash in the place of a real one
            raise NotFoundError("no such route")
        path = b"/" + parts[5]
        query: bytes = request.scope["query_string"]
        headers = [(name, value) for name, value in request.headers.raw if name not in _NOT_PASSED_ON]
        if b"accept-encoding" not in dict(headers):
            headers.append((b"accept-encoding", b"identity"))
        headers.append((b"authorization", f"Bearer {target['token']}".encode()))
        return client.build_request(
            request.method,
            httpx.URL(target["endpoint"]).copy_with(raw_path=path + (b"?" + query if query else b"")),
            headers=headers,
            content=body.parts() if body.expected else None,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=ANSWER_S + _wait_s(request)),
        )


class _Body:
    """A request's body as it comes in, and after it the client's leaving."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.expected = "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
        self._read = asyncio.Event()
        if not self.expected:
            self._read.set()

    async def parts(self) -> AsyncIterator[bytes]:
        async for part in self._request.stream():
            yield part
        self._read.set()

    async def gone(self) -> None:
        """Returns when the client has hung up."""
        await self._read.wait()
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


async def _unless_gone(work: Awaitable[httpx.Response], body: _Body) -> httpx.Response | None:
    """What `work` gives; None, with the work cancelled, when the client hangs up before."""
    doing, leaving = asyncio.ensure_future(work), asyncio.create_task(body.gone())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


class _Relayed(Response):
    """An answer that is passed back as it comes in."""

    def __init__(self, answer: httpx.Response, body: _Body, release: Callable[[], None]) -> None:
        super().__init__(status_code=answer.status_code)
        self.raw_headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _NOT_PASSED_BACK]
        self._answer = answer
        self._request_body = body
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, leaving = asyncio.create_task(self._send(send)), asyncio.create_task(self._request_body.gone())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._answer.aclose()
            self._release()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._answer.aiter_raw():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Connections:
    """One client per connection: the time that httpx's own pool takes grows with the cube of the waiting requests."""

    def __init__(self) -> None:
        self._idle: dict[str, list[tuple[float, httpx.AsyncClient]]] = {}
        self._tls = httpx.create_ssl_context()
        self._closing: set[asyncio.Task[None]] = set()
        self._swept_at = -math.inf

    def take(self, endpoint: str) -> httpx.AsyncClient:
        idle = self._idle.get(endpoint)
        if idle:
            return idle.pop()[1]
        # What the environment says of proxies is about the outside; this stays within the cluster.
        return httpx.AsyncClient(
            verify=self._tls, trust_env=False, limits=httpx.Limits(max_connections=1, keepalive_expiry=IDLE_S)
        )

    def give(self, endpoint: str, client: httpx.AsyncClient) -> None:
        now = time.monotonic()
        self._idle.setdefault(endpoint, []).append((now, client))
        if now - self._swept_at > 1.0:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        for endpoint, clients in list(self._idle.items()):
            old = [client for at, client in clients if now - at > IDLE_S]
            self._idle[endpoint] = [(at, client) for at, client in clients if now - at <= IDLE_S]
            if not self._idle[endpoint]:
                del self._idle[endpoint]
            for client in old:
                task = asyncio.create_task(_close(client))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


async def _close(client: httpx.AsyncClient) -> None:
    with contextlib.suppress(httpx.HTTPError, OSError):
        await client.aclose()


def _wait_s(request: Request) -> float:
    """How long the request may be held; what is no number is the server's to refuse."""
    try:
        wait_s = float(request.query_params.get("wait_s", "0"))
    except ValueError:
        return 0.0
    return min(max(wait_s, 0.0), MAX_WAIT_S) if math.isfinite(wait_s) else 0.0
