"""What the HTTP clients of a job server share: retries, deadlines and errors."""

import asyncio
import math
import random
import time
from collections.abc import Mapping
from typing import Any

import httpx

from opentinker.client import wire
from opentinker.errors import (
    AuthenticationError,
    DeadlineError,
    OpenTinkerError,
    RateLimitedError,
    UnavailableError,
    from_problem,
)

ATTEMPTS = 6
FIRST_PAUSE_S = 0.1
ANSWER_S = 30.0
"""How long the other side may take for an answer, beyond the wait that was asked for."""
_TRANSIENT = frozenset({429, 502, 503, 504})


class HttpClient:
    """Requests with a bearer token and msgpack bodies. Whatever is sent through it must be idempotent: it is retried
    after connection failures and transient answers (bounded, with jitter; where the answer says when, then, within the
    request's deadline)."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Accept": wire.MSGPACK}
        # Every waiting sample holds a connection, and the time that httpx's own pool takes grows with the cube of their
        # number (256 took 12 s): so each connection is a client of its own, and the idle ones are a stack.
        self._idle: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []
        self._tls = httpx.create_ssl_context()

    async def request(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        wait_s: float = 0.0,
        deadline_s: float = 60.0,
    ) -> Any:
        """The decoded answer. `content` is a msgpack body; `wait_s` is how long the server may hold the request.

        Raises:
            UnavailableError: no connection after all attempts.
            DeadlineError: no answer within `deadline_s`.
            OpenTinkerError: what the server reports.
        """
        try:
            async with asyncio.timeout(deadline_s):
                return await self._attempts(method, path, content, wait_s, deadline_s)
        except TimeoutError:
            raise DeadlineError(f"{self.endpoint} did not answer {method} {path} within {deadline_s:.0f} s") from None

    async def close(self) -> None:
        for client in self._all:
            await client.aclose()
        self._all.clear()
        self._idle.clear()

    async def _attempts(self, method: str, path: str, content: bytes | None, wait_s: float, deadline_s: float) -> Any:
        url = f"{self.endpoint}{path}" + (f"?wait_s={wait_s:.3f}" if wait_s else "")
        error: OpenTinkerError = UnavailableError(f"cannot reach {self.endpoint}")
        ends = time.monotonic() + deadline_s
        attempt, told_s = 0, 0.0
        while attempt < ATTEMPTS:
            if attempt or told_s:
                backoff_s = FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(backoff_s, told_s * random.uniform(1.0, 1.1)))
            told_s = 0.0
            attempt += 1
            try:
                response = await self._send(method, url, content, ANSWER_S + wait_s)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as cause:
                raise UnavailableError(f"'{self.endpoint}' is not the address of a server: {cause}") from cause
            except httpx.TransportError as cause:
                error = UnavailableError(f"cannot reach {self.endpoint}: {cause!r}", hint="is the job still running?")
                continue
            if response.is_success:
                return wire.loads(response.content, response.headers.get("content-type", ""))
            error = error_of(response, self.endpoint)
            if response.status_code not in _TRANSIENT:
                break
            told_s = retry_after_s(response)
            if time.monotonic() + told_s > ends:
                break  # it would be in vain
            if told_s:
                attempt -= 1  # as long as it says when, and that is in time
        raise error

    async def _send(self, method: str, url: str, content: bytes | None, read_s: float) -> httpx.Response:
        if self._idle:
            client = self._idle.pop()
        else:
            client = httpx.AsyncClient(headers=self._headers, verify=self._tls, limits=httpx.Limits(keepalive_expiry=30.0))
            self._all.append(client)
        try:
            headers = {"Content-Type": wire.MSGPACK} if content is not None else None
            timeout = httpx.Timeout(ANSWER_S, read=read_s)
            return await client.request(method, url, content=content, headers=headers, timeout=timeout)
        finally:
            self._idle.append(client)


def retry_after_s(response: httpx.Response) -> float:
    """What an answer's Retry-After asks for, in seconds; 0 when it asks for nothing, or for a date, which none of ours does."""
    try:
        seconds = float(response.headers.get("retry-after", "0"))
    except ValueError:
        return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def error_of(response: httpx.Response, url: str) -> OpenTinkerError:
    """The error that an unsuccessful answer describes."""
    try:
        problem = wire.loads(response.content, response.headers.get("content-type", ""))
    except OpenTinkerError:
        problem = None
    if not isinstance(problem, Mapping) or "code" not in problem:
        return UnavailableError(
            f"{url} answered {response.status_code} and no problem document", hint="is this an OpenTinker server's address?"
        )
    error = from_problem(dict(problem))
    if isinstance(error, RateLimitedError):
        error.retry_after_s = retry_after_s(response) or error.retry_after_s
    if isinstance(error, AuthenticationError) and not error.hint:
        error.hint = "check the token"
    return error


class Deadline:
    """A point in time that several requests share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left.

        Raises:
            DeadlineError: none.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no answer within {self.seconds:.0f} s")
        return left
