"""Users' secrets: kept encrypted, named by configs, and opened for one process only, the driver of their owner's job."""

import base64
import binascii
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from opentinker.config.requirements import SECRET_NAME
from opentinker.errors import ConfigError, ConflictError, InvalidRequestError, NotFoundError
from opentinker.scheduler.records import AuditEvent, Secret
from opentinker.scheduler.store import JobStore
from opentinker.scheduler.users import Caller

logger = logging.getLogger(__name__)
MAX_VALUE_BYTES = 8 * 2**10
"""All of a job's secrets together stay below the size up to which Ray sends an argument within its call, and so neither into
its object store nor onto a disk."""
MAX_SECRETS = 100
"""Of one user."""
_FORM = "v1:"
_NONCE_BYTES = 12
_NAME = re.compile(SECRET_NAME)


class Vault:
    """Values go in and never come back but by `values`. Methods run on the scheduler's event loop; those that the API calls are
    coroutines, because there may be a process between."""

    def __init__(self, store: JobStore, server_secret: str, now: Callable[[], float]) -> None:
        self._store = store
        self._key = _vault_key(server_secret)
        self._now = now

    async def put(self, by: Caller, name: str, value: str) -> dict[str, Any]:
        """Set a secret of the caller's, be it new or not.

        Raises:
            InvalidRequestError: a malformed name; a value that is empty, too long, or cannot be an environment variable's.
            ConflictError: the caller has `MAX_SECRETS` others.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{name[:80]!r} cannot be a secret's name", hint="up to 63 letters, digits and . _ -, no sign first"
            )
        _check_value(value)
        earlier = {secret.name: secret for secret in self._store.secrets(by.name)}
        if name not in earlier and len(earlier) >= MAX_SECRETS:
            raise ConflictError(f"you have {MAX_SECRETS} secrets already", hint="`opentinker secrets remove NAME` makes room")
        now = self._now()
        secret = Secret(
            id=f"{by.name}/{name}",
            owner=by.name,
            name=name,
            sealed=seal(self._key, by.name, name, value),
            created_at=earlier[name].created_at if name in earlier else now,
            updated_at=now,
        )
        self._store.save(secret, self._event(by, "secret.set", name))
        return _view(secret)

    async def names(self, owner: str) -> list[dict[str, Any]]:
        """The owner's secrets by name, without their values."""
        return [_view(secret) for secret in self._store.secrets(owner)]

    async def remove(self, by: Caller, name: str) -> None:
        """Raises: NotFoundError when the caller has no such secret."""
        if all(secret.name != name for secret in self._store.secrets(by.name)):
            raise NotFoundError(f"you have no secret {name[:80]!r}", hint="`opentinker secrets list` lists yours")
        self._store.remove_secret(f"{by.name}/{name}", self._event(by, "secret.remove", name))

    def check(self, owner: str, names: Iterable[str]) -> None:
        """Raises: ConfigError when the owner lacks one of the secrets that a config names."""
        there = {secret.name for secret in self._store.secrets(owner)}
        if missing := sorted(set(names) - there):
            raise ConfigError(
                f"environment.secrets: you have no secret {', '.join(map(repr, missing))}",
                hint="set it with " + " and ".join(f"`opentinker secrets set {name}`" for name in missing),
            )

    def values(self, owner: str, wanted: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """{environment variable: (secret's name, its value)} for {environment variable: secret's name}.

        Raises:
            ConfigError: one was removed meanwhile, or sealed under another server secret.
        """
        if not wanted:
            return {}
        self.check(owner, wanted.values())
        sealed = {secret.name: secret.sealed for secret in self._store.secrets(owner)}
        return {variable: (name, unseal(self._key, owner, name, sealed[name])) for variable, name in wanted.items()}

    def _event(self, by: Caller, action: str, name: str) -> AuditEvent:
        logger.info("event=%s actor=%s name=%s", action, by.name, name)
        return AuditEvent(self._now(), by.name, action, f"{by.name}/{name}", by.address)


def _vault_key(server_secret: str) -> bytes:
    """256 bits for AES, by HKDF-SHA256 (RFC 5869): not those that sign keys and tokens."""
    return HKDF(SHA256(), 32, salt=None, info=b"opentinker secrets").derive(bytes.fromhex(server_secret))


def seal(key: bytes, owner: str, name: str, value: str) -> str:
    """AES-256-GCM (SP 800-38D) with a random nonce. Owner and name are authenticated with it, so that a row that is copied to
    another owner or name does not open."""
    nonce = os.urandom(_NONCE_BYTES)
    return _FORM + base64.b64encode(nonce + AESGCM(key).encrypt(nonce, value.encode(), _whose(owner, name))).decode()


def unseal(key: bytes, owner: str, name: str, sealed: str) -> str:
    """What `seal` was given.

    Raises:
        ConfigError: it was sealed under another key, owner or name, or is damaged.
    """
    try:
        if not sealed.startswith(_FORM):
            raise ValueError("another form")
        content = base64.b64decode(sealed.removeprefix(_FORM), validate=True)
        return AESGCM(key).decrypt(content[:_NONCE_BYTES], content[_NONCE_BYTES:], _whose(owner, name)).decode()
    except (InvalidTag, ValueError, binascii.Error):
        raise ConfigError(
            f"the secret {name!r} cannot be opened: the scheduler's server_secret is another one, or the row is damaged",
            hint=f"set it again: `opentinker secrets set {name}`",
        ) from None


def _whose(owner: str, name: str) -> bytes:
    return f"{owner}\0{name}".encode()


def _check_value(value: str) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError("the secret's value is not Unicode") from None
    if not size or "\0" in value:
        raise InvalidRequestError("a secret's value is a text without NUL, and not empty")
    if size > MAX_VALUE_BYTES:
        raise InvalidRequestError(f"a secret's value may have {MAX_VALUE_BYTES} bytes, not {size}")


def _view(secret: Secret) -> dict[str, Any]:
    return {"name": secret.name, "created_at": secret.created_at, "updated_at": secret.updated_at}
