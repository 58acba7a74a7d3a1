"""Environments of verifiers: `verifiers:NAME`, where NAME is an installed environment. Its own rollout and rubric run."""

import functools
import importlib
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

from opentinker.env.adapters.chat import calls_of, dumped, message_of, without_none
from opentinker.env.adapters.common import adapted, require
from opentinker.env.adapters.dialogue import Ask, DialogueEnvironment, Question
from opentinker.env.environment import Environment, StepResult
from opentinker.env.tasks import ListTasks, Split, TaskSource
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError


class VerifiersEnvironment(DialogueEnvironment):
    """An episode of an environment of verifiers; the arguments are those of its `load_environment`.

    Tasks are the rows of its dataset, held-out ones those of its evaluation dataset. Each of its model calls is a turn of the
    policy, until its rollout ends; then its rubric scores. The reward's components are the rubric's functions times their
    weights; functions without weight are metrics.

    Raises:
        ConfigError: an argument is wrong, or rewards compare the rollouts of a group.
        EnvironmentLoadError: it cannot be loaded.
    """

    environment_id: ClassVar[str]
    host_args: ClassVar[tuple[str, ...]] = ("*",)
    """What a package of others does with its arguments, loading data or asking a judge elsewhere, is not known here."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._env = _loaded(self.environment_id, json.dumps(options, sort_keys=True))

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

    async def run(self, task: Any, ask: Ask) -> Any:
        if not isinstance(task, Mapping) or "prompt" not in task:
            raise EnvironmentFailedError(f"the task {str(task)[:100]} is no row of verifiers:{self.environment_id}")
        state = await self._env.rollout(dict(task), _client_class()(ask), "policy", {})
        if state.get("error") is None:
            if getattr(self._env, "score_rollouts", True):
                await self._env.rubric.score_rollout(state)
            await self._env.rubric.cleanup(state)
        return state

    def cut_short(self) -> Exception:
        error: Exception = require("verifiers").OverlongPromptError("the episode was cut short")
        return error

    def result(self, outcome: Mapping[str, Any]) -> StepResult:
        state = outcome
        if state.get("error") is not None:
            raise EnvironmentFailedError(f"verifiers:{self.environment_id}: {_error(state['error'])}")
        total = float(state.get("reward") or 0.0)
        values = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        rubric = self._env.rubric
        weights = dict(zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=False))
        parts = {name: value * weights[name] for name, value in values.items() if weights.get(name)}
        whole = math.isclose(sum(parts.values()), total, rel_tol=1e-6, abs_tol=1e-9)
        metrics = {name: value for name, value in values.items() if name not in parts}
        metrics["timed_out"] = float(bool(state.get("timed_out")))
        last = [
            message_of(dumped(message)) for message in state.get("final_env_response") or () if not isinstance(message, str)
        ]
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
    module = spec.split("@")[0].replace("-", "_").split("/")[-1]
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        hint = f"prime env install {spec}, or pip install its package, whose module is {module}"
        raise EnvironmentLoadError(f"the environment '{spec}' of verifiers is not installed", hint=hint)
    if not hasattr(verifiers, "load_environment"):  # 0.4 has tasksets instead
        return importlib.import_module("opentinker.env.adapters.verifiers_v1").taskset_class(spec)  # type: ignore[no-any-return]
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
            messages = [dumped(message) for message in prompt]
            action = await self._ask(Question(messages, [dumped(tool) for tool in tools or ()]))
            calls = [
                types.ToolCall(id=f"call_{uuid.uuid4().hex[:12]}", name=name, arguments=json.dumps(arguments))
                for name, arguments in (calls_of(action.text) if tools else ())
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


def _error(error: BaseException) -> str:
    cause = error.__cause__
    return f"{type(error).__name__}: {error}" + (f" ({type(cause).__name__}: {cause})" if cause else "")
