"""Tokens for servers that environments ask: from a file, or from a variable; never from a config, which is stored and shown."""

import os
from pathlib import Path

from opentinker.errors import ConfigError


def read_token(file: str | Path | None, variable: str) -> str:
    """The file's content, or what the variable holds if there is no file; "" if there is neither.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file is None:
        return os.environ.get(variable, "")
    try:
        return Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the environment's token file: {why}") from None


def no_token(where: str, variable: str) -> ConfigError:
    """What is said to somebody who wrote a token into a config."""
    return ConfigError(
        f"{where} is no place for a token: configs are stored and shown",
        hint=f"use token_file, or the variable {variable} (environment.secrets brings it to a submitted job)",
    )
