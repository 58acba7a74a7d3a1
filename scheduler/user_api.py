"""The API's routes for users, keys and the audit log: for administrators only."""

from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from opentinker.scheduler.records import Scope
from opentinker.scheduler.users import MAX_AUDIT_ROWS, Caller


class Users(Protocol):
    """What the routes need: a `UserDirectory`, here or behind a Ray handle."""

    async def add(self, by: Caller, name: str, scopes: list[str], limits: dict[str, Any]) -> dict[str, Any]: ...
    async def users(self) -> list[dict[str, Any]]: ...
    async def change(self, by: Caller, name: str, changes: dict[str, Any]) -> dict[str, Any]: ...
    async def keys(self, name: str) -> list[dict[str, Any]]: ...
    async def add_key(self, by: Caller, name: str, label: str, scopes: list[str] | None) -> dict[str, Any]: ...
    async def revoke_key(self, by: Caller, name: str, key_id: str) -> dict[str, Any]: ...
    async def rotate_key(self, by: Caller, name: str, key_id: str) -> dict[str, Any]: ...
    async def audit(self, limit: int) -> list[dict[str, Any]]: ...


class HasUsers(Protocol):
    @property
    def users(self) -> Users: ...


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewUser(_Body):
    name: str
    scopes: list[str] = ["submit"]
    share: float = 1.0
    max_gpus: float | None = None
    max_jobs: int | None = None


class UserChanges(_Body):
    """What is not there stays as it is; null takes a limit away."""

    scopes: list[str] = Field(default_factory=list)
    share: float = 1.0
    max_gpus: float | None = None
    max_jobs: int | None = None
    disabled: bool = False


class NewKey(_Body):
    name: str = "default"
    scopes: list[str] | None = None
    """None: all that the user has."""


def caller_of(request: Request) -> Caller:
    """Who sent the request, as the gate found."""
    caller: Caller = request.state.caller
    return caller


def add_user_routes(app: FastAPI, scheduler: HasUsers) -> None:
    """Add the routes under /v1/users, and /v1/audit, to the scheduler's API."""

    def admin(request: Request) -> Caller:
        caller = caller_of(request)
        caller.need(Scope.ADMIN)
        return caller

    @app.post("/v1/users", status_code=201)
    async def add(request: Request, body: NewUser) -> dict[str, Any]:
        limits = body.model_dump(include={"share", "max_gpus", "max_jobs"})
        return await scheduler.users.add(admin(request), body.name, body.scopes, limits)

    @app.get("/v1/users")
    async def users(request: Request) -> dict[str, Any]:
        admin(request)
        return {"users": await scheduler.users.users()}

    @app.patch("/v1/users/{name}")
    async def change(request: Request, name: str, body: UserChanges) -> dict[str, Any]:
        return await scheduler.users.change(admin(request), name, body.model_dump(exclude_unset=True))

    @app.get("/v1/users/{name}/keys")
    async def keys(request: Request, name: str) -> dict[str, Any]:
        admin(request)
        return {"keys": await scheduler.users.keys(name)}

    @app.post("/v1/users/{name}/keys", status_code=201)
    async def add_key(request: Request, name: str, body: NewKey) -> dict[str, Any]:
        return await scheduler.users.add_key(admin(request), name, body.name, body.scopes)

    @app.post("/v1/users/{name}/keys/{key_id}/revoke")
    async def revoke(request: Request, name: str, key_id: str) -> dict[str, Any]:
        return await scheduler.users.revoke_key(admin(request), name, key_id)

    @app.post("/v1/users/{name}/keys/{key_id}/rotate", status_code=201)
    async def rotate(request: Request, name: str, key_id: str) -> dict[str, Any]:
        return await scheduler.users.rotate_key(admin(request), name, key_id)

    @app.get("/v1/audit")
    async def audit(request: Request, limit: Annotated[int, Query(ge=1, le=MAX_AUDIT_ROWS)] = 100) -> dict[str, Any]:
        admin(request)
        return {"events": await scheduler.users.audit(limit)}
