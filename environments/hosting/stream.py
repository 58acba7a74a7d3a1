"""The server's end of a stream: one WebSocket over which a client sends the requests of all its sessions."""

import asyncio
import itertools
import json
import socket
from collections.abc import Callable
from typing import Any, cast

from opentinker.env.frames import Frame, FrameReader, batches, encode
from opentinker.env.websocket import CLOSE, PING, PONG, MessageReader, accept_of, message
from opentinker.environments.hosting.auth import Token
from opentinker.environments.hosting.hub import Hub
from opentinker.errors import InvalidRequestError, NotFoundError, OpenTinkerError, TooLargeError

PATH = "/v1/stream"
MAX_MESSAGE_BYTES = 64 * 2**20
WRITE_BYTES = 2**20
_numbers = itertools.count(1)


class Stream(asyncio.Protocol):
    """One connection, from its handshake on. uvicorn hands it over when it asks to become a WebSocket."""

    def __init__(self, hub: Hub, token: Token, connections: set[Any]) -> None:
        self._hub = hub
        self._token = token
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._messages = MessageReader(masked=True, max_bytes=MAX_MESSAGE_BYTES)
        self._frames = FrameReader()
        self._out: list[bytes] = []
        self._open = False
        self._client = ""
        self._job = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports derive from none of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        if (raw := transport.get_extra_info("socket")) is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        assert transport is not None
        try:
            if not self._open:
                self._handshake(data)
                return
            for opcode, payload in self._messages.feed(data):
                if opcode == PING:
                    transport.write(message(payload, masked=False, opcode=PONG))
                elif opcode == CLOSE:
                    transport.write(message(payload[:2], masked=False, opcode=CLOSE))
                    transport.close()
                    return
                elif opcode != PONG:
                    for frame in self._frames.feed(payload):
                        self._hub.handle(frame, self._job, self._client, self._reply(frame))
        except OpenTinkerError as error:
            code = 1009 if isinstance(error, TooLargeError) else 1002
            transport.write(message(code.to_bytes(2, "big") + error.detail.encode()[:100], masked=False, opcode=CLOSE))
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        if self._open:
            self._open = False
            self._hub.disconnected(self._client)

    def pause_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def shutdown(self) -> None:
        """Say goodbye; uvicorn calls this when the server ends."""
        if self._transport is not None:
            self._transport.write(message((1001).to_bytes(2, "big"), masked=False, opcode=CLOSE))
            self._transport.close()

    def _handshake(self, request: bytes) -> None:
        transport = self._transport
        assert transport is not None
        line, *lines = request.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
        try:
            path = line.split(" ")[1].partition("?")[0]
            self._token.check(headers.get("authorization", ""))
            if path != PATH:
                raise NotFoundError(f"there is no {path} here", hint=f"the stream is at {PATH}")
            key = headers.get("sec-websocket-key", "")
            if not key or headers.get("sec-websocket-version") != "13":
                raise InvalidRequestError("only WebSockets of version 13 are understood")
        except OpenTinkerError as error:
            body = json.dumps(error.to_problem()).encode()
            transport.write(
                f"HTTP/1.1 {error.status} {type(error).__name__}\r\ncontent-type: application/problem+json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            transport.close()
            return
        self._job = headers.get("x-opentinker-job", "")[:200]
        self._client = headers.get("x-opentinker-client", "")[:200] or f"stream-{next(_numbers)}"
        self._open = True
        self._hub.connected(self._client)
        transport.write(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept_of(key)}\r\n\r\n".encode()
        )

    def _reply(self, frame: Frame) -> Callable[[int, bytes], None]:
        op, index, request, session = frame.op, frame.turn, frame.request, frame.session

        def reply(kind: int, body: bytes) -> None:
            if not self._out:
                self._loop.call_soon(self._flush)
            self._out.append(encode(op, kind, index, request, session, 0.0, body))

        return reply

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._open and self._transport is not None and not self._transport.is_closing():
            for piece in batches(out, WRITE_BYTES):
                self._transport.write(message(piece, masked=False))
