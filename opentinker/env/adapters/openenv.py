"""Servers of OpenEnv: `openenv:http://host:port`. An episode is a WebSocket session; the action's form comes from `/schema`."""

import asyncio
import functools
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from opentinker.env.adapters.codecs import in_words
from opentinker.env.adapters.common import SeededEnvironment, adapted, answer_of, require, seed_of
from opentinker.env.environment import Action, Environment, Message, StepResult
from opentinker.env.parsing import tool_calls
from opentinker.env.secret_files import OPENENV_VARIABLE, read_token
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError

LARGEST_MESSAGE = 100 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
ATTEMPTS = 60
"""How often a full server is asked for a session, 1 s apart; the session's own deadline usually ends it earlier."""


class OpenEnvEnvironment(SeededEnvironment):
    """An episode on an OpenEnv server, which gets {"seed", ...} from the task, as far as it knows these names.

    The policy's text becomes the action's one text field (`action_field`), or is JSON if the action has several. What it sees
    is the observation's text field (`observation_field`), or all fields in words. A server with MCP tools has them declared as
    tools; a turn without a tool call ends the episode. `prompt` is a system message; `reset` are further reset arguments.
    A bearer token comes from the file `token_file`, or from the variable OPENENV_TOKEN.

    Raises:
        ConfigError: an argument does not fit the server's action, or the token's file cannot be read.
        EnvironmentLoadError: the server cannot be reached.
    """

    url: ClassVar[str]
    host_args: ClassVar[tuple[str, ...]] = ("token_file",)
    schema: ClassVar[Mapping[str, Any] | None] = None
    """The server's, once it has been asked."""

    def __init__(
        self,
        action_field: str = "",
        observation_field: str = "",
        prompt: str = "",
        reset: Mapping[str, Any] | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        token = read_token(token_file, OPENENV_VARIABLE)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._action_field = action_field
        self._observation_field = observation_field
        self._prompt = prompt
        self._reset_arguments = dict(reset or {})
        self._socket: Any = None
        self._action: Mapping[str, Any] = {}
        self._called = False
        self._done = False

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        environment = cls(**args)  # wrong arguments and a dead server show before any episode
        try:
            with httpx.Client(timeout=CONNECT_TIMEOUT_S, headers=environment._headers) as client:
                cls.schema = _schema_of(client.get(f"{cls.url}/schema"))
        except httpx.HTTPError as error:
            raise _no_schema(cls.url, error) from error
        environment._fits(cls.schema)
        return super().task_source(split, args)

    async def reset(self, task: Any) -> list[Message]:
        arguments = {"seed": seed_of(task)} | {k: v for k, v in task.items() if k != "seed"} | self._reset_arguments
        if self.schema is None:
            async with httpx.AsyncClient(timeout=CONNECT_TIMEOUT_S, headers=self._headers) as client:
                type(self).schema = await _schema(self.url, client)
        assert self.schema is not None
        self._action = self._fits(self.schema)
        reply = await self._open(arguments)
        if "tool_name" in self._action:
            listed = await self._ask({"type": "step", "data": {"type": "list_tools"}})
            self.tools = [_function(tool) for tool in listed["observation"].get("tools", ())]
        if reply["done"]:
            raise EnvironmentFailedError(f"the episode at {self.url} was over after reset")
        system: list[Message] = [{"role": "system", "content": self._prompt}] if self._prompt else []
        return [*system, {"role": "user", "content": self._seen(reply["observation"]) or "Begin."}]

    async def step(self, action: Action) -> StepResult:
        if self._done:
            raise RuntimeError("the episode is over")
        if "tool_name" in self._action:
            return await self._call_tools(action)
        data, problem = self._data(action.text)
        if problem:
            return StepResult(0.0, observation=problem, metrics={"malformed_actions": 1.0})
        reply = await self._ask({"type": "step", "data": data}, refusable=True)
        if "refused" in reply:
            return StepResult(0.0, observation=f"Not possible: {reply['refused']}", metrics={"malformed_actions": 1.0})
        self._done = bool(reply["done"])
        seen = self._seen(reply["observation"])
        return StepResult(_reward(reply), self._done, seen if seen or self._done else "(nothing)")

    async def close(self) -> None:  # type: ignore[override]
        socket, self._socket = self._socket, None
        if socket is not None:
            try:
                await socket.send(json.dumps({"type": "close"}))
                await socket.close()
            except require("openenv", "websockets.exceptions").ConnectionClosed:
                pass  # the server was faster

    async def _call_tools(self, action: Action) -> StepResult:
        parsed = tool_calls(action.text, self.tools)
        if not parsed.calls and not parsed.errors:
            self._done = True
            return StepResult(0.0, done=True, metrics={"tool_calls": 0.0})
        results: list[Message] = [{"role": "tool", "content": f"Error: {error}"} for error in parsed.errors]
        total = 0.0
        for call in parsed.calls:
            data = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            reply = await self._ask({"type": "step", "data": data}, refusable=True)
            if "refused" in reply:
                results.append({"role": "tool", "content": f"Error: {reply['refused']}"})
                continue
            total += _reward(reply)
            self._done = bool(reply["done"])
            results.append({"role": "tool", "content": _tool_result(reply["observation"])})
            if self._done:
                break
        metrics = {"tool_calls": float(len(parsed.calls)), "malformed_tool_calls": float(len(parsed.errors))}
        return StepResult(total, self._done, results, metrics=metrics)

    async def _open(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Connects and resets; a server that is full is asked again."""
        for attempt in range(ATTEMPTS):
            self._socket = await self._connect()
            reply = await self._ask({"type": "reset", "data": arguments}, refusable=True)
            if reply.get("code") != "CAPACITY_REACHED":
                break
            await self.close()
            await asyncio.sleep(min(1.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.5))
        if "refused" in reply:
            raise EnvironmentFailedError(f"{self.url} refused to reset: {reply['refused']}", hint=str(arguments)[:200])
        return reply

    async def _connect(self) -> Any:
        websockets = require("openenv", "websockets.asyncio.client")
        parts = urlsplit(self.url)
        address = f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{parts.path}/ws"
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        proxy: dict[str, Any] = {"proxy": None} if local else {}
        try:
            return await websockets.connect(
                address,
                max_size=LARGEST_MESSAGE,
                open_timeout=CONNECT_TIMEOUT_S,
                additional_headers=self._headers,
                **proxy,
            )
        except (OSError, TimeoutError, require("openenv", "websockets.exceptions").WebSocketException) as error:
            raise EnvironmentFailedError(f"no session at {self.url}: {error or type(error).__name__}") from error

    async def _ask(self, message: dict[str, Any], *, refusable: bool = False) -> dict[str, Any]:
        """The reply's data. With `refusable`, what the server says against the message comes back as `refused` and `code`.

        Raises:
            EnvironmentFailedError: the server failed, answered with something else, or is gone.
        """
        closed = require("openenv", "websockets.exceptions").ConnectionClosed
        try:
            with suppress(closed):  # a server that refuses the session says why before it closes
                await self._socket.send(json.dumps(message))
            reply = json.loads(await self._socket.recv())
        except closed as error:
            raise EnvironmentFailedError(f"the session at {self.url} ended: {error}") from error
        except ValueError as error:
            raise EnvironmentFailedError(f"{self.url} answered with something that is no JSON: {error}") from error
        data = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(data, dict):
            raise EnvironmentFailedError(f"{self.url} answered with {str(reply)[:200]}")
        if reply.get("type") == "error":
            code, text = str(data.get("code", "")), str(data.get("message", "unknown error"))
            details = "; ".join(f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in data.get("errors") or ())
            text = f"{text} ({details})" if details else text
            if refusable and code in ("VALIDATION_ERROR", "CAPACITY_REACHED"):
                return {"refused": text, "code": code}
            raise EnvironmentFailedError(f"the environment at {self.url} failed: {text} [{code}]")
        if "observation" not in data or "done" not in data:
            raise EnvironmentFailedError(f"{self.url} answered without an observation: {str(data)[:200]}")
        return data

    def _fits(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The action's fields, without metadata.

        Raises:
            ConfigError: `action_field` is none of them.
        """
        fields = {name: field for name, field in schema.get("action", {}).get("properties", {}).items() if name != "metadata"}
        if self._action_field and self._action_field not in fields:
            known = ", ".join(fields) or "none"
            raise ConfigError(f"the action at {self.url} has no field '{self._action_field}'", hint=f"its fields: {known}")
        return fields

    def _data(self, text: str) -> tuple[dict[str, Any], str]:
        """The action that a text means, or what is wrong with it."""
        texts = [name for name, field in self._action.items() if field.get("type") == "string"]
        field = self._action_field or (texts[0] if len(texts) == 1 == len(self._action) else "")
        if field:
            return {field: _typed(answer_of(text), self._action[field])}, ""
        if len(self._action) == 1:
            (name, only), answer = next(iter(self._action.items())), answer_of(text)
            if only.get("type") in ("integer", "number", "boolean"):
                return {name: _typed(answer, only)}, ""
        try:
            data = json.loads(answer_of(text))
        except ValueError:
            data = None
        if not isinstance(data, dict):
            return {}, f"Answer with a JSON object that has the fields {', '.join(self._action)}."
        return data, ""

    def _seen(self, observation: Any) -> str:
        if not isinstance(observation, Mapping):
            return in_words(observation)
        shown = {name: value for name, value in observation.items() if name not in ("metadata", "done", "reward")}
        if self._observation_field:
            if self._observation_field not in shown:
                known = ", ".join(shown)
                raise EnvironmentFailedError(
                    f"the observation has no field '{self._observation_field}'", hint=f"it has {known}"
                )
            return in_words(shown[self._observation_field])
        if len(shown) == 1:
            return in_words(next(iter(shown.values())))
        return "\n".join(f"{name}: {in_words(value)}" for name, value in shown.items() if value not in (None, "", [], {}))


@functools.cache
def environment_class(spec: str) -> type[Environment]:
    """The environment that the OpenEnv server at `spec` has.

    Raises:
        EnvironmentLoadError: `websockets` is not installed, or `spec` is no http(s) URL.
    """
    require("openenv")
    parts = urlsplit(spec)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EnvironmentLoadError(f"'openenv:{spec}' has no URL", hint="name it openenv:http://host:port")
    return adapted("openenv", spec, OpenEnvEnvironment, url=spec.rstrip("/"))


async def _schema(url: str, client: httpx.AsyncClient) -> Mapping[str, Any]:
    try:
        return _schema_of(await client.get(f"{url}/schema"))
    except httpx.HTTPError as error:
        raise EnvironmentFailedError(str(_no_schema(url, error))) from error


def _schema_of(response: httpx.Response) -> Mapping[str, Any]:
    try:
        schema = response.raise_for_status().json()
    except ValueError as error:
        raise httpx.DecodingError(f"it is no JSON: {error}") from error
    if not isinstance(schema, Mapping) or not isinstance(schema.get("action"), Mapping):
        raise httpx.DecodingError("it has no schema of the action")
    return schema


def _no_schema(url: str, error: Exception) -> EnvironmentLoadError:
    hint = "is an OpenEnv server running there?"
    return EnvironmentLoadError(f"{url}/schema gave no schema: {error or type(error).__name__}", hint=hint)


def _reward(reply: Mapping[str, Any]) -> float:
    reward = reply.get("reward")
    return 0.0 if reward is None else reward  # what is no number is reported by the check of every step


def _typed(text: str, field: Mapping[str, Any]) -> Any:
    """The text as the field's type where it can be read so; the server says what is wrong with the rest."""
    if field.get("type") not in ("integer", "number", "boolean"):
        return text
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": schema}
    return {"type": "function", "function": function}


def _tool_result(observation: Mapping[str, Any]) -> str:
    error = observation.get("error")
    if error:
        return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result")
    if isinstance(result, Mapping):  # fastmcp's form: the value itself, or a list of contents
        if result.get("data") is not None:
            return in_words(result["data"])
        texts = [str(c.get("text", "")) for c in result.get("content") or () if isinstance(c, Mapping)]
        return "\n".join(texts) if texts else json.dumps(result)
    if isinstance(result, Sequence) and not isinstance(result, str):
        return json.dumps(list(result))
    return in_words(result)
