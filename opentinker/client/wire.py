"""The wire format between client and server: msgpack with raw little-endian arrays, versioned; JSON is accepted too.

A message is a tree of dicts, lists, scalars, bytes and numpy arrays. In msgpack an array is an extension type holding
(dtype, shape, raw little-endian bytes); in JSON it is a (nested) list.
"""

import json
from typing import Any

import msgpack
import numpy as np

from opentinker.errors import InvalidRequestError

WIRE_VERSION = 1
MSGPACK = "application/msgpack"
JSON = "application/json"
_ARRAY = 1
_DTYPES = frozenset({"<i4", "<i8", "<f4", "<f8", "<u2", "<u4", "|u1", "|b1", "|i1"})


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        if array.dtype.str not in _DTYPES:
            raise TypeError(f"arrays of dtype {array.dtype} do not travel")
        return msgpack.ExtType(_ARRAY, msgpack.packb((array.dtype.str, value.shape, array.tobytes())))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not travel")


def _decode(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension type {code}")
    dtype, shape, raw = msgpack.unpackb(data)
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def pack(body: Any) -> bytes:
    """Encode a message as msgpack."""
    packed: bytes = msgpack.packb({"v": WIRE_VERSION, "body": body}, default=_encode)
    return packed


def unpack(data: bytes) -> Any:
    """Decode a msgpack message; arrays are read-only views.

    Raises:
        InvalidRequestError: the bytes are not a message of this version.
    """
    try:
        message = msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False)
        version, body = message["v"], message["body"]
    except Exception as error:
        raise InvalidRequestError(f"not an OpenTinker message: {error}") from error
    if version != WIRE_VERSION:
        raise InvalidRequestError(
            f"wire version {version} is not spoken here (this side speaks {WIRE_VERSION})",
            hint="install the same opentinker release on client and cluster",
        )
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not travel")


def dumps(body: Any, content_type: str) -> bytes:
    """Encode for a content type: msgpack, or JSON for everything else."""
    return pack(body) if content_type.startswith(MSGPACK) else json.dumps(body, default=_plain).encode()


def loads(data: bytes, content_type: str) -> Any:
    """Decode a body by its content type. An empty body is an empty dict.

    Raises:
        InvalidRequestError: it cannot be decoded.
    """
    if not data:
        return {}
    if content_type.startswith(MSGPACK):
        return unpack(data)
    try:
        return json.loads(data)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
