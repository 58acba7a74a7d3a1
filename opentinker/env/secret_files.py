"""Tokens for servers that environments ask: from a file, or from a variable; never from a config, which is stored and shown."""

import os
from pathlib import Path

from opentinker.errors import ConfigError

REMOTE_VARIABLE = "OPENTINKER_ENV_TOKEN"
OPENENV_VARIABLE = "OPENENV_TOKEN"
TOKEN_VARIABLES = {"http://": REMOTE_VARIABLE, "https://": REMOTE_VARIABLE, "openenv:": OPENENV_VARIABLE}
"""How names of environments begin that are on a server, and the variable with its token."""


class TokenFileError(ConfigError):
    """The file with a token cannot be read here; it may be on the machine where a job runs."""


def read_token(file: str | Path | None, variable: str) -> str:
    """The file's content, or what the variable holds if there is no file; "" if there is neither.

    Raises:
        TokenFileError: the file cannot be read.
    """
    if file is None:
        return os.environ.get(variable, "")
    try:
        return Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TokenFileError(f"cannot read the environment's token file: {why}") from None


def no_token(where: str, variable: str) -> ConfigError:
    """What is said to somebody who wrote a token into a config."""
    return ConfigError(
        f"{where} is no place for a token: configs are stored and shown",
        hint=f"use token_file, or the variable {variable} (environment.secrets brings it to a submitted job)",
    )
