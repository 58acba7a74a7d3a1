"""Tokens of the further policies of a server: derived from the token of the job's own policy, so that whoever knows that one
(the server's front, and the scheduler whose proxy passes requests on) can tell a right one without keeping any."""

import base64
import hashlib
import hmac
from collections.abc import Iterable

PREFIX = "otp-"
"""What all policy tokens begin with."""


def further_token(parent: str, policy: str) -> str:
    """The token of a policy that was created beside the one of `parent`. `policy` names it for good: no two policies of a
    server may have had the same. HMAC-SHA256 (RFC 2104), so it tells nothing of `parent`."""
    mac = hmac.digest(parent.encode(), f"further-policy\0{policy}".encode(), hashlib.sha256)
    return f"{PREFIX}{base64.urlsafe_b64encode(mac).decode().rstrip('=')}.{policy}"


def parent_of(token: str, parents: Iterable[str]) -> str | None:
    """Of which of these tokens a further policy's was derived; None if of none."""
    _, dot, policy = token.partition(".")
    if not dot:
        return None
    presented = token.encode("utf-8", "replace")
    found = [parent for parent in parents if hmac.compare_digest(presented, further_token(parent, policy).encode())]
    return found[0] if found else None
