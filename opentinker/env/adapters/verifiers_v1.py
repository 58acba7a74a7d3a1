"""Tasksets of verifiers 0.4: what `verifiers:NAME` stands for with that version.

verifiers runs the episode itself. Its model is the policy, and the agent's program is a chat loop in this process, which calls
the task's tools; programs that run code in a sandbox of their own are not used.
"""

import asyncio
import functools
import itertools
import json
import sys
import threading
import time
import types
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import httpx

from opentinker.env.adapters.chat import calls_of, without_none
from opentinker.env.adapters.common import adapted, require
from opentinker.env.adapters.dialogue import Ask, DialogueEnvironment, Question
from opentinker.env.environment import Environment, StepResult
from opentinker.env.tasks import ListTasks, Split, TaskSource
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError

MOST_TASKS = 10_000
"""Tasks taken of a taskset that has no end."""
_POLICY = "http://opentinker.invalid/policy"
_HARNESS = "opentinker_chat"


class TasksetEnvironment(DialogueEnvironment):
    """An episode of a taskset of verifiers; the arguments are the taskset's own.

    `held_out` are arguments that select the held-out tasks, such as {split: test}; without them there are none. The reward's
    components are the task's rewards times their weights.

    Raises:
        EnvironmentLoadError: it cannot be loaded.
    """

    taskset_id: ClassVar[str]
    host_args: ClassVar[tuple[str, ...]] = ("*",)
    """What a package of others does with its arguments, loading data or asking a judge elsewhere, is not known here."""

    def __init__(self, held_out: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self._env = _loaded(self.taskset_id, json.dumps(options, sort_keys=True))

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        options = {name: value for name, value in args.items() if name != "held_out"}
        if split == "held_out":
            if not args.get("held_out"):
                return ListTasks([], shuffle=False)
            options |= args["held_out"]
        taskset = _loaded(cls.taskset_id, json.dumps(options, sort_keys=True)).taskset
        tasks = taskset if taskset.bounded else itertools.islice(taskset, MOST_TASKS)
        rows = [without_none(task.data.model_dump(mode="json")) for task in tasks]
        if not rows:
            raise ConfigError(f"verifiers:{cls.taskset_id} has no tasks", hint="check environment.args")
        return ListTasks(rows, shuffle=split == "train")

    async def run(self, task: Any, ask: Ask) -> Any:
        v1 = _v1()
        await _serving(self._env)
        kind = type(self._env.taskset).task_type()
        try:
            played = kind(kind.data_type().model_validate(task), self._env.config.taskset.task)
        except ValueError as error:
            raise EnvironmentFailedError(
                f"the task {str(task)[:100]} is none of verifiers:{self.taskset_id}: {error}"
            ) from error
        context = v1.ModelContext(model="policy", client=v1.EvalClientConfig(base_url=_POLICY))
        traces: list[str] = []

        def register(trace: Any) -> None:
            traces.append(trace.id)
            _ASKS[trace.id] = ask

        try:
            return await self._env.run_episode(played, context, on_trace=register)
        finally:
            for trace in traces:
                _ASKS.pop(trace, None)
                _CUT.discard(trace)

    def cut_short(self) -> Exception:
        return _CutShortError()

    def result(self, outcome: Any) -> StepResult:
        errors = [*outcome.errors, *(error for trace in outcome.traces for error in trace.errors)]
        if errors or not outcome.traces:
            text = f"{errors[-1].type}: {errors[-1].message}" if errors else "no agent ran"
            raise EnvironmentFailedError(f"verifiers:{self.taskset_id}: {text}")
        trace = outcome.traces[0]
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return StepResult(parts if parts else 0.0, done=True, metrics=metrics | {"timed_out": float(trace.is_timeout)})


class _CutShortError(Exception):
    """The episode has no room for another turn."""


def taskset_class(spec: str) -> type[Environment]:
    """The environment of the installed taskset `spec`."""
    return adapted("verifiers", spec, TasksetEnvironment, taskset_id=spec)


_ASKS: dict[str, Ask] = {}
"""Who answers the model calls of a trace."""
_CUT: set[str] = set()
"""Traces whose episode ended before they did."""
_LOADING = threading.Lock()


def _loaded(taskset_id: str, options: str) -> Any:
    with _LOADING:
        return _load(taskset_id, options)


@functools.cache
def _load(taskset_id: str, options: str) -> Any:
    v1 = _v1()
    taskset = {"id": taskset_id, **json.loads(options)}
    agent = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}, "network_notice": False}
    try:
        return v1.load_environment(v1.resolve_env_config({"taskset": taskset, "agent": agent}))
    except Exception as error:  # whatever the taskset's own loading raises
        text = f"verifiers cannot load '{taskset_id}': {type(error).__name__}: {error}"
        raise EnvironmentLoadError(text, hint="check environment.args") from error


async def _serving(env: Any) -> None:
    """Starts what the environment's episodes share, once; it lives as long as the process."""
    if not hasattr(env, "_opentinker_serving"):
        env._opentinker_serving = _started(env)
    start: Callable[[], Awaitable[None]] = env._opentinker_serving
    await start()


def _started(env: Any) -> Callable[[], Awaitable[None]]:
    task: list[asyncio.Task[None]] = []
    stack = AsyncExitStack()

    async def enter() -> None:
        await stack.enter_async_context(env.serving())

    async def start() -> None:
        if not task:
            task.append(asyncio.get_running_loop().create_task(enter()))
        await asyncio.shield(task[0])

    return start


@functools.cache
def _v1() -> Any:
    """The package, with the policy as one of its clients and our chat loop as one of its harnesses."""
    v1 = require("verifiers", "verifiers.v1")
    server: Any = require("verifiers", "verifiers.v1.interception.server")
    module = types.ModuleType(_HARNESS)
    vars(module).update({"__all__": ["ChatHarness"], "ChatHarness": _harness_class(v1)})
    sys.modules[_HARNESS] = module
    resolve, client = server.resolve_client, _client_class(v1)
    server.resolve_client = lambda config: client() if config.base_url == _POLICY else resolve(config)
    return v1


def _client_class(v1: Any) -> Any:
    base: Any = v1.Client

    class PolicyClient(base):  # type: ignore[misc]
        async def get_response(
            self,
            dialect: Any,
            body: dict[str, Any],
            sampling: Any,
            session_id: Any = None,
            turn: Any = None,
            headers: Any = None,
        ) -> Any:
            ask = _ASKS.get(str(session_id))
            if ask is None:
                raise EnvironmentFailedError(f"nobody answers the model calls of {session_id}")
            try:
                action = await ask(Question([without_none(m) for m in body["messages"]], body.get("tools") or ()))
            except _CutShortError:
                _CUT.add(str(session_id))
                raise
            calls = [
                {
                    "id": f"call_{uuid.uuid4().hex[:12]}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for name, arguments in (calls_of(action.text) if body.get("tools") else ())
            ]
            message = {"role": "assistant", "content": action.text, **({"tool_calls": calls} if calls else {})}
            if action.reasoning:
                message["reasoning_content"] = action.reasoning
            reason = "length" if action.truncated else "tool_calls" if calls else "stop"
            raw = {
                "id": uuid.uuid4().hex,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": str(body.get("model", "policy")),
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            }
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            return response

    return PolicyClient


def _harness_class(v1: Any) -> Any:
    base: Any = v1.Harness[v1.HarnessConfig]
    mcp = require("verifiers", "verifiers.v1.harnesses.utils.mcp")
    chat = require("verifiers", "verifiers.v1.dialects.chat")

    class ChatHarness(base):  # type: ignore[misc]
        """Answers, calls tools, answers again, until the policy calls none."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            **_: Any,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            messages += (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else [chat.message_to_wire(message) for message in prompt or ()]
            )
            async with AsyncExitStack() as stack:
                servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
                tools, dispatch, connections = await mcp.connect_mcp(servers, stack)
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
                while True:
                    body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                    response = await client.post(
                        f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                    )
                    if trace.id in _CUT:  # no failure: what was said so far is scored
                        return v1.ProgramResult(exit_code=0, stdout="", stderr="")
                    if response.status_code != 200:
                        return v1.ProgramResult(exit_code=1, stdout="", stderr=response.text)
                    message = response.json()["choices"][0]["message"]
                    messages.append(message)
                    if not message.get("tool_calls"):
                        return v1.ProgramResult(exit_code=0, stdout="", stderr="")
                    for call in message["tool_calls"]:
                        messages.append(await self._called(call, dispatch, connections))

        async def _called(self, call: Any, dispatch: Any, connections: Any) -> dict[str, Any]:
            name = call["function"]["name"]
            result: dict[str, Any] = {"role": "tool", "tool_call_id": call["id"], "name": name}
            if name not in dispatch:
                return result | {"content": f"error: there is no tool '{name}'"}
            content = await mcp.call_mcp(connections, dispatch, name, json.loads(call["function"]["arguments"]))
            return result | {"content": content}

    return ChatHarness
