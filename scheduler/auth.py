"""API keys and policy tokens. The store never sees a key, and no log line does."""

import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable

from opentinker.errors import AuthenticationError, OpenTinkerError, RateLimitedError
from opentinker.scheduler.records import ApiKey

KEY_BYTES = 32
logger = logging.getLogger(__name__)


def new_api_key() -> str:
    """256 random bits."""
    return f"ot-{secrets.token_urlsafe(KEY_BYTES)}"


def new_server_secret() -> str:
    """256 random bits, hexadecimal."""
    return secrets.token_hex(KEY_BYTES)


def _mac(secret: str, purpose: str, text: str) -> bytes:
    """HMAC-SHA256 (RFC 2104); `purpose` keeps a key's digest from ever being a policy's token."""
    return hmac.digest(bytes.fromhex(secret), f"{purpose}\0{text}".encode("utf-8", "surrogateescape"), hashlib.sha256)


def key_digest(secret: str, key: str) -> str:
    """What the store keeps of an API key."""
    return _mac(secret, "api-key", key).hex()


def policy_token(secret: str, policy_id: str) -> str:
    """The bearer token of a policy: 256 bits that nobody can tell from random ones without the server's secret. Derived, so
    that it needs no place in the store and is the same after a restart."""
    return "otp-" + base64.urlsafe_b64encode(_mac(secret, "policy-token", policy_id)).decode().rstrip("=")


def find_key(secret: str, presented: str, by_digest: Callable[[str], ApiKey | None]) -> ApiKey:
    """The stored key that was presented. The look-up is by the digest, which nobody can choose without the server's secret, so
    its timing tells nothing; the comparison takes the same time however much matches.

    Raises:
        AuthenticationError: there is none, or it is revoked. The message is the same whatever was presented.
    """
    digest = key_digest(secret, presented)
    key = by_digest(digest)
    if key is None or not hmac.compare_digest(digest, key.digest) or key.revoked_at is not None:
        raise unauthenticated()
    return key


def without_details(error: OpenTinkerError) -> OpenTinkerError:
    """The error as somebody without a valid key may see it: what a database says of itself is not for everybody."""
    if isinstance(error, AuthenticationError | RateLimitedError):
        return error
    logger.error("event=not_authenticated error=%r", str(error))
    return type(error)(
        "the scheduler cannot check keys at the moment: it is restarting, or its store is away",
        hint="try again in a few seconds",
    )


def unauthenticated() -> AuthenticationError:
    """One answer for a missing, malformed or wrong key."""
    return AuthenticationError("a valid API key is needed", hint="send 'Authorization: Bearer <api key>'")
