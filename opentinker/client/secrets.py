"""HTTP client of the scheduler's routes for a user's own secrets."""

from typing import Any
from urllib.parse import quote

from opentinker.client.scheduler import SchedulerClient


class SecretsClient(SchedulerClient):
    """One method per route under /v1/secrets.

    Raises (all methods): as `SchedulerClient`; ForbiddenError without the scope `submit`.
    """

    def put(self, name: str, value: str) -> dict[str, Any]:
        """Set a secret of one's own; {"name", "created_at", "updated_at"}."""
        return self._call("PUT", _path(name), json={"value": value})

    def names(self) -> list[dict[str, Any]]:
        """One's own secrets, without their values."""
        secrets: list[dict[str, Any]] = self._call("GET", "/v1/secrets")["secrets"]
        return secrets

    def remove(self, name: str) -> None:
        # A repeat after a lost answer would say that it is not there.
        self._call("DELETE", _path(name), attempts=1)


def _path(name: str) -> str:
    return f"/v1/secrets/{quote(name, safe='')}"
