"""Users and their keys: who somebody is, what they may do, and what was done about it."""

import hmac
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opentinker.errors import (
    AuthenticationError,
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    RateLimitedError,
    StorageError,
    UnavailableError,
)
from opentinker.scheduler.auth import find_key, key_digest, new_api_key, unauthenticated
from opentinker.scheduler.limits import LoginLimiter
from opentinker.scheduler.records import ApiKey, AuditEvent, Record, Scope, User
from opentinker.scheduler.settings import MIN_SHARE
from opentinker.scheduler.store import JobStore

logger = logging.getLogger(__name__)
ADMIN = "admin"
"""The user whose key lies in the state folder."""
EMBEDDED_KEY = "embedded"
EVERYONE = "*"
"""In the place of an owner: jobs of all users. No user can be called that."""
LAST_USED_EVERY_S = 60.0
MAX_AUDIT_ROWS = 1000
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,62}")
_MARK_S = 60.0


@dataclass(frozen=True)
class Caller:
    """Who sends a request: a user, with what both the user's and the key's scopes allow."""

    name: str
    scopes: frozenset[Scope]
    address: str = ""

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    def may(self, scope: Scope) -> bool:
        """An admin may everything; whoever may submit may read."""
        return self.is_admin or scope in self.scopes or (scope is Scope.READ and Scope.SUBMIT in self.scopes)

    def need(self, scope: Scope) -> None:
        """Raises: ForbiddenError when the scope is missing."""
        if not self.may(scope):
            raise ForbiddenError(
                f"this needs a key with the scope '{scope}'",
                hint="an administrator can give you one: `opentinker users add-key`",
            )


class UserDirectory:
    """Methods that change something write an audit event in the same transaction. All run on the scheduler's event loop;
    those that the API calls are coroutines, because there may be a process between.

    Raises (all methods but `authenticate`): NotFoundError for a user or key that does not exist.
    """

    def __init__(self, store: JobStore, secret: str, now: Callable[[], float], steady: Callable[[], float]) -> None:
        """`now` is Unix time, for records; `steady` is a clock that nobody sets, for limits."""
        self._store = store
        self._secret = secret
        self._now = now
        self._steady = steady
        self._limiter = LoginLimiter(steady())
        self._marked_at = float("-inf")

    def ensure_admin(self, key: str) -> None:
        """Make sure that `key` is valid and an administrator's, whatever the store holds."""
        user = self._store.user(ADMIN) or User(ADMIN, frozenset({Scope.ADMIN}), created_at=self._now())
        digest = key_digest(self._secret, key)
        earlier = self._store.api_key(EMBEDDED_KEY)
        if earlier is None or earlier.digest != digest or earlier.revoked_at is not None:
            earlier = ApiKey(EMBEDDED_KEY, ADMIN, EMBEDDED_KEY, frozenset({Scope.ADMIN}), digest, self._now())
        self._store.save(replace(user, scopes=user.scopes | {Scope.ADMIN}, disabled=False), earlier)

    def authenticate(self, key: str, address: str = "") -> Caller:
        """The user who presents a key.

        Raises:
            AuthenticationError: it is not valid: unknown, revoked, or of a disabled user.
            RateLimitedError: too many wrong keys came from this address.
        """
        fingerprint = self._fingerprint(key, address)
        try:
            found = find_key(self._secret, key, self._store.api_key_by_digest)
            user = self._store.user(found.owner)
            if user is None or user.disabled:
                raise unauthenticated()
        except AuthenticationError:
            self._wrong_key(address, fingerprint)
            raise
        self._limiter.succeeded(address, fingerprint)
        self._used(found)
        return Caller(user.name, _allowed(user, found), address)

    def check_token(self, token: str, right: Sequence[str], address: str) -> None:
        """Hold a policy's token against the right ones. Guesses count like those of keys.

        Raises:
            AuthenticationError: it is another.
            RateLimitedError: too many wrong ones came from this address.
        """
        fingerprint = self._fingerprint(token, address)
        if not any(hmac.compare_digest(token.encode("utf-8", "replace"), one.encode()) for one in right):
            self._wrong_key(address, fingerprint)
            raise unauthenticated()
        self._limiter.succeeded(address, fingerprint)

    async def add(self, by: Caller, name: str, scopes: list[str], limits: dict[str, Any]) -> dict[str, Any]:
        """Create a user with a first key: {"user", "key"}. The key's secret is in this answer and nowhere else. `limits` may
        hold `share`, `max_gpus` and `max_jobs`.

        Raises:
            InvalidRequestError: a malformed name, an unknown scope, a negative number.
            ConflictError: there is a user of that name.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{name[:80]!r} cannot be a user's name", hint="up to 63 lower-case letters, digits and . _ -, no sign first"
            )
        if self._store.user(name) is not None:
            raise ConflictError(f"there is already a user {name!r}", hint=f"`opentinker users keys {name}` lists their keys")
        user = _changed(User(name, _scopes(scopes), created_at=self._now()), **limits)
        key, secret = self._new_key(name, "default", user.scopes)
        self._save(by, "user.add", name, user, key)
        return {"user": _user_view(user), "key": {**_key_view(key), "key": secret}}

    async def users(self) -> list[dict[str, Any]]:
        return [_user_view(user) for user in self._store.users()]

    async def change(self, by: Caller, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        """Change a user's `scopes`, `share`, `max_gpus`, `max_jobs` or `disabled`; the changed user.

        Raises:
            InvalidRequestError: an unknown scope or a negative number.
            ConflictError: administrators would lock themselves out.
        """
        user = self._user(name)
        changes = {**changes, **({"scopes": _scopes(changes["scopes"])} if "scopes" in changes else {})}
        changed = _changed(user, **changes)
        if name in (by.name, ADMIN) and (
            changed.disabled or (Scope.ADMIN in user.scopes and Scope.ADMIN not in changed.scopes)
        ):
            raise ConflictError(f"{name!r} must stay an administrator", hint="otherwise nobody might be able to undo it")
        what = ",".join(f"{field}={_text(value)}" for field, value in sorted(changes.items()))
        self._save(by, "user.change", f"{name} {what}", changed)
        return _user_view(changed)

    async def keys(self, name: str) -> list[dict[str, Any]]:
        """All keys of a user, revoked ones too, without their secrets."""
        return [_key_view(key) for key in self._store.api_keys(self._user(name).name)]

    async def add_key(self, by: Caller, name: str, label: str, scopes: list[str] | None = None) -> dict[str, Any]:
        """Another key for a user, by default with all of the user's scopes. Its secret is in this answer and nowhere else.

        Raises:
            InvalidRequestError: a malformed label, an unknown scope, or one that the user does not have.
        """
        user = self._user(name)
        if not _LABEL.fullmatch(label):
            raise InvalidRequestError(f"{label[:80]!r} cannot be a key's name", hint="up to 63 letters, digits and . _ @ -")
        wanted = user.scopes if scopes is None else _scopes(scopes)
        owner = Caller(name, user.scopes)
        if missing := [scope for scope in sorted(wanted) if not owner.may(scope)]:
            raise InvalidRequestError(
                f"user {name!r} does not have the scope {', '.join(missing)}",
                hint="`opentinker users set` changes a user's scopes",
            )
        key, secret = self._new_key(name, label, wanted)
        self._save(by, "key.add", f"{name}/{key.id}", key)
        return {**_key_view(key), "key": secret}

    async def revoke_key(self, by: Caller, name: str, key_id: str) -> dict[str, Any]:
        """Make a key invalid at once and for ever; a revoked one stays as it is.

        Raises:
            ConflictError: the key in the state folder.
        """
        key = self._key(name, key_id)
        if key.revoked_at is None:
            key = replace(key, revoked_at=self._now())
            self._save(by, "key.revoke", f"{name}/{key_id}", key)
        return _key_view(key)

    async def rotate_key(self, by: Caller, name: str, key_id: str) -> dict[str, Any]:
        """Replace a key by a new one of the same name and scopes; the old one is invalid at once.

        Raises:
            ConflictError: it is revoked, or the key in the state folder.
        """
        old = self._key(name, key_id)
        if old.revoked_at is not None:
            raise ConflictError(f"key {key_id!r} is revoked", hint=f"`opentinker users add-key {name}` makes a new one")
        new, secret = self._new_key(name, old.name, old.scopes)
        self._save(by, "key.rotate", f"{name}/{key_id} -> {new.id}", replace(old, revoked_at=self._now()), new)
        return {**_key_view(new), "key": secret}

    async def audit(self, limit: int) -> list[dict[str, Any]]:
        """The newest audit events, newest first."""
        events = self._store.audit(min(limit, MAX_AUDIT_ROWS))
        return [{name: getattr(event, name) for name in AuditEvent.__dataclass_fields__} for event in events]

    def note(self, by: Caller, action: str, target: str, outcome: str = "ok") -> None:
        """An audit event of something that was done elsewhere."""
        self._store.save(AuditEvent(self._now(), by.name, action, target, by.address, outcome))

    def _save(self, by: Caller, action: str, target: str, *records: Record) -> None:
        self._store.save(*records, AuditEvent(self._now(), by.name, action, target[:200], by.address))
        logger.info("event=%s actor=%s target=%r", action, by.name, target)

    def _fingerprint(self, key: str, address: str) -> str:
        """Of what is presented. Raises: RateLimitedError when this address may not try now."""
        fingerprint = key_digest(self._secret, key)
        wait_s = self._limiter.wait_s(address, fingerprint, self._steady())
        if wait_s > 0.0:
            raise RateLimitedError(
                "too many wrong API keys from this address", hint=f"try again in {wait_s:.0f} s", retry_after_s=wait_s
            )
        return fingerprint

    def _wrong_key(self, address: str, fingerprint: str) -> None:
        now = self._steady()
        few = self._limiter.failed(address, fingerprint, now)
        # A flood gets one line a minute: it must fill neither the disk nor the log.
        if not few and now - self._marked_at < _MARK_S:
            return
        outcome = "denied" if few else "denied, as are many others"
        if not few:
            self._marked_at = now
        try:
            self._store.save(AuditEvent(self._now(), "", "login", "", address[:64], outcome))
        except (StorageError, UnavailableError):
            logger.exception("event=audit_failed action=login address=%s", address)

    def _used(self, key: ApiKey) -> None:
        now = self._now()
        # Not every request is worth a write; a clock that went back is.
        if key.last_used_at is not None and 0.0 <= now - key.last_used_at < LAST_USED_EVERY_S:
            return
        try:
            self._store.save(replace(key, last_used_at=now))
        except (StorageError, UnavailableError):
            logger.exception("event=last_use_not_saved key=%s", key.id)

    def _new_key(self, owner: str, label: str, scopes: frozenset[Scope]) -> tuple[ApiKey, str]:
        secret = new_api_key()
        key_id = f"key-{secrets.token_hex(5)}"
        return ApiKey(key_id, owner, label, scopes, key_digest(self._secret, secret), self._now()), secret

    def _user(self, name: str) -> User:
        user = self._store.user(name)
        if user is None:
            raise NotFoundError(f"no user {name[:80]!r}", hint="`opentinker users list` lists them")
        return user

    def _key(self, name: str, key_id: str) -> ApiKey:
        key = self._store.api_key(key_id)
        if key is None or key.owner != name:
            raise NotFoundError(
                f"user {name[:80]!r} has no key {key_id[:80]!r}", hint="`opentinker users keys NAME` lists them"
            )
        if key.id == EMBEDDED_KEY:
            raise ConflictError(
                "this is the key in the scheduler's state folder",
                hint="to replace it, delete the file `api_key` there and restart the scheduler",
            )
        return key


def _allowed(user: User, key: ApiKey) -> frozenset[Scope]:
    """What both the user and the key may do, each scope with those that it implies."""
    limits = Caller(user.name, user.scopes), Caller(user.name, key.scopes)
    return frozenset(scope for scope in Scope if all(limit.may(scope) for limit in limits))


def _scopes(names: list[str]) -> frozenset[Scope]:
    if unknown := [name for name in names if name not in list(Scope)]:
        raise InvalidRequestError(f"unknown scope {unknown[0][:80]!r}", hint=f"one or more of {', '.join(Scope)}")
    if not names:
        raise InvalidRequestError("at least one scope is needed", hint=f"one or more of {', '.join(Scope)}")
    return frozenset(Scope(name) for name in names)


def _changed(user: User, **changes: Any) -> User:
    changed = replace(user, **changes)
    for field in ("share", "max_gpus", "max_jobs"):
        value = getattr(changed, field)
        if value is not None and not 0 <= value < 1e6:
            raise InvalidRequestError(f"{field} must be 0 or more and below a million, not {value}")
    if changed.share < MIN_SHARE:
        raise InvalidRequestError(f"share must be at least {MIN_SHARE}", hint="disable a user who is to get nothing")
    return changed


def _text(value: Any) -> str:
    return " ".join(sorted(value)) if isinstance(value, frozenset) else str(value)


def _user_view(user: User) -> dict[str, Any]:
    return {
        "name": user.name,
        "scopes": sorted(user.scopes),
        "share": user.share,
        "max_gpus": user.max_gpus,
        "max_jobs": user.max_jobs,
        "disabled": user.disabled,
        "created_at": user.created_at,
    }


def _key_view(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "owner": key.owner,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "revoked_at": key.revoked_at,
    }
