"""WebSocket (RFC 6455) without I/O, as much of it as binary messages need: both ends of the environments' stream use it.

Written here because a message costs a few microseconds this way, and because the light client has no WebSocket library.
"""

import base64
import hashlib
import os
import struct
from typing import Final

from opentinker.errors import InvalidRequestError, TooLargeError

BINARY: Final = 2
CLOSE: Final = 8
PING: Final = 9
PONG: Final = 10
_TEXT, _CONTINUATION = 1, 0
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def new_key() -> str:
    """A client's Sec-WebSocket-Key."""
    return base64.b64encode(os.urandom(16)).decode()


def accept_of(key: str) -> str:
    """The Sec-WebSocket-Accept that answers a key."""
    return base64.b64encode(hashlib.sha1(key.encode() + _MAGIC).digest()).decode()


def message(payload: bytes, *, masked: bool, opcode: int = BINARY) -> bytes:
    """One frame that is a whole message. Clients mask what they send, servers do not."""
    length = len(payload)
    mask_bit = 0x80 if masked else 0
    if length < 126:
        head = struct.pack("!BB", 0x80 | opcode, mask_bit | length)
    elif length < 2**16:
        head = struct.pack("!BBH", 0x80 | opcode, mask_bit | 126, length)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, mask_bit | 127, length)
    if not masked:
        return head + payload
    mask = os.urandom(4)
    return head + mask + _xor(payload, mask)


def _xor(payload: bytes, mask: bytes) -> bytes:
    length = len(payload)
    key = (mask * (length // 4 + 1))[:length]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(key, "little")).to_bytes(length, "little")


class MessageReader:
    """Cuts a stream into messages, joining fragments. `masked` says what the other side must do."""

    def __init__(self, *, masked: bool, max_bytes: int) -> None:
        self._masked = masked
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 2
        self._fragments: list[bytes] = []
        self._fragments_bytes = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """(opcode, payload) of the messages that `data` completes: BINARY, CLOSE, PING and PONG.

        Raises:
            InvalidRequestError: this is no WebSocket, or a text message.
            TooLargeError: a message is larger than allowed.
        """
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(self._parts)
            self._parts = []
        found: list[tuple[int, bytes]] = []
        at, end = 0, len(data)
        self._need = 2
        while end - at >= 2:
            head, second = data[at], data[at + 1]
            length, start = second & 0x7F, at + 2
            if head & 0x70 or bool(second & 0x80) != self._masked:
                raise InvalidRequestError("the stream is no WebSocket as it was agreed")
            if length >= 126:
                size = 2 if length == 126 else 8
                if end - start < size:
                    self._need = start - at + size
                    break
                length = int.from_bytes(data[start : start + size], "big")
                start += size
            if length + self._fragments_bytes > self._max_bytes:
                raise TooLargeError(f"a message has more than {self._max_bytes:,} bytes")
            if self._masked:
                start += 4
            stop = start + length
            if stop > end:
                self._need = stop - at
                break
            payload = data[start:stop]
            if self._masked:
                payload = _xor(payload, data[start - 4 : start])
            at = stop
            self._add(found, head & 0x0F, bool(head & 0x80), payload)
        if at < end:
            self._parts = [data[at:] if at else data]
        self._have = end - at
        return found

    def _add(self, found: list[tuple[int, bytes]], opcode: int, final: bool, payload: bytes) -> None:
        if opcode >= CLOSE:
            if not final or opcode > PONG or len(payload) > 125:
                raise InvalidRequestError("a control message is malformed")
            found.append((opcode, payload))
            return
        if opcode not in (BINARY, _CONTINUATION) or (opcode == _CONTINUATION) != bool(self._fragments):
            raise InvalidRequestError("only binary messages are understood" if opcode == _TEXT else "fragments out of order")
        if final and not self._fragments:
            found.append((BINARY, payload))
            return
        self._fragments.append(payload)
        self._fragments_bytes += len(payload)
        if final:
            found.append((BINARY, b"".join(self._fragments)))
            self._fragments, self._fragments_bytes = [], 0
