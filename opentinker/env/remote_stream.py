"""A client's end of a stream to an environment server: all sessions of an event loop share one WebSocket per server."""

import asyncio
import itertools
import os
import ssl
import time
import weakref
from typing import Any, cast
from urllib.parse import urlsplit

from opentinker.env.frames import FrameReader, batches, encode
from opentinker.env.websocket import CLOSE, PING, PONG, MessageReader, accept_of, message, new_key
from opentinker.errors import (
    AuthenticationError,
    DeadlineError,
    InvalidRequestError,
    OpenTinkerError,
    TooLargeError,
    UnavailableError,
    from_problem,
)

MAX_MESSAGE_BYTES = 256 * 2**20
WRITE_BYTES = 2**20
CONNECT_S = 10.0
LINGER_S = 5.0
"""An unused connection is closed after this."""
KEEP_S = 0.5
SILENT_S = 5.0
"""A server that sends nothing at all for so long after a deadline is taken for dead."""
CLIENT = os.urandom(8).hex()
"""By this a server knows which sessions lose their client when a stream breaks."""
JOB_VARIABLE = "OPENTINKER_JOB"

Answer = tuple[int, bytes]
"""The kind of an answer and its body."""


class StreamLostError(Exception):
    """The connection broke before the answer came; whether the request arrived is unknown."""


class _Pending:
    __slots__ = ("deadline", "future", "sent", "timeout_s")

    def __init__(self, future: "asyncio.Future[Answer]", timeout_s: float) -> None:
        self.future = future
        self.sent = time.monotonic()
        self.timeout_s = timeout_s
        self.deadline = self.sent + timeout_s


class _Connection(asyncio.Protocol):
    def __init__(self, key: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._key = key
        self._transport: asyncio.Transport | None = None
        self._messages = MessageReader(masked=False, max_bytes=MAX_MESSAGE_BYTES)
        self._frames = FrameReader()
        self._out: list[bytes] = []
        self._head = b""
        self._numbers = itertools.count(1)
        self.pending: dict[int, _Pending] = {}
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.heard = time.monotonic()
        self.alive = False

    def call(self, op: int, session: bytes, index: int, timeout_s: float, body: bytes) -> "asyncio.Future[Answer]":
        number = next(self._numbers)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self.pending[number] = _Pending(future, timeout_s)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(encode(op, 0, index, number, session, timeout_s, body))
        return future

    def close(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if self.alive:
                self._transport.write(message((1000).to_bytes(2, "big"), masked=True, opcode=CLOSE))
            self.alive = False
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports derive from none of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        try:
            if not self.opened.done():
                data = self._handshake(data)
            for opcode, payload in self._messages.feed(data):
                if opcode == CLOSE:
                    self.close()
                elif opcode == PING:
                    assert self._transport is not None
                    self._transport.write(message(payload, masked=True, opcode=PONG))
                elif opcode != PONG:
                    pending = self.pending
                    for frame in self._frames.feed(payload):
                        waiting = pending.pop(frame.request, None)
                        if waiting is not None and not waiting.future.done():
                            waiting.future.set_result((frame.kind, frame.body))
        except OpenTinkerError as error:
            if not self.opened.done():
                self.opened.set_exception(error)
            self.abort()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        if not self.opened.done():
            self.opened.set_exception(UnavailableError("it closed the connection"))
        pending, self.pending = self.pending, {}
        for one in pending.values():
            if not one.future.done():
                one.future.set_exception(StreamLostError())
        if not self.gone.done():
            self.gone.set_result(None)

    def _handshake(self, data: bytes) -> bytes:
        """What follows the server's answer to the handshake."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            if len(self._head) > 2**16:
                raise UnavailableError("it does not answer like an environment server")
            return b""
        line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
        if line.split(" ")[1:2] != ["101"]:
            raise _refusal(line, headers, rest)
        if headers.get("sec-websocket-accept") != accept_of(self._key):
            raise UnavailableError("it does not answer like an environment server")
        self.alive = True
        self.opened.set_result(None)
        return rest

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self._transport.is_closing():
            for piece in batches(out, WRITE_BYTES):
                self._transport.write(message(piece, masked=True))


def _refusal(line: str, headers: dict[str, str], body: bytes) -> OpenTinkerError:
    status = [*line.split(" "), ""][1]
    if headers.get("content-type", "").startswith("application/problem+json"):
        import json

        try:
            return from_problem(json.loads(body))
        except (ValueError, AttributeError):
            pass
    if status == "401":
        return AuthenticationError("the environment server refuses the token")
    return UnavailableError(f"it answered {status or 'nonsense'}", hint="is this the address of `opentinker env serve`?")


class Link:
    """The way to one server from one event loop, with the connection that it has at the moment."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._token = token
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()
        self._users = 0
        self._used = time.monotonic()
        self._keeper: asyncio.Task[None] | None = None

    def enter(self) -> None:
        """One more session that keeps the connection open."""
        self._users += 1

    def leave(self) -> None:
        """One less."""
        self._users -= 1
        self._used = time.monotonic()

    async def request(self, op: int, session: bytes, index: int, timeout_s: float, body: bytes) -> Answer:
        """Send a request and wait for its answer. It is sent once.

        Raises:
            UnavailableError: the server cannot be reached.
            AuthenticationError: it refuses the token.
            StreamLostError: the connection broke meanwhile.
            DeadlineError: there was no answer, though the server had the time to give one.
        """
        connection = self._connection
        if connection is None or not connection.alive:
            connection = await self._connected(timeout_s)
        self._used = time.monotonic()
        return await connection.call(op, session, index, timeout_s, body)

    async def _connected(self, timeout_s: float) -> _Connection:
        async with self._lock:
            if self._connection is not None and self._connection.alive:
                return self._connection
            try:
                async with asyncio.timeout(min(CONNECT_S, max(0.0, timeout_s))):
                    self._connection = await self._connect()
            except TimeoutError:
                raise UnavailableError(f"the environment server {self.url} does not answer") from None
            if self._keeper is None or self._keeper.done():
                self._keeper = asyncio.create_task(self._keep())
            return self._connection

    async def _connect(self) -> _Connection:
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        key = new_key()
        connection = _Connection(key)
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(
                lambda: connection, parts.hostname or "", port, ssl=ssl.create_default_context() if secure else None
            )
        except OSError as error:
            raise UnavailableError(
                f"cannot reach the environment server {self.url}: {error.strerror or error}",
                hint="is `opentinker env serve` running there?",
            ) from error
        headers = {
            "Host": parts.netloc.rpartition("@")[2],
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": key,
            "X-OpenTinker-Client": CLIENT,
        }
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if job := os.environ.get(JOB_VARIABLE, ""):
            headers["X-OpenTinker-Job"] = job
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        try:
            transport.write(f"GET {parts.path.rstrip('/')}/v1/stream HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
            await connection.opened
        except BaseException as error:
            transport.abort()
            if isinstance(error, UnavailableError):
                raise UnavailableError(f"the environment server {self.url}: {error.detail}", hint=error.hint) from error
            if isinstance(error, UnicodeEncodeError):
                raise InvalidRequestError("the token holds characters that no header can carry") from None
            raise
        return connection

    async def _keep(self) -> None:
        """Looks for requests that the server owes an answer, closes what nobody uses, and connects again while sessions are
        open: a server ends the sessions of a client that is gone."""
        connection = self._connection
        assert connection is not None
        try:
            while True:
                done, _ = await asyncio.wait([connection.gone], timeout=KEEP_S)
                now = time.monotonic()
                if done:
                    if self._users <= 0:
                        return
                    try:
                        connection = await self._connected(CONNECT_S)
                    except OpenTinkerError:
                        await asyncio.sleep(1.0)
                    continue
                self._expire(connection, now)
                if self._users <= 0 and not connection.pending and now - self._used > LINGER_S:
                    return
        finally:
            # Nothing here may keep the event loop in memory when it has ended.
            links = _links.get(asyncio.get_running_loop(), {})
            if links.get((self.url, self._token)) is self:
                del links[self.url, self._token]
            for one in (self._connection, connection):
                if one is not None:
                    one.close()
            self._connection = self._keeper = None

    def _expire(self, connection: _Connection, now: float) -> None:
        for number, one in list(connection.pending.items()):
            if one.future.done():
                if now > one.deadline + SILENT_S:
                    connection.pending.pop(number, None)
                continue
            if now > one.deadline + SILENT_S:
                connection.pending.pop(number, None)
                one.future.set_exception(
                    DeadlineError(f"the environment server {self.url} did not answer within {one.timeout_s:.3g} s")
                )
                if connection.heard < one.sent:
                    connection.abort()
                    return


_links: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], Link]]" = weakref.WeakKeyDictionary()


def link_to(url: str, token: str) -> Link:
    """The running event loop's way to a server."""
    links: dict[tuple[str, str], Any] = _links.setdefault(asyncio.get_running_loop(), {})
    link = links.get((url, token))
    if link is None:
        link = links[url, token] = Link(url, token)
    found: Link = link
    return found


def check_size(body: bytes) -> None:
    """Refuse what no server takes, before it is sent.

    Raises:
        TooLargeError: it is too large.
    """
    if len(body) > 32 * 2**20:
        raise TooLargeError(f"a request of {len(body):,} bytes is too large for any environment server")
