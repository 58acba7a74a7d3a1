"""Environments of verifiers: `verifiers:NAME`, where NAME is an installed environment. Its own rollout and rubric run."""

import functools
import importlib.util
import json
import math
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from opentinker.env.adapters.common import adapted, require
from opentinker.env.adapters.dialogue import Ask, Dialogue, Question, apart, new_messages
from opentinker.env.environment import Action, Environment, Message, Reward, StepResult
from opentinker.env.tasks import ListTasks, Split, TaskSource
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError
from opentinker.images import Image

CLASSIC = "0.3"
"""The last versions whose environments are loaded by `verifiers.load_environment`."""


class VerifiersEnvironment(Environment):
    """An episode of an environment of verifiers; the arguments are those of its `load_environment`.

    Tasks are the rows of its dataset, held-out ones those of its evaluation dataset. Each of its model calls is a turn of the
    policy, until its rollout ends; then its rubric scores. The reward's components are the rubric's functions times their
    weights; functions without weight are metrics.

    Raises:
        ConfigError: an argument is wrong, or rewards compare the rollouts of a group.
        EnvironmentLoadError: it cannot be loaded.
    """

    environment_id: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        self._env = _loaded(self.environment_id, json.dumps(options, sort_keys=True))
        self._dialogue: Dialogue[Any] | None = None
        self._said: Sequence[Mapping[str, Any]] = ()
        self._done = False

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        env = _loaded(cls.environment_id, json.dumps(dict(args), sort_keys=True))
        if getattr(env.rubric, "has_group_rewards", False):
            hint = "use reward functions of single rollouts; advantages compare the group anyway"
            raise ConfigError(f"verifiers:{cls.environment_id} has rewards that compare the rollouts of a group", hint=hint)
        if split == "held_out":
            evaluated = env.build_eval_dataset() is not None
            return ListTasks(_Rows(env.get_eval_dataset()) if evaluated else [], shuffle=False)
        if env.build_dataset() is None:
            raise ConfigError(f"verifiers:{cls.environment_id} has no training dataset, only one for evaluation")
        return ListTasks(_Rows(env.get_dataset()))

    async def reset(self, task: Any) -> list[Message]:
        if not isinstance(task, Mapping) or "prompt" not in task:
            raise EnvironmentFailedError(f"the task {str(task)[:100]} is no row of verifiers:{self.environment_id}")
        asked = await apart(self._begin(dict(task)))
        if not isinstance(asked, Question):
            raise EnvironmentFailedError(f"verifiers:{self.environment_id} ended before it asked the policy: {_error(asked)}")
        self.tools, self._said = [_function(tool) for tool in asked.tools], asked.messages
        return [_message(message) for message in asked.messages]

    async def step(self, action: Action) -> StepResult:
        if self._done:
            raise RuntimeError("the episode is over")
        assert self._dialogue is not None, "step follows reset"
        asked = await apart(self._dialogue.next(action))
        if isinstance(asked, Question):
            news = new_messages(self._said, asked.messages)
            self._said = asked.messages
            return StepResult(0.0, observation=[_message(message) for message in news])
        self._done = True
        if _error(asked):
            raise EnvironmentFailedError(f"verifiers:{self.environment_id}: {_error(asked)}")
        return self._scored(asked)

    async def finalize(self) -> Reward | None:
        """An episode that was cut short is scored as it stands, as verifiers does with a prompt that grew too long."""
        if self._done or self._dialogue is None:
            return None
        asked = await apart(self._dialogue.next(require("verifiers").OverlongPromptError("the episode was cut short")))
        if isinstance(asked, Question):
            raise EnvironmentFailedError(
                f"verifiers:{self.environment_id} goes on although it was told that the prompt is too long"
            )
        return self._scored(asked).reward

    async def close(self) -> None:  # type: ignore[override]
        if self._dialogue is not None:
            await apart(self._dialogue.stop())

    async def _begin(self, row: dict[str, Any]) -> Any:
        self._dialogue = Dialogue(functools.partial(self._run, row))
        return await self._dialogue.next()

    async def _run(self, row: dict[str, Any], ask: Ask) -> Any:
        client = _client_class()(ask)
        state = await self._env.rollout(row, client, "policy", {})
        if state.get("error") is None:
            if getattr(self._env, "score_rollouts", True):
                await self._env.rubric.score_rollout(state)
            await self._env.rubric.cleanup(state)
        return state

    def _scored(self, state: Mapping[str, Any]) -> StepResult:
        total = float(state.get("reward") or 0.0)
        values = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        rubric = self._env.rubric
        weights = dict(zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=False))
        parts = {name: value * weights[name] for name, value in values.items() if weights.get(name)}
        whole = math.isclose(sum(parts.values()), total, rel_tol=1e-6, abs_tol=1e-9)
        metrics = {name: value for name, value in values.items() if name not in parts}
        metrics["timed_out"] = float(bool(state.get("timed_out")))
        last = [_message(_dumped(message)) for message in state.get("final_env_response") or () if not isinstance(message, str)]
        return StepResult(parts if parts and whole else total, done=True, observation=last, metrics=metrics)


class _Rows(Sequence[Any]):
    """A dataset's rows as tasks, read when they are drawn; columns that a row does not have are left out."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: Any) -> Any:
        return without_none(self._dataset[place])


@functools.cache
def environment_class(spec: str) -> type[Environment]:
    """The environment that the installed package `spec` has.

    Raises:
        EnvironmentLoadError: verifiers is not installed, is a version without `load_environment`, or there is no such package.
    """
    verifiers = require("verifiers")
    if not hasattr(verifiers, "load_environment"):
        raise EnvironmentLoadError(
            f"verifiers {verifiers.__version__} has no load_environment", hint=f"pip install 'verifiers>=0.1.14,<={CLASSIC}.1'"
        )
    module = spec.split("@")[0].replace("-", "_").split("/")[-1]
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        hint = f"prime env install {spec}, or pip install its package, whose module is {module}"
        raise EnvironmentLoadError(f"the environment '{spec}' of verifiers is not installed", hint=hint)
    return adapted("verifiers", spec, VerifiersEnvironment, environment_id=spec)


_LOADING = threading.Lock()


def _loaded(environment_id: str, options: str) -> Any:
    with _LOADING:
        return _load(environment_id, options)


@functools.cache
def _load(environment_id: str, options: str) -> Any:
    with _signals_left_alone():
        try:
            return require("verifiers").load_environment(environment_id, **json.loads(options))
        except Exception as error:  # whatever the environment's own loading raises
            text = f"verifiers cannot load '{environment_id}': {type(error).__name__}: {error}"
            raise EnvironmentLoadError(text, hint="check environment.args") from error


@contextmanager
def _signals_left_alone() -> Iterator[None]:
    """verifiers' environments take over SIGINT and SIGTERM, which belong to the process, and fail to in other threads."""
    original = signal.signal
    signal.signal = lambda number, handler: signal.getsignal(number)  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = original


@functools.cache
def _client_class() -> Any:
    """A client of verifiers that asks the policy."""
    verifiers, types = require("verifiers"), require("verifiers", "verifiers.types")
    base: Any = verifiers.Client

    class PolicyClient(base):  # type: ignore[misc]
        def __init__(self, ask: Ask) -> None:
            super().__init__(None)
            self._ask = ask

        async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            messages = [_dumped(message) for message in prompt]
            action = await self._ask(Question(messages, [_dumped(tool) for tool in tools or ()]))
            calls = [
                types.ToolCall(id=f"call_{uuid.uuid4().hex[:12]}", name=name, arguments=json.dumps(arguments))
                for name, arguments in (_calls(action.text) if tools else ())
            ]
            reason = "length" if action.truncated else "tool_calls" if calls else "stop"
            message = types.ResponseMessage(
                content=action.text,
                reasoning_content=action.reasoning or None,
                tool_calls=calls or None,
                finish_reason=reason,
                is_truncated=action.truncated,
            )
            return types.Response(id=uuid.uuid4().hex, created=int(time.time()), model=model, usage=None, message=message)

        def setup_client(self, config: Any) -> Any:
            return None

        async def close(self) -> None:
            pass

        async def _unused(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError("get_response answers by itself")

        to_native_tool = to_native_prompt = get_native_response = _unused
        raise_from_native_response = from_native_response = _unused

    return PolicyClient


def _calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    parsed = importlib.import_module("opentinker.env.parsing").tool_calls(text)
    return [(call.name, call.arguments) for call in parsed.calls]


def _dumped(value: Any) -> dict[str, Any]:
    dumped = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else dict(value)
    return without_none(dumped)  # type: ignore[no-any-return]


def without_none(value: Any) -> Any:
    """Without the keys that hold None: datasets give every row the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def _message(message: Mapping[str, Any]) -> Message:
    content: Any = message.get("content") or ""
    if not isinstance(content, str):
        content = [_part(part) for part in content]
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if calls and isinstance(content, str):
        written = [f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {c["arguments"]}}}\n</tool_call>' for c in calls]
        content = "\n".join([part for part in (content,) if part and "<tool_call>" not in part] + written)
    result: Message = {"role": str(message.get("role")), "content": content}
    if message.get("reasoning_content"):
        result["reasoning_content"] = str(message["reasoning_content"])
    return result


def _part(part: Any) -> Any:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        return {"type": "image", "image": Image.of(part["image_url"]["url"])}
    raise EnvironmentFailedError(f"a message has a part of type '{kind}'", hint="texts and images can be shown to the policy")


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool.get("parameters", {})}
    return {"type": "function", "function": function}


def _error(state: Mapping[str, Any]) -> str:
    error = state.get("error")
    if error is None:
        return ""
    cause = getattr(error, "__cause__", None)
    return f"{type(error).__name__}: {error}" + (f" ({type(cause).__name__}: {cause})" if cause else "")
