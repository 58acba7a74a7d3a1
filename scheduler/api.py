"""The scheduler's HTTP API: routes, keys and problem documents; everything else is the service's."""

import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from opentinker.errors import InvalidRequestError, NotFoundError, OpenTinkerError, RateLimitedError, TooLargeError
from opentinker.scheduler import records, views
from opentinker.scheduler.auth import unauthenticated, without_details
from opentinker.scheduler.checkpoint_api import add_checkpoint_routes
from opentinker.scheduler.health import Health
from opentinker.scheduler.listing import JobQuery
from opentinker.scheduler.metrics import ApiMetrics, Measured
from opentinker.scheduler.proxy import TOKEN_PREFIX, Proxy, is_proxied
from opentinker.scheduler.run_files import LogSource
from opentinker.scheduler.secret_api import Secrets, add_secret_routes
from opentinker.scheduler.uploads import MAX_ZIP_BYTES
from opentinker.scheduler.user_api import Users, add_user_routes, caller_of
from opentinker.scheduler.users import EVERYONE, Caller
from opentinker.scheduler.waits import Waits

logger = logging.getLogger(__name__)
MAX_POLLS_EACH, MAX_POLLS = 64, 500
"""Long polls in progress, of one user and of all. What is left of the actor's `MAX_CALLS` is for heartbeats and the rest."""
MAX_ENDS_EACH, MAX_ENDS = 64, 250
"""Likewise for `cancel`, `complete` and `stop`, which wait until processes are gone."""
MAX_PROXIED_EACH, MAX_PROXIED = 1000, 4000
"""Requests to servers of one user's jobs, and of all, by way of the scheduler; each holds two connections."""
MAX_BODY_BYTES = 2 * MAX_ZIP_BYTES
"""Room for the largest code, in base64, and a config."""
SMALL_BODY_BYTES = 64 * 2**10
"""Enough for the routes of users, keys and secrets."""
OPEN_PATHS = frozenset({"/health"})


class Scheduler(Protocol):
    """What the routes need: a `SchedulerService`, here or behind a Ray handle."""

    @property
    def users(self) -> Users: ...
    @property
    def vault(self) -> Secrets: ...

    async def ping(self) -> None: ...
    async def authenticate(self, key: str, address: str = "") -> Caller: ...
    async def submit(
        self,
        owner: str,
        config: dict[str, Any],
        idempotency_key: str | None,
        code: dict[str, str] | None,
        may_name: str | None = None,
    ) -> dict[str, Any]: ...
    async def jobs(self, owner: str, query: JobQuery) -> dict[str, Any]: ...
    async def job(self, owner: str, job_id: str, state: str | None, wait_s: float) -> dict[str, Any]: ...
    async def events(self, owner: str, job_id: str) -> list[dict[str, Any]]: ...
    async def heartbeat(self, owner: str, job_id: str) -> dict[str, Any]: ...
    async def complete(self, owner: str, job_id: str) -> dict[str, Any]: ...
    async def cancel(self, owner: str, job_id: str, by: Caller | None = None) -> dict[str, Any]: ...
    async def stop(self, owner: str, job_id: str, by: Caller | None = None) -> dict[str, Any]: ...
    async def logs(
        self, owner: str, job_id: str, offset: int, source: LogSource | None, server: str = ""
    ) -> dict[str, Any]: ...
    async def metrics(self, owner: str, job_id: str, after: int) -> dict[str, Any]: ...
    async def checkpoints(self, owner: str, job_id: str) -> list[dict[str, Any]]: ...
    async def tag_checkpoint(self, owner: str, job_id: str, name: str, tag: str, by: Caller) -> dict[str, Any]: ...
    async def untag_checkpoint(self, owner: str, job_id: str, tag: str, by: Caller) -> None: ...
    async def delete_checkpoint(self, owner: str, job_id: str, name: str, by: Caller) -> None: ...
    async def name_checkpoints(self, owner: str, job_id: str, addresses: list[str]) -> list[str]: ...
    async def models(self) -> list[dict[str, Any]]: ...
    async def cluster(self, owner: str) -> dict[str, Any]: ...
    async def exposition(self) -> str: ...
    async def server_of(self, job_id: str, owner: str | None, token: str | None, address: str = "") -> dict[str, str]: ...


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
    app = FastAPI(
        title="OpenTinker scheduler",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": views.Problem}, "5XX": {"model": views.Problem}},
    )
    proxy = Proxy(scheduler.server_of, Waits("requests to servers of your jobs", MAX_PROXIED_EACH, MAX_PROXIED))
    alive = Health(scheduler.ping)
    polls = Waits("waiting requests of yours", MAX_POLLS_EACH, MAX_POLLS)
    ends = Waits("jobs of yours to be ended", MAX_ENDS_EACH, MAX_ENDS)
    measured = ApiMetrics()
    add_user_routes(app, scheduler)
    add_secret_routes(app, scheduler)

    async def changing(request: Request, job_id: str) -> str:
        """The owner to change a job as. Another user's job does not exist, whatever the key's scopes are."""
        caller = caller_of(request)
        if not caller.may(records.Scope.SUBMIT):
            await scheduler.job(_owner(request), job_id, None, 0.0)
        caller.need(records.Scope.SUBMIT)
        return _owner(request)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether requests are answered; 503 when not. Needs no key, and tells no more than that."""
        await alive.check()
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def exposition() -> PlainTextResponse:
        """Figures of the whole cluster in Prometheus' text format; they name no job and no user."""
        return PlainTextResponse(await scheduler.exposition() + measured.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/v1/jobs", status_code=201, response_model=views.JobView)
    async def submit(request: Request, body: Submission) -> JSONResponse:
        code = body.code.model_dump() if body.code else None
        caller = caller_of(request)
        caller.need(records.Scope.SUBMIT)
        return JSONResponse(await scheduler.submit(caller.name, body.config, body.idempotency_key, code, _owner(request)), 201)

    @app.get("/v1/jobs", response_model=views.JobPage)
    async def jobs(request: Request, query: Annotated[JobQuery, Query()]) -> JSONResponse:
        return JSONResponse(await scheduler.jobs(_listed(request, query.owner), query))

    @app.get("/v1/jobs/{job_id}", response_model=views.JobView)
    async def job(
        request: Request, job_id: str, state: str | None = None, wait_s: Annotated[float, Query(ge=0.0)] = 0.0
    ) -> JSONResponse:
        if state is None or not wait_s:
            return JSONResponse(_shown(request, await scheduler.job(_owner(request), job_id, None, 0.0)))
        with polls.held(caller_of(request).name):
            return JSONResponse(_shown(request, await scheduler.job(_owner(request), job_id, state, wait_s)))

    @app.get("/v1/jobs/{job_id}/events", response_model=views.Events)
    async def events(request: Request, job_id: str) -> JSONResponse:
        return JSONResponse({"events": await scheduler.events(_owner(request), job_id)})

    @app.post("/v1/jobs/{job_id}/heartbeat", response_model=views.JobView)
    async def heartbeat(request: Request, job_id: str) -> JSONResponse:
        return JSONResponse(_shown(request, await scheduler.heartbeat(await changing(request, job_id), job_id)))

    @app.post("/v1/jobs/{job_id}/complete", response_model=views.JobView)
    async def complete(request: Request, job_id: str) -> JSONResponse:
        owner = await changing(request, job_id)
        with ends.held(caller_of(request).name):
            return JSONResponse(_shown(request, await scheduler.complete(owner, job_id)))

    @app.post("/v1/jobs/{job_id}/cancel", response_model=views.JobView)
    async def cancel(request: Request, job_id: str) -> JSONResponse:
        owner, caller = await changing(request, job_id), caller_of(request)
        with ends.held(caller.name):
            return JSONResponse(_shown(request, await scheduler.cancel(owner, job_id, caller)))

    @app.post("/v1/jobs/{job_id}/stop", response_model=views.JobView)
    async def stop(request: Request, job_id: str) -> JSONResponse:
        owner, caller = await changing(request, job_id), caller_of(request)
        with ends.held(caller.name):
            return JSONResponse(_shown(request, await scheduler.stop(owner, job_id, caller)))

    @app.get("/v1/jobs/{job_id}/logs", response_model=views.Logs)
    async def logs(
        request: Request, job_id: str, offset: int = 0, source: LogSource | None = None, server: str = ""
    ) -> JSONResponse:
        return JSONResponse(await scheduler.logs(_owner(request), job_id, offset, source, server))

    @app.get("/v1/jobs/{job_id}/metrics", response_model=views.MetricRows)
    async def metrics(request: Request, job_id: str, after: int = 0) -> JSONResponse:
        return JSONResponse(await scheduler.metrics(_owner(request), job_id, after))

    @app.get("/v1/jobs/{job_id}/checkpoints", response_model=views.Checkpoints)
    async def checkpoints(request: Request, job_id: str) -> JSONResponse:
        return JSONResponse({"checkpoints": await scheduler.checkpoints(_owner(request), job_id)})

    add_checkpoint_routes(app, scheduler, changing)

    @app.get("/v1/models", response_model=views.Models)
    async def models() -> JSONResponse:
        return JSONResponse({"models": await scheduler.models()})

    @app.get("/v1/cluster", response_model=views.ClusterView)
    async def cluster(request: Request) -> JSONResponse:
        return JSONResponse(await scheduler.cluster(_owner(request)))

    for method in ("GET", "POST", "DELETE"):

        @app.api_route("/v1/jobs/{job_id}/server/{path:path}", methods=[method], name=f"server_{method.lower()}")
        async def server(request: Request, job_id: str, path: str) -> Response:
            """The job's server, by way of the scheduler. Takes an API key of the job's owner, or the policy's token."""
            token = getattr(request.state, "policy_token", None)
            if token is not None:
                return await proxy.pass_on(request, job_id, owner=None, token=token)
            caller = caller_of(request)
            if not caller.may(records.Scope.SUBMIT):
                await scheduler.job(caller.name, job_id, None, 0.0)  # another user's job does not exist for any key
            caller.need(records.Scope.SUBMIT)
            return await proxy.pass_on(request, job_id, owner=caller.name, token=None)

    app.add_exception_handler(OpenTinkerError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(_Gate, scheduler=scheduler)
    app.add_middleware(Measured, metrics=measured)
    return app


def _owner(request: Request) -> str:
    """Whose jobs the caller may name by id: an admin everybody's."""
    caller = caller_of(request)
    return EVERYONE if caller.is_admin else caller.name


def _shown(request: Request, job: dict[str, Any]) -> dict[str, Any]:
    """The job, with its policy's token only for its owner and a key that may do more than read: the token opens the policy."""
    caller = caller_of(request)
    if job["server"] is not None and not (job["owner"] == caller.name and caller.may(records.Scope.SUBMIT)):
        return {**job, "server": {name: value for name, value in job["server"].items() if name != "token"}}
    return job


def _listed(request: Request, owner: str | None) -> str:
    """Whose jobs to list: the caller's own, or for an admin those of `owner` ("*": all)."""
    caller = caller_of(request)
    if owner is not None and owner != caller.name:
        caller.need(records.Scope.ADMIN)
    return caller.name if owner is None else owner


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
            proxied = is_proxied(scope["path"])
            try:
                key = _bearer(scope)
                if proxied and key.startswith(TOKEN_PREFIX):
                    scope.setdefault("state", {})["policy_token"] = key  # the proxy holds it against the job's own
                else:
                    address = str(scope["client"][0]) if scope.get("client") else ""
                    scope.setdefault("state", {})["caller"] = await self._scheduler.authenticate(key, address)
            except OpenTinkerError as error:
                await problem(without_details(error))(scope, receive, send)
                return
            if proxied:  # nothing is kept of its body; the server has a limit of its own
                await self._app(scope, receive, send)
                return
        limit = SMALL_BODY_BYTES if scope.get("path", "").startswith(("/v1/users", "/v1/secrets")) else MAX_BODY_BYTES
        await self._app(scope, _limited(receive, limit), send)


def _bearer(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer":
                return str(key.strip())
    raise unauthenticated()


def _limited(receive: Receive, limit: int) -> Receive:
    received = 0

    async def counted() -> MutableMapping[str, Any]:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise TooLargeError(f"the request is larger than {limit >> 10} KiB")
        return message

    return counted


def problem(error: OpenTinkerError, status: int | None = None) -> JSONResponse:
    """The error as a problem+json answer (RFC 9457)."""
    document = error.to_problem()
    if status is not None:
        document["status"] = status
    headers = {"WWW-Authenticate": "Bearer"} if document["status"] == 401 else {}
    if isinstance(error, RateLimitedError):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
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
    if isinstance(error.__cause__, OpenTinkerError):  # raised while the body was read, which FastAPI calls its own error
        return problem(error.__cause__)
    if error.status_code == 404:
        return problem(NotFoundError(f"no route {request.url.path}"))
    return problem(InvalidRequestError(str(error.detail)), error.status_code)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    logger.error("event=internal_error path=%s", request.url.path, exc_info=error)
    return problem(OpenTinkerError("internal error", hint="the scheduler's log has the details"))
