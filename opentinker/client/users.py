"""HTTP client of the scheduler's routes for users and keys, for administrators."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from opentinker.client.scheduler import SchedulerClient


class UsersClient(SchedulerClient):
    """One method per route under /v1/users. Unlike a scheduler's other requests, `add`, `add_key` and `rotate` are not
    idempotent: a repeat after a lost answer says that the user is there, or leaves a key that nobody knows and anybody may
    revoke.

    Raises (all methods): as `SchedulerClient`; ForbiddenError without the scope `admin`.
    """

    def add(self, name: str, scopes: Sequence[str], **limits: float | None) -> dict[str, Any]:
        """{"user", "key"}; the key's `key` is shown here only. `limits`: share, max_gpus, max_jobs."""
        return self._call("POST", "/v1/users", json={"name": name, "scopes": list(scopes), **limits}, attempts=1)

    def users(self) -> list[dict[str, Any]]:
        users: list[dict[str, Any]] = self._call("GET", "/v1/users")["users"]
        return users

    def change(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The changed user; `changes` may hold scopes, share, max_gpus, max_jobs, disabled."""
        return self._call("PATCH", _path(name), json=dict(changes))

    def keys(self, name: str) -> list[dict[str, Any]]:
        keys: list[dict[str, Any]] = self._call("GET", f"{_path(name)}/keys")["keys"]
        return keys

    def add_key(self, name: str, label: str, scopes: Sequence[str] | None = None) -> dict[str, Any]:
        """The key; its `key` is shown here only."""
        body = {"name": label, "scopes": None if scopes is None else list(scopes)}
        return self._call("POST", f"{_path(name)}/keys", json=body, attempts=1)

    def revoke(self, name: str, key_id: str) -> dict[str, Any]:
        return self._call("POST", f"{_path(name)}/keys/{quote(key_id, safe='')}/revoke")

    def rotate(self, name: str, key_id: str) -> dict[str, Any]:
        """The new key; its `key` is shown here only."""
        return self._call("POST", f"{_path(name)}/keys/{quote(key_id, safe='')}/rotate", attempts=1)

    def audit(self, limit: int) -> list[dict[str, Any]]:
        """Newest first."""
        events: list[dict[str, Any]] = self._call("GET", "/v1/audit", params={"limit": limit})["events"]
        return events


def _path(name: str) -> str:
    return f"/v1/users/{quote(name, safe='')}"
