"""The HTTP front of a server: authentication, decoding and long polls. The routes are in docs/architecture.md.

Only asyncio: nothing here computes for long, so health checks and uploads are answered while a worker is busy.
"""

import asyncio
import base64
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from opentinker.checkpoints import parse_ref
from opentinker.client import wire
from opentinker.client.messages import PolicySpec, SampleRequest, validate
from opentinker.config.base import nearest
from opentinker.errors import (
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    OpenTinkerError,
    UnavailableError,
)
from opentinker.server.commands import GAP_TIMEOUT_S
from opentinker.server.dispatch import Dispatcher
from opentinker.server.operations import Operation
from opentinker.server.policies import PolicyTable
from opentinker.server.protocol import COMMANDS, WorkerClient

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 256 * 2**20
MAX_WAIT_S = 60.0
OFFLOAD_BYTES = 2**20
"""Larger bodies are decoded and encoded in a thread."""


class Front:
    """The routes of one server. Serves `/v1` once `info` is attached."""

    def __init__(
        self,
        worker: WorkerClient,
        tokens: Mapping[str, str],
        clock: Callable[[], float],
        gap_timeout_s: float,
        starts: Mapping[str, str],
        taken: Collection[str],
    ) -> None:
        self.dispatcher = Dispatcher(worker, clock, gap_timeout_s=gap_timeout_s)
        self.policies = PolicyTable(tokens, taken)
        self._starts = dict(starts)
        self._info: dict[str, Any] | None = None
        self._tokenizer: dict[str, bytes] = {}

    def attach(self, info: Mapping[str, Any]) -> None:
        """Open for requests; `info` is what `/v1/info` tells, with the tokenizer's files under `tokenizer_files`."""
        self._tokenizer = dict(info.get("tokenizer_files", {}))
        self._info = {key: value for key, value in info.items() if key != "tokenizer_files"}

    async def health(self, request: Request) -> Response:
        del request
        healthy = self.dispatcher.lost is None
        return Response(
            wire.dumps({"status": "ok" if healthy else "lost"}, wire.JSON), 200 if healthy else 503, media_type=wire.JSON
        )

    async def info(self, request: Request) -> Response:
        self._caller(request)
        self.dispatcher.check()
        return _answer(request, self._info)

    async def tokenizer(self, request: Request) -> Response:
        self._caller(request)
        files: Mapping[str, bytes | str] = self._tokenizer
        if not _wants_msgpack(request):
            files = {name: data.decode() for name, data in self._tokenizer.items()}
        return _answer(request, {"files": files})

    async def policy(self, request: Request) -> Response:
        return _answer(request, self.dispatcher.policy(self._policy(request)))

    async def create_policy(self, request: Request) -> Response:
        caller, wait_s = self._caller(request), _wait_s(request)
        digest, body = await _read(request)
        name, args = _creation(body)
        self.dispatcher.check()
        admitted = self.policies.admit(caller, name, digest)

        def ended(operation: Operation) -> None:
            if operation.problem is not None:
                self._forget(admitted.policy)

        key = self.policies.key(admitted.policy)
        operation = self.dispatcher.create(caller, admitted.policy, key, digest, args, ended)
        await operation.wait(wait_s)
        answer: dict[str, Any] = {"policy": admitted.policy, "operation": operation.to_wire()}
        if operation.status != "failed":
            answer["token"] = admitted.token
        return _answer(request, answer, 202 if operation.status == "pending" else 200)

    async def delete_policy(self, request: Request) -> Response:
        caller, wait_s = self._caller(request), _wait_s(request)
        policy: str = request.path_params["policy"]
        try:
            self.policies.check_delete(caller, policy)
        except NotFoundError as unknown:
            try:  # a retry of what has been done finds its answer
                operation = self.dispatcher.deleted(caller, self.policies.key(policy, gone=True))
            except NotFoundError:
                raise unknown from None
            return await _answer_operation(request, operation, wait_s)

        def ended(operation: Operation) -> None:
            if operation.problem is None or operation.problem["code"] == NotFoundError.code:
                self._forget(policy)

        operation = self.dispatcher.delete(caller, policy, self.policies.key(policy), ended)
        return await _answer_operation(request, operation, wait_s)

    def _forget(self, policy: str) -> None:
        self.policies.remove(policy)
        self.dispatcher.forget(policy)

    async def sample(self, request: Request) -> Response:
        policy = self._policy(request)
        wait_s = _wait_s(request)
        digest, body = await _read(request)
        operation = self.dispatcher.sample(policy, SampleRequest.from_wire(body), digest)
        return await _answer_operation(request, operation, wait_s)

    async def command(self, request: Request) -> Response:
        policy = self._policy(request)
        wait_s = _wait_s(request)
        digest, body = await _read(request)
        seq, command, args = _envelope(body)
        if command in ("load", "load_weights"):
            args = self._found(args)
        operation = self.dispatcher.command(policy, seq, digest, command, args)
        self.policies.note(policy, command)
        return await _answer_operation(request, operation, wait_s)

    async def images(self, request: Request) -> Response:
        self._policy(request)
        _, body = await _read(request)
        tokens = await self.dispatcher.upload(_images(body))
        return _answer(request, {"images": {sha256: {"tokens": ids} for sha256, ids in tokens.items()}})

    async def operation(self, request: Request) -> Response:
        caller = self._caller(request)
        operation = self.dispatcher.operation(request.path_params["operation_id"], caller)
        return await _answer_operation(request, operation, _wait_s(request))

    def name_checkpoints(self, starts: Mapping[str, str]) -> None:
        """Let the policies load further checkpoints of other jobs: address -> folder."""
        self._starts |= starts

    def _found(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `load` or `load_weights`, for the worker: an address means a folder that the scheduler has told."""
        if "folder" in args:
            raise InvalidRequestError("unknown argument 'folder'", hint="name takes a checkpoint's name or address")
        address = args.get("name")
        if not isinstance(address, str) or "/" not in address:
            return dict(args)
        if args.get("policy"):
            raise InvalidRequestError(f"'{address[:200]}' names its policy; leave policy out")
        wanted = parse_ref(address)
        found = {known: folder for known, folder in self._starts.items() if wanted.may_mean(parse_ref(known))}
        if not found:
            raise InvalidRequestError(
                f"the checkpoint {wanted} is not among those that this job names",
                hint="`Job.load` names it for an interactive job; of others the config does, as an agent's `checkpoint`",
            )
        if len(set(found.values())) > 1:
            raise InvalidRequestError(
                f"the checkpoint {wanted} may be {' or '.join(sorted(found))}, which this job names", hint="add its version"
            )
        return {"folder": next(iter(found.values()))}

    def _caller(self, request: Request) -> str:
        """The policy whose token the request carries."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        caller = self.policies.caller(token.strip() if scheme.lower() == "bearer" else "")
        if self._info is None:
            raise self.dispatcher.lost or UnavailableError("the server is starting", hint="try again in a few seconds")
        return caller

    def _policy(self, request: Request) -> str:
        policy: str = request.path_params["policy"]
        if self._caller(request) != policy:
            raise NotFoundError(f"no policy '{policy}'", hint="a token opens its own policy only")
        return policy


def create_app(
    worker: WorkerClient,
    tokens: Mapping[str, str],
    info: Mapping[str, Any] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    gap_timeout_s: float = GAP_TIMEOUT_S,
    starts: Mapping[str, str] | None = None,
    taken: Collection[str] = (),
) -> Starlette:
    """The ASGI app in front of `worker`. `tokens` is policy -> token; `starts` is address -> folder of the other jobs'
    checkpoints that this one may load; `taken` are names that no further policy may have. Without `info` it answers 503 until
    `app.state.front.attach(info)`."""
    front = Front(worker, tokens, clock, gap_timeout_s, starts or {}, taken)
    if info is not None:
        front.attach(info)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        front.dispatcher.start()
        try:
            yield
        finally:
            await front.dispatcher.stop()

    app = Starlette(
        routes=[
            Route("/health", front.health),
            Route("/v1/info", front.info),
            Route("/v1/tokenizer", front.tokenizer),
            Route("/v1/policies", front.create_policy, methods=["POST"]),
            Route("/v1/policies/{policy}", front.policy),
            Route("/v1/policies/{policy}", front.delete_policy, methods=["DELETE"]),
            Route("/v1/policies/{policy}/sample", front.sample, methods=["POST"]),
            Route("/v1/policies/{policy}/images", front.images, methods=["POST"]),
            Route("/v1/policies/{policy}/commands", front.command, methods=["POST"]),
            Route("/v1/operations/{operation_id:path}", front.operation),
        ],
        exception_handlers={OpenTinkerError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
        lifespan=lifespan,
    )
    app.state.front = front
    return app


def _wants_msgpack(request: Request) -> bool:
    return wire.MSGPACK in request.headers.get("accept", "")


def _answer(request: Request, body: Any, status: int = 200) -> Response:
    media_type = wire.MSGPACK if _wants_msgpack(request) else wire.JSON
    return Response(wire.dumps(body, media_type), status, media_type=media_type)


async def _answer_operation(request: Request, operation: Operation, wait_s: float) -> Response:
    await operation.wait(wait_s)
    status = 202 if operation.status == "pending" else 200
    if operation.size_bytes > OFFLOAD_BYTES:
        return await asyncio.to_thread(_answer, request, operation.to_wire(), status)
    return _answer(request, operation.to_wire(), status)


def _wait_s(request: Request) -> float:
    text = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not wait_s >= 0.0:
        raise InvalidRequestError(f"wait_s must be a number of seconds, not '{text}'")
    return min(wait_s, MAX_WAIT_S)


async def _read(request: Request) -> tuple[bytes, Any]:
    """(digest of the raw body, decoded body)."""
    too_large = InvalidRequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", hint="send the data in parts")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large
    raw, content_type = b"".join(parts), request.headers.get("content-type", wire.JSON)
    if size > OFFLOAD_BYTES:
        return await asyncio.to_thread(_decode, raw, content_type)
    return _decode(raw, content_type)


def _decode(raw: bytes, content_type: str) -> tuple[bytes, Any]:
    return hashlib.blake2b(raw, digest_size=16).digest(), wire.loads(raw, content_type)


def _envelope(body: Any) -> tuple[int, str, dict[str, Any]]:
    """(seq, command, args) of a command's body."""
    if not isinstance(body, dict) or set(body) - {"seq", "command", "args"}:
        raise InvalidRequestError("a command is an object with seq, command and args")
    seq, command, args = body.get("seq"), body.get("command"), body.get("args", {})
    if not isinstance(seq, int) or isinstance(seq, bool) or seq < 0:
        raise InvalidRequestError("seq must be a whole number from 0")
    if not isinstance(command, str) or command not in COMMANDS:
        raise InvalidRequestError(f"unknown command '{command}'", hint=nearest(str(command), COMMANDS))
    if not isinstance(args, dict):
        raise InvalidRequestError("args must be an object")
    if command == "create":
        _check_spec(args)
    return seq, command, args


def _check_spec(args: Mapping[str, Any]) -> None:
    if args.get("checkpoint") is not None:
        # It is a folder on the server's node; whose that may be, only the scheduler knows.
        raise InvalidRequestError(
            "a start checkpoint cannot be named here", hint="give start_from in the job's config, where it is submitted"
        )


def _creation(body: Any) -> tuple[str | None, dict[str, Any]]:
    """(name or None, the fields of its `PolicySpec`) of a policy that is to be created."""
    if not isinstance(body, dict) or set(body) - {"policy", "spec"}:
        raise InvalidRequestError("a policy to create is an object with spec and, if it is to have a name, policy")
    policy, spec = body.get("policy"), body.get("spec", {})
    if policy is not None and not isinstance(policy, str):
        raise InvalidRequestError("policy must be a name")
    args = validate(PolicySpec, spec).model_dump()
    _check_spec(args)
    return policy, args


def _images(body: Any) -> list[bytes]:
    """The encoded images of an upload; in JSON they are base64."""
    images = body.get("images") if isinstance(body, dict) and set(body) == {"images"} else None
    if not isinstance(images, list) or not images:
        raise InvalidRequestError("an upload is an object with 'images': a list of encoded images that is not empty")
    try:
        return [
            base64.b64decode(image, validate=True) if isinstance(image, str) else bytes(memoryview(image)) for image in images
        ]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"an image must be the bytes of a file, in JSON as base64: {error}") from error


def _problem(request: Request, error: OpenTinkerError) -> Response:
    media_type = wire.MSGPACK if _wants_msgpack(request) else "application/problem+json"
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, AuthenticationError) else None
    return Response(wire.dumps(error.to_problem(), media_type), error.status, headers, media_type)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OpenTinkerError)
    return _problem(request, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _problem(request, NotFoundError("no such route"))
    return _problem(request, InvalidRequestError(f"{error.detail} ({request.method} {request.url.path})"))


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("request failed path=%s", request.url.path, exc_info=error)
    return _problem(request, OpenTinkerError("the server's front failed; its log says why"))
