"""What is sent arrives, however the stream is cut."""

import asyncio
from typing import Any

import pytest
from hosted_environments import png
from hypothesis import given
from hypothesis import strategies as st

from opentinker.env import websocket
from opentinker.env.frames import Frame, FrameReader, batches, encode, error_of, pack, problem_body, unpack
from opentinker.env.ring import Ring
from opentinker.errors import (
    DeadlineError,
    EnvironmentFailedError,
    InvalidRequestError,
    RateLimitedError,
    TooLargeError,
)
from opentinker.images import Image

FRAMES = st.builds(
    Frame,
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
    st.floats(0, 1e6, width=32),
    st.binary(max_size=300),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in [*pieces, data] if piece]


@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(1, 400), max_size=20))
def test_frames_arrive_as_they_were_sent(frames: list[Frame], sizes: list[int]) -> None:
    reader = FrameReader()
    stream = b"".join(encode(*frame) for frame in frames)
    assert [frame for piece in cut(stream, sizes) for frame in reader.feed(piece)] == frames


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no frame"):
        FrameReader().feed(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n")


@given(JSON)
def test_json_values_travel_whatever_their_size_and_characters(value: Any) -> None:
    assert unpack(pack(value)) == value


def test_images_travel_as_they_are() -> None:
    message = {"role": "user", "content": [{"type": "image", "image": Image(png(3))}]}
    assert unpack(pack([message])) == [message]


@pytest.mark.parametrize("value", [object(), {"x": {1, 2}}, [lambda: 1]])
def test_what_cannot_travel_is_named(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"the task cannot be sent: a value of type \w+ does not travel"):
        pack(value, "the task")


def test_a_value_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        pack(endless)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x92\x01", b"\xc7\x01\x05x", b"\xc7\x02\x01no"])
def test_what_is_no_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not what this protocol sends"):
        unpack(body)


def test_errors_travel_with_their_text() -> None:
    for error in (
        EnvironmentFailedError("x raised", hint="look"),
        DeadlineError("late"),
        RateLimitedError("full", retry_after_s=7.0),
    ):
        again = error_of(problem_body(error))
        assert (type(again), again.detail, again.hint) == (type(error), error.detail, error.hint)
    assert isinstance(again, RateLimitedError)
    assert again.retry_after_s == 7.0


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 100))
def test_pieces_hold_every_frame_in_order(frames: list[bytes], size: int) -> None:
    pieces = list(batches(frames, size))
    assert b"".join(pieces) == b"".join(frames)
    longest = max(map(len, frames), default=0)
    assert all(len(piece) <= max(size, longest) for piece in pieces)


@given(st.lists(st.binary(max_size=70_000), max_size=4), st.lists(st.integers(1, 90_000), max_size=12), st.booleans())
def test_messages_arrive_masked_or_not(payloads: list[bytes], sizes: list[int], masked: bool) -> None:
    reader = websocket.MessageReader(masked=masked, max_bytes=100_000)
    stream = b"".join(websocket.message(payload, masked=masked) for payload in payloads)
    found = [one for piece in cut(stream, sizes) for one in reader.feed(piece)]
    assert found == [(websocket.BINARY, payload) for payload in payloads]


def test_fragments_are_joined_around_control_messages() -> None:
    reader = websocket.MessageReader(masked=False, max_bytes=100)
    ping = websocket.message(b"?", masked=False, opcode=websocket.PING)
    stream = bytes([0x02, 2]) + b"ab" + ping + bytes([0x00, 1]) + b"c" + bytes([0x80, 1]) + b"d"
    assert reader.feed(stream) == [(websocket.PING, b"?"), (websocket.BINARY, b"abcd")]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x82\x01x", InvalidRequestError),  # not masked
        (b"\x81\x81aaaax", InvalidRequestError),  # text
        (b"\xf2\x81aaaax", InvalidRequestError),  # reserved bits
        (b"\x80\x81aaaax", InvalidRequestError),  # a continuation of nothing
        (b"\x82\xfe\xff\xffaaaa", TooLargeError),
        (b"\x82\xff\xff\xff\xff\xff\xff\xff\xff\xff", TooLargeError),
    ],
)
def test_what_breaks_the_agreement_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        websocket.MessageReader(masked=True, max_bytes=1000).feed(data)


def test_the_handshake_is_that_of_the_standard() -> None:
    assert websocket.accept_of("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


async def test_another_library_understands_our_messages() -> None:
    websockets = pytest.importorskip("websockets.asyncio.server")

    async def echo(connection: Any) -> None:
        async for text in connection:
            await connection.send(text)

    async with websockets.serve(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        key = websocket.new_key()
        writer.write(
            f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            f"Sec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert websocket.accept_of(key).encode() in head
        payloads = [b"", b"x" * 125, b"y" * 126, b"z" * 70_000]
        messages = websocket.MessageReader(masked=False, max_bytes=10**6)
        for payload in payloads:
            writer.write(websocket.message(payload, masked=True))
        found: list[bytes] = []
        while len(found) < len(payloads):
            found += [payload for _, payload in messages.feed(await reader.read(2**16))]
        assert found == payloads
        writer.close()


URLS = [f"http://host-{i}:1" for i in range(5)]


@given(st.binary(min_size=16, max_size=16))
def test_a_server_that_goes_moves_only_its_own_sessions(key: bytes) -> None:
    whole, less = Ring(URLS), Ring(URLS[:-1])
    if (first := whole.order(key, 0.0)[0]) != URLS[-1]:
        assert less.order(key, 0.0)[0] == first
    assert sorted(whole.order(key, 0.0)) == sorted(URLS)


def test_sessions_are_spread_evenly() -> None:
    ring = Ring(URLS)
    counts = dict.fromkeys(URLS, 0)
    for i in range(5000):
        counts[ring.order(i.to_bytes(16, "big"), 0.0)[0]] += 1
    assert all(500 < count < 1700 for count in counts.values()), counts


def test_a_dead_server_comes_last_until_its_pause_is_over_which_grows() -> None:
    ring = Ring(URLS)
    first = ring.order(b"key", 0.0)[0]
    ring.failed(first, 0.0)
    assert ring.order(b"key", 0.5)[-1] == first
    assert ring.order(b"key", 1.5)[0] == first
    ring.failed(first, 1.5)
    assert ring.order(b"key", 3.0)[-1] == first
    ring.answered(first)
    assert ring.order(b"key", 3.0)[0] == first
