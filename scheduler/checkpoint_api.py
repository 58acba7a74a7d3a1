"""The API's routes that change a job's checkpoints. They take no body, so that nothing is told of another user's job. `policy`
is the further policy of the job that a checkpoint is of; without it, it is of the job's own.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from opentinker.checkpoint_names import joined_policy
from opentinker.scheduler import views
from opentinker.scheduler.user_api import caller_of
from opentinker.scheduler.users import Caller


class HasCheckpoints(Protocol):
    async def tag_checkpoint(self, owner: str, job_id: str, name: str, tag: str, by: Caller) -> dict[str, Any]: ...
    async def untag_checkpoint(self, owner: str, job_id: str, tag: str, by: Caller) -> None: ...
    async def delete_checkpoint(self, owner: str, job_id: str, name: str, by: Caller) -> None: ...
    async def name_checkpoints(self, owner: str, job_id: str, addresses: list[str]) -> list[str]: ...


def add_checkpoint_routes(app: FastAPI, scheduler: HasCheckpoints, changing: Callable[[Request, str], Awaitable[str]]) -> None:
    """Add them to the scheduler's API; `changing` gives the owner to change a job as."""

    @app.put("/v1/jobs/{job_id}/checkpoints/{name}/tags/{tag}", response_model=views.CheckpointView)
    async def tag(request: Request, job_id: str, name: str, tag: str, policy: str | None = None) -> JSONResponse:
        owner = await changing(request, job_id)
        named = joined_policy(policy, name)
        return JSONResponse(await scheduler.tag_checkpoint(owner, job_id, named, tag, caller_of(request)))

    @app.delete("/v1/jobs/{job_id}/tags/{tag}", status_code=204)
    async def untag(request: Request, job_id: str, tag: str, policy: str | None = None) -> Response:
        owner = await changing(request, job_id)
        await scheduler.untag_checkpoint(owner, job_id, joined_policy(policy, tag), caller_of(request))
        return Response(status_code=204)

    @app.post("/v1/jobs/{job_id}/named-checkpoints", response_model=views.NamedCheckpoints)
    async def name(request: Request, job_id: str, address: Annotated[list[str], Query(default_factory=list)]) -> JSONResponse:
        """Let an interactive job that runs load checkpoints of other jobs; `address` may be given several times."""
        owner = await changing(request, job_id)
        return JSONResponse({"checkpoints": await scheduler.name_checkpoints(owner, job_id, address)})

    @app.delete("/v1/jobs/{job_id}/checkpoints/{name}", status_code=204)
    async def delete(request: Request, job_id: str, name: str, policy: str | None = None) -> Response:
        owner = await changing(request, job_id)
        await scheduler.delete_checkpoint(owner, job_id, joined_policy(policy, name), caller_of(request))
        return Response(status_code=204)
