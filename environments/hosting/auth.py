"""The token that opens an environment server."""

import hmac
import secrets
from pathlib import Path

from opentinker.errors import AuthenticationError, ConfigError

SHORTEST = 16


class Token:
    """One secret, shown by clients as `Authorization: Bearer ...`."""

    def __init__(self, value: str) -> None:
        self._value = value.encode()

    @classmethod
    def from_file(cls, path: Path) -> "Token":
        """The file's content.

        Raises:
            ConfigError: it cannot be read, or is too short to be a secret.
        """
        try:
            value = path.expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"cannot read the token file: {why}", hint="--token-file takes a file's name") from None
        if len(value) < SHORTEST or not value.isascii() or not value.isprintable() or " " in value:
            raise ConfigError(
                f"the token file holds no usable token: {SHORTEST} or more characters of ASCII without spaces",
                hint="such as the output of `openssl rand -hex 32`",
            )
        return cls(value)

    @classmethod
    def generate(cls) -> tuple["Token", str]:
        """A new one, and its text to be shown once."""
        value = f"ote-{secrets.token_urlsafe(32)}"
        return cls(value), value

    @property
    def value(self) -> str:
        """The secret itself, for a server that is its own client."""
        return self._value.decode()

    def check(self, header: str) -> None:
        """Look at an Authorization header, in constant time.

        Raises:
            AuthenticationError: it does not hold the token.
        """
        scheme, _, given = header.partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._value)
        if scheme.lower() != "bearer" or not right:
            raise AuthenticationError(
                "this environment server needs its token" if not given else "that is not this environment server's token",
                hint="give it as OPENTINKER_ENV_TOKEN, or as token_file",
            )
