"""Names given as `module:name`."""

import importlib
from typing import Any

from opentinker.errors import ConfigError


def load(path: str) -> Any:
    """The object that `module:name` names.

    Raises:
        ConfigError: there is no such module or name; an error inside the module is the cause.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot import '{path}': {error}") from error
