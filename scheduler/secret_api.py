"""The API's routes for a user's own secrets. No answer holds a value."""

from typing import Any, Protocol

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from opentinker.scheduler.records import Scope
from opentinker.scheduler.user_api import caller_of
from opentinker.scheduler.users import Caller


class Secrets(Protocol):
    """What the routes need: a `Vault`, here or behind a Ray handle."""

    async def put(self, by: Caller, name: str, value: str) -> dict[str, Any]: ...
    async def names(self, owner: str) -> list[dict[str, Any]]: ...
    async def remove(self, by: Caller, name: str) -> None: ...


class HasSecrets(Protocol):
    @property
    def vault(self) -> Secrets: ...


class NewSecret(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: str = Field(repr=False)


def add_secret_routes(app: FastAPI, scheduler: HasSecrets) -> None:
    """Add the routes under /v1/secrets to the scheduler's API. They are about the caller's own secrets, also for an admin."""

    def submitter(request: Request) -> Caller:
        caller = caller_of(request)
        caller.need(Scope.SUBMIT)
        return caller

    @app.get("/v1/secrets")
    async def secrets(request: Request) -> dict[str, Any]:
        return {"secrets": await scheduler.vault.names(submitter(request).name)}

    @app.put("/v1/secrets/{name}")
    async def put(request: Request, name: str, body: NewSecret) -> dict[str, Any]:
        return await scheduler.vault.put(submitter(request), name, body.value)

    @app.delete("/v1/secrets/{name}", status_code=204)
    async def remove(request: Request, name: str) -> Response:
        await scheduler.vault.remove(submitter(request), name)
        return Response(status_code=204)
