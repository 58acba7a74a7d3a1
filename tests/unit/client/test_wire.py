"""The wire format gives back exactly what was sent, and refuses what it does not know."""

import json

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from opentinker.client import wire
from opentinker.errors import InvalidRequestError

arrays = npst.arrays(
    dtype=st.sampled_from([np.int32, np.int64, np.float32, np.float64, np.uint8, np.bool_]),
    shape=npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5),
)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8)
trees = st.recursive(
    scalars | st.binary(max_size=8) | arrays,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=6), children, max_size=4),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@given(trees)
def test_msgpack_round_trip_is_exact(tree: object) -> None:
    assert same(tree, wire.unpack(wire.pack(tree)))


def test_big_endian_and_strided_arrays_arrive_with_the_same_values() -> None:
    big = np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2]
    np.testing.assert_array_equal(wire.unpack(wire.pack({"a": big}))["a"], [[0, 2], [3, 5]])


def test_json_is_accepted_and_answered() -> None:
    body = wire.loads(json.dumps({"tokens": [1, 2]}).encode(), "application/json; charset=utf-8")
    assert body == {"tokens": [1, 2]}
    assert json.loads(wire.dumps({"x": np.array([1.5], np.float32)}, wire.JSON)) == {"x": [1.5]}


@pytest.mark.parametrize("data", [b"\xc1", b"garbage", msgpack.packb([1]), msgpack.packb({"v": 1})])
def test_bytes_that_are_no_message_are_a_typed_error(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not an OpenTinker message"):
        wire.unpack(data)


def test_another_version_is_refused_with_a_hint() -> None:
    with pytest.raises(InvalidRequestError, match="same opentinker release"):
        wire.unpack(msgpack.packb({"v": 99, "body": None}))


@pytest.mark.parametrize("value", [np.array(["text"]), np.array([1 + 2j]), object()])
def test_what_cannot_travel_is_refused_by_the_sender(value: object) -> None:
    with pytest.raises(TypeError, match="travel"):
        wire.pack(value)
