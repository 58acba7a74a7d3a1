"""Rows of datasets as JSON values, so that a task can be logged, and sent to an environment elsewhere."""

import math
from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from opentinker.errors import ConfigError
from opentinker.images import Image

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


class JsonRows(Sequence[Any]):
    """Rows whose values become JSON when they are read, so that a large dataset stays on disk."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return {name: json_value(value, name) for name, value in self._rows[index].items()}


def json_value(value: Any, name: str = "a value") -> Any:
    """An image (decoded, encoded, or {"bytes": ..., "path": ...} as `datasets` keeps it) becomes a data URL, a date or a
    decimal number its text. What is not there is None: a number that is NaN or infinite, which JSON does not have, and an
    image without bytes and path.

    Raises:
        ConfigError: it is bytes that are no image.
    """
    match value:
        case {"bytes": None, "path": None, **rest} if not rest:
            return None
        case {"bytes": encoded, "path": path, **rest} if not rest:
            value = encoded if encoded is not None else Path(str(path))
        case Mapping():
            return {str(key): json_value(inner, name) for key, inner in value.items()}
        case list() | tuple():
            return [json_value(inner, name) for inner in value]
        case date() | time() | timedelta() | Decimal():  # a datetime is a date
            return str(value)
        case float() if not math.isfinite(value):
            return None
    is_picture = callable(getattr(value, "save", None)) and hasattr(value, "mode")
    if not is_picture and not isinstance(value, bytes | Path | Image):
        return value
    if is_picture and value.mode not in _PNG_MODES:
        value = value.convert("RGB")
    try:
        return Image.of(value).data_url()
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"column '{name}' holds what no task can: {error}", hint="encode images as PNG, JPEG or WebP, other bytes as text"
        ) from error
