"""Values as JSON, for clients without msgpack: an image is a data URL."""

import json
from typing import Any

from opentinker.errors import EnvironmentFailedError, InvalidRequestError
from opentinker.images import Image


def dumps(value: Any) -> bytes:
    """A value as JSON.

    Raises:
        EnvironmentFailedError: it holds what JSON cannot, such as NaN.
    """
    try:
        return json.dumps(value, default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailedError(
            f"the environment gave what JSON cannot hold: {error}",
            hint="tasks are JSON values: texts, finite numbers, lists, dicts",
        ) from error


def loads(body: bytes) -> dict[str, Any]:
    """A request's body, which must be an object.

    Raises:
        InvalidRequestError: it is not.
    """
    try:
        value = json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Image):
        return value.data_url()
    raise TypeError(f"a value of type {type(value).__name__} does not travel")
