"""The scheduler's HTTP API: routes, keys and problem documents; everything else is the service's."""

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from opentinker.errors import InvalidRequestError, NotFoundError, OpenTinkerError
from opentinker.scheduler.auth import unauthenticated
from opentinker.scheduler.run_files import LogSource
from opentinker.scheduler.uploads import MAX_ZIP_BYTES

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 2 * MAX_ZIP_BYTES
"""Room for the largest code, in base64, and a config."""
OPEN_PATHS = frozenset({"/health"})


class Scheduler(Protocol):
    """What the routes need: a `SchedulerService`, here or behind a Ray handle."""

    async def authenticate(self, key: str) -> str: ...
    async def submit(
        self, owner: str, config: dict[str, Any], idempotency_key: str | None, code: dict[str, str] | None
    ) -> dict[str, Any]: ...
    async def jobs(self, owner: str) -> list[dict[str, Any]]: ...
    async def job(self, owner: str, job_id: str, state: str | None, wait_s: float) -> dict[str, Any]: ...
    async def events(self, owner: str, job_id: str) -> list[dict[str, Any]]: ...
    async def heartbeat(self, owner: str, job_id: str) -> dict[str, Any]: ...
    async def complete(self, owner: str, job_id: str) -> dict[str, Any]: ...
    async def cancel(self, owner: str, job_id: str) -> dict[str, Any]: ...
    async def logs(self, owner: str, job_id: str, offset: int, source: LogSource | None) -> dict[str, Any]: ...
    async def metrics(self, owner: str, job_id: str, after: int) -> dict[str, Any]: ...
    async def cluster(self) -> dict[str, Any]: ...


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Code(_Body):
    zip: str
    """Base64."""
    sha256: str


class Submission(_Body):
    config: dict[str, Any]
    idempotency_key: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    code: Code | None = None


def create_app(scheduler: Scheduler) -> FastAPI:
    """The API over a scheduler."""
    app = FastAPI(title="OpenTinker scheduler", docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/jobs", status_code=201)
    async def submit(request: Request, body: Submission) -> dict[str, Any]:
        code = body.code.model_dump() if body.code else None
        return await scheduler.submit(_owner(request), body.config, body.idempotency_key, code)

    @app.get("/v1/jobs")
    async def jobs(request: Request) -> dict[str, Any]:
        return {"jobs": await scheduler.jobs(_owner(request))}

    @app.get("/v1/jobs/{job_id}")
    async def job(
        request: Request, job_id: str, state: str | None = None, wait_s: Annotated[float, Query(ge=0.0)] = 0.0
    ) -> dict[str, Any]:
        return await scheduler.job(_owner(request), job_id, state, wait_s)

    @app.get("/v1/jobs/{job_id}/events")
    async def events(request: Request, job_id: str) -> dict[str, Any]:
        return {"events": await scheduler.events(_owner(request), job_id)}

    @app.post("/v1/jobs/{job_id}/heartbeat")
    async def heartbeat(request: Request, job_id: str) -> dict[str, Any]:
        return await scheduler.heartbeat(_owner(request), job_id)

    @app.post("/v1/jobs/{job_id}/complete")
    async def complete(request: Request, job_id: str) -> dict[str, Any]:
        return await scheduler.complete(_owner(request), job_id)

    @app.post("/v1/jobs/{job_id}/cancel")
    async def cancel(request: Request, job_id: str) -> dict[str, Any]:
        return await scheduler.cancel(_owner(request), job_id)

    @app.get("/v1/jobs/{job_id}/logs")
    async def logs(request: Request, job_id: str, offset: int = 0, source: LogSource | None = None) -> dict[str, Any]:
        return await scheduler.logs(_owner(request), job_id, offset, source)

    @app.get("/v1/jobs/{job_id}/metrics")
    async def metrics(request: Request, job_id: str, after: int = 0) -> dict[str, Any]:
        return await scheduler.metrics(_owner(request), job_id, after)

    @app.get("/v1/cluster")
    async def cluster() -> dict[str, Any]:
        return await scheduler.cluster()

    app.add_exception_handler(OpenTinkerError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(_Gate, scheduler=scheduler)
    return app


def _owner(request: Request) -> str:
    owner: str = request.state.owner
    return owner


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Gate:
    """Nothing of a request is read before its key is known: neither its body nor whether its route exists."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], scheduler: Scheduler) -> None:
        self._app = app
        self._scheduler = scheduler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope.setdefault("state", {})["owner"] = await self._scheduler.authenticate(_bearer(scope))
            except OpenTinkerError as error:
                await problem(error)(scope, receive, send)
                return
        await self._app(scope, _limited(receive), send)


def _bearer(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer":
                return str(key.strip())
    raise unauthenticated()


def _limited(receive: Receive) -> Receive:
    received = 0

    async def counted() -> MutableMapping[str, Any]:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise InvalidRequestError(f"the request is larger than {MAX_BODY_BYTES >> 20} MiB")
        return message

    return counted


def problem(error: OpenTinkerError, status: int | None = None) -> JSONResponse:
    """The error as a problem+json answer (RFC 9457)."""
    document = error.to_problem()
    if status is not None:
        document["status"] = status
    headers = {"WWW-Authenticate": "Bearer"} if document["status"] == 401 else None
    return JSONResponse(document, document["status"], headers, media_type="application/problem+json")


async def _ours(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OpenTinkerError)
    return problem(error)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Names where and why, never the input itself: it may hold a secret.
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return problem(InvalidRequestError(f"{where}: {first['msg']}"))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return problem(NotFoundError(f"no route {request.url.path}"))
    return problem(InvalidRequestError(str(error.detail)), error.status_code)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    logger.error("event=internal_error path=%s", request.url.path, exc_info=error)
    return problem(OpenTinkerError("internal error", hint="the scheduler's log has the details"))
