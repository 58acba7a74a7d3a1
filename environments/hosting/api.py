"""The plain HTTP routes, for curl and other languages; an ASGI app. Errors are problem documents."""

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from opentinker.env.frames import (
    CLOSE,
    DONE,
    ERROR,
    FINALIZE,
    MAX_BODY_HINT,
    NO_SESSION,
    RESET,
    STEP,
    TASKS,
    error_of,
    pack,
    unpack,
)
from opentinker.environments.hosting import json_values
from opentinker.environments.hosting.auth import Token
from opentinker.environments.hosting.coordination import MAX_BODY_BYTES, PREFIX, Coordination
from opentinker.environments.hosting.hub import Hub
from opentinker.errors import (
    InvalidRequestError,
    NotFoundError,
    OpenTinkerError,
    RateLimitedError,
    TooLargeError,
    UnavailableError,
)

MAX_BATCH = 1024
SESSION_BYTES = 16
logger = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _MethodError(OpenTinkerError):
    code = "method_not_allowed"
    status = 405


class Api:
    """POST /reset, /step, /finalize, /close, /tasks, /reset/batch, /step/batch; GET /health, /stats, /info; and those below
    /coordinator."""

    def __init__(self, hub: Hub, token: Token) -> None:
        self.coordination = Coordination(hub)
        self._hub = hub
        self._token = token
        # A step without an index takes the next one of its session.
        self._posts: dict[str, Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]]] = {
            "/reset": self._reset,
            "/step": self._step,
            "/finalize": self._finalize,
            "/close": self._close,
            "/tasks": self._tasks,
            "/reset/batch": self._batch(self._reset),
            "/step/batch": self._batch(self._step),
        }
        self._gets: dict[str, Callable[[], dict[str, Any]]] = {
            "/health": self._health,
            "/stats": self._stats,
            "/info": self._info,
            f"{PREFIX}/runs": lambda: self.coordination.coordinator.runs(),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        status, headers = 200, []
        try:
            answer = await self._answer_or_end(scope, receive)
            if isinstance(answer, bytes):
                body, kind = answer, b"application/x-msgpack"
            else:
                body, kind = json_values.dumps(answer), b"application/json"
        except OpenTinkerError as error:
            status, body, kind = error.status, json_values.dumps(error.to_problem()), b"application/problem+json"
            if isinstance(error, RateLimitedError):
                headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
            if status == 401:
                headers.append((b"www-authenticate", b"Bearer"))
        headers += [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer_or_end(self, scope: Scope, receive: Receive) -> dict[str, Any] | bytes:
        try:
            return await self._answer(scope, receive)
        except asyncio.CancelledError:
            if not self._hub.draining:
                raise
            # uvicorn cancels what is under way when the server ends, such as a body that never comes whole.
            raise UnavailableError("the server is shutting down") from None

    async def _answer(self, scope: Scope, receive: Receive) -> dict[str, Any] | bytes:
        path, method = scope["path"].rstrip("/") or "/", scope["method"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if path != "/health":
            self._token.check(headers.get("authorization", ""))
        if path in self._gets:
            if method != "GET":
                raise _MethodError(f"{path} is asked for with GET")
            return self._gets[path]()
        coordinates = path.startswith(f"{PREFIX}/")
        if path not in self._posts and not coordinates:
            known = ", ".join((*self._posts, *self._gets))
            raise NotFoundError(f"there is no {path} here", hint=f"there are {known}")
        if method != "POST":
            raise _MethodError(f"{path} is asked for with POST")
        if coordinates:
            return await self.coordination.answer(path, await self._body(headers, receive, MAX_BODY_BYTES))
        body = json_values.loads(await self._body(headers, receive, self._hub.settings.max_body_bytes))
        return await self._posts[path](body, headers.get("x-opentinker-job", "")[:200])

    async def _body(self, headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise TooLargeError(f"the body has {int(length):,} bytes; the limit is {limit:,}", hint=MAX_BODY_HINT)
        parts, total, more = [], 0, True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise UnavailableError("the client hung up")
            parts.append(event.get("body", b""))
            total += len(parts[-1])
            if total > limit:
                raise TooLargeError(f"the body has more than {limit:,} bytes", hint=MAX_BODY_HINT)
            more = event.get("more_body", False)
        return b"".join(parts)

    async def _reset(self, body: dict[str, Any], job: str) -> dict[str, Any]:
        session = _session(body) if "session" in body else os.urandom(SESSION_BYTES)
        args = body.get("args", {})
        if not isinstance(args, dict):
            raise InvalidRequestError("'args' must be an object: the constructor's arguments")
        _, answer = await self._asked(RESET, session, 0, body, pack([args, body.get("task")], "the task"), job)
        observation, tools, finalizes = unpack(answer)
        return {"session": session.hex(), "observation": observation, "tools": tools, "finalizes": finalizes}

    async def _step(self, body: dict[str, Any], job: str) -> dict[str, Any]:
        session = _session(body)
        key = session.hex()
        index = body.get("step", self._hub.next_turn(session))
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 2**32:
            raise InvalidRequestError("'step' must be the step's number in its session, from 0")
        action = [body.get("action"), body.get("truncated", False), body.get("reasoning", "")]
        kind, answer = await self._asked(STEP, session, index, body, pack(action, "the action"), job)
        reward, components, observation, metrics = unpack(answer)
        return {
            "session": key,
            "step": index,
            "reward": reward,
            "components": components,
            "done": kind == DONE,
            "observation": observation,
            "metrics": metrics,
        }

    async def _finalize(self, body: dict[str, Any], job: str) -> dict[str, Any]:
        session = _session(body)
        _, answer = await self._asked(FINALIZE, session, 0, body, b"", job)
        reward, components = unpack(answer)
        return {"session": session.hex(), "reward": reward, "components": components}

    async def _close(self, body: dict[str, Any], job: str) -> dict[str, Any]:
        session = _session(body)
        await self._asked(CLOSE, session, 0, body, b"", job)
        return {"session": session.hex(), "closed": True}

    async def _tasks(self, body: dict[str, Any], job: str) -> dict[str, Any]:
        method, numbers = body.get("method"), body.get("numbers")
        if method is None and "count" in body:
            method, numbers = "draw", [body.get("seed", 0), body.get("start", 0), body["count"]]
        elif method is None and "limit" in body:
            method, numbers = "first", [body["limit"]]
        numbers = numbers if numbers is not None else []
        asked = pack([body.get("split", "train"), body.get("args", {}), method, numbers, body.get("tasks", [])])
        _, answer = await self._asked(TASKS, NO_SESSION, 0, body, asked, job)
        return {"result": unpack(answer)}

    def _batch(
        self, one: Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]]
    ) -> Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]]:
        async def result(item: Any, job: str) -> dict[str, Any]:
            try:
                if not isinstance(item, dict):
                    raise InvalidRequestError("each of 'items' must be an object, as the route for one takes it")
                return await one(item, job)
            except OpenTinkerError as error:
                return {"problem": error.to_problem()}

        async def batch(body: dict[str, Any], job: str) -> dict[str, Any]:
            items = body.get("items")
            if not isinstance(items, list):
                raise InvalidRequestError("a batch has 'items', a list")
            if len(items) > MAX_BATCH:
                raise TooLargeError(f"a batch of {len(items)} items; at most {MAX_BATCH} are possible")
            return {"results": await asyncio.gather(*(result(item, job) for item in items))}

        return batch

    async def _asked(
        self, op: int, session: bytes, index: int, body: Mapping[str, Any], packed: bytes, job: str
    ) -> tuple[int, bytes]:
        timeout_s = body.get("timeout_s", 0.0)
        if not isinstance(timeout_s, int | float) or not 0 <= timeout_s < math.inf:
            raise InvalidRequestError("'timeout_s' must be a number of seconds")
        kind, answer = await self._hub.ask(op, session, index, float(timeout_s), packed, job)
        if kind == ERROR:
            raise error_of(answer)
        return kind, answer

    def _health(self) -> dict[str, Any]:
        if self._hub.draining:
            raise UnavailableError("the server is shutting down")
        if not self._hub.pool.ready:
            raise UnavailableError("no worker process is ready")
        return {"status": "ok"}

    def _info(self) -> dict[str, Any]:
        return self._hub.info

    def _stats(self) -> dict[str, Any]:
        hub = self._hub
        limits = {"sessions": hub.sessions, "max_sessions": hub.settings.max_sessions}
        workers = {"workers": hub.pool.ready, "workers_replaced": hub.pool.replaced}
        return {**limits, **workers, **hub.statistics.document()}


def _session(body: Mapping[str, Any]) -> bytes:
    given = body.get("session")
    try:
        session = bytes.fromhex(given) if isinstance(given, str) else b""
    except ValueError:
        session = b""
    if len(session) != SESSION_BYTES:
        raise InvalidRequestError(
            f"'session' must be {2 * SESSION_BYTES} hexadecimal digits", hint="use the one that /reset answered with"
        )
    return session


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return
