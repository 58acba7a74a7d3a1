"""The API's routes that change a job's checkpoints. They take no body, so that nothing is told of another user's job."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from opentinker.scheduler import views
from opentinker.scheduler.user_api import caller_of
from opentinker.scheduler.users import Caller


class HasCheckpoints(Protocol):
    async def tag_checkpoint(self, owner: str, job_id: str, name: str, tag: str, by: Caller) -> dict[str, Any]: ...
    async def untag_checkpoint(self, owner: str, job_id: str, tag: str, by: Caller) -> None: ...
    async def delete_checkpoint(self, owner: str, job_id: str, name: str, by: Caller) -> None: ...


def add_checkpoint_routes(app: FastAPI, scheduler: HasCheckpoints, changing: Callable[[Request, str], Awaitable[str]]) -> None:
    """Add them to the scheduler's API; `changing` gives the owner to change a job as."""

    @app.put("/v1/jobs/{job_id}/checkpoints/{name}/tags/{tag}", response_model=views.CheckpointView)
    async def tag(request: Request, job_id: str, name: str, tag: str) -> JSONResponse:
        owner = await changing(request, job_id)
        return JSONResponse(await scheduler.tag_checkpoint(owner, job_id, name, tag, caller_of(request)))

    @app.delete("/v1/jobs/{job_id}/tags/{tag}", status_code=204)
    async def untag(request: Request, job_id: str, tag: str) -> Response:
        await scheduler.untag_checkpoint(await changing(request, job_id), job_id, tag, caller_of(request))
        return Response(status_code=204)

    @app.delete("/v1/jobs/{job_id}/checkpoints/{name}", status_code=204)
    async def delete(request: Request, job_id: str, name: str) -> Response:
        await scheduler.delete_checkpoint(await changing(request, job_id), job_id, name, caller_of(request))
        return Response(status_code=204)
