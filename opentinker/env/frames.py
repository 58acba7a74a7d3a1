"""What travels between an environment's caller, its server and its worker processes: a fixed header and a msgpack body.

Whoever only forwards a frame reads its header and leaves the body as it is.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgpack

from opentinker.errors import InvalidRequestError, OpenTinkerError, RateLimitedError, TooLargeError, from_problem

HELLO: Final = 0
"""A worker is ready, or says why it is not."""
RESET: Final = 1
STEP: Final = 2
FINALIZE: Final = 3
CLOSE: Final = 4
TASKS: Final = 5
INFO: Final = 6
RETIRE: Final = 7
"""A worker asks to get no new sessions."""

NAMES: Final = {RESET: "reset", STEP: "step", FINALIZE: "finalize", CLOSE: "close", TASKS: "task_source"}
"""What the environment calls them."""

OK: Final = 0
DONE: Final = 1
"""Of a step: it ended the episode."""
ERROR: Final = 2
"""The body is a problem document."""

NO_SESSION: Final = bytes(16)
_HEADER = struct.Struct("<IBBIQ16sf")
HEADER_BYTES = _HEADER.size
_LENGTH_BYTES = 4
_IMAGE, _BIG_INT = 1, 2
MAX_ANSWER_BYTES = 64 * 2**20
"""Of an observation with its images, or of a list of tasks."""
MAX_BODY_HINT = "on the server, `opentinker env serve --max-body BYTES` allows more"
MAX_FRAME_BYTES = 256 * 2**20
"""A length beyond this is no frame but an accident."""


class Frame(NamedTuple):
    """One request or answer. `turn` counts a session's steps, `request` is the sender's own number for it, and `timeout_s` is
    how long the call may take (0: the receiver sees to that)."""

    op: int
    kind: int
    turn: int
    request: int
    session: bytes
    timeout_s: float
    body: bytes


def encode(op: int, kind: int, turn: int, request: int, session: bytes, timeout_s: float, body: bytes) -> bytes:
    """A frame as bytes."""
    return _HEADER.pack(HEADER_BYTES - _LENGTH_BYTES + len(body), op, kind, turn, request, session, timeout_s) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._have = 0
        self._need = HEADER_BYTES

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes.

        Raises:
            InvalidRequestError: the bytes are no frames.
        """
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(self._parts)
            self._parts = []
        frames, at, end = [], 0, len(data)
        self._need = HEADER_BYTES
        while end - at >= HEADER_BYTES:
            length, op, kind, turn, request, session, timeout_s = _HEADER.unpack_from(data, at)
            if not HEADER_BYTES - _LENGTH_BYTES <= length <= MAX_FRAME_BYTES:
                raise InvalidRequestError("the stream holds something that is no frame")
            stop = at + _LENGTH_BYTES + length
            if stop > end:
                self._need = _LENGTH_BYTES + length
                break
            frames.append(Frame(op, kind, turn, request, session, timeout_s, data[at + HEADER_BYTES : stop]))
            at = stop
        if at < end:
            self._parts = [data[at:] if at else data]
        self._have = end - at
        return frames


def pack(value: Any, what: str = "this") -> bytes:
    """A JSON-like value, images included, as msgpack.

    Raises:
        InvalidRequestError: it holds something that does not travel, which the detail names.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_encode, unicode_errors="surrogatepass")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"{what} cannot be sent: {error}", hint="use text, numbers, lists and dicts") from error
    return packed


def unpack(body: bytes) -> Any:
    """The value of a body.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        return msgpack.unpackb(body, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass")
    except Exception as error:  # msgpack raises many kinds for what others send
        raise InvalidRequestError(f"the body is not what this protocol sends: {error}") from error


def problem_body(error: OpenTinkerError) -> bytes:
    """An error as a frame's body."""
    problem = error.to_problem()
    if isinstance(error, RateLimitedError):
        problem["retry_after_s"] = error.retry_after_s
    return pack(problem)


def error_of(body: bytes) -> OpenTinkerError:
    """The error in a frame's body."""
    problem = unpack(body)
    if not isinstance(problem, dict):
        return InvalidRequestError("the answer is an error without a problem document")
    error = from_problem(problem)
    if isinstance(error, RateLimitedError):
        error.retry_after_s = float(problem.get("retry_after_s", error.retry_after_s))
    return error


def batches(frames: list[bytes], size: int) -> Iterator[bytes]:
    """Frames joined to pieces of about `size` bytes; a larger frame is a piece of its own."""
    if sum(map(len, frames)) <= size:
        yield b"".join(frames)
        return
    piece: list[bytes] = []
    total = 0
    for frame in frames:
        if piece and total + len(frame) > size:
            yield b"".join(piece)
            piece, total = [], 0
        piece.append(frame)
        total += len(frame)
    if piece:
        yield b"".join(piece)


def check_size(body: bytes, limit: int, what: str) -> None:
    """Refuse what is too large.

    Raises:
        TooLargeError: it is.
    """
    if len(body) > limit:
        raise TooLargeError(f"{what} has {len(body):,} bytes; the limit is {limit:,}", hint=MAX_BODY_HINT)


def _encode(value: Any) -> Any:
    # Imported here: text environments need no image code.
    from opentinker.images import Image

    if isinstance(value, Image):
        return msgpack.ExtType(_IMAGE, value.data)
    if isinstance(value, int):  # beyond 64 bits
        return msgpack.ExtType(_BIG_INT, str(value).encode())
    if hasattr(value, "item") and callable(value.item) and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__} does not travel")


def _decode(code: int, data: bytes) -> Any:
    if code == _IMAGE:
        from opentinker.images import Image

        return Image(data)
    if code == _BIG_INT:
        return int(data)
    raise ValueError(f"unknown extension type {code}")
