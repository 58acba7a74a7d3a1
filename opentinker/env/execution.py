"""Runs an author's environment: every call has a deadline, and what comes back is checked before anything uses it."""

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from opentinker.env.deadline import context_with
from opentinker.env.environment import Action, Environment, Message, Part, StepResult, Tool
from opentinker.env.threads import UserThreads
from opentinker.errors import DeadlineError, EnvironmentFailedError
from opentinker.images import Image

ROLES = ("system", "user", "assistant", "tool")


class EnvironmentSession:
    """One environment from its construction to `close`.

    Async methods run on the event loop, plain ones in a thread, so that slow user code stalls nobody else. A call that outlives
    its deadline is abandoned: what it answers later is ignored.
    """

    def __init__(self, make: Callable[[], Environment], threads: UserThreads) -> None:
        self._make = make
        self._threads = threads
        self._environment: Environment | None = None
        self._to_close: list[Environment] = []
        self._closed = False
        self._done = False
        self._plain: Callable[[], Any] | None = None
        self.seconds = 0.0
        """Time spent in the environment so far."""
        self.tools: tuple[Tool, ...] = ()
        """Of the environment, after `reset`."""
        self.finalizes = False
        """Whether the environment has a last reward to give; known after `reset`."""

    async def reset(self, task: Any, timeout_s: float) -> tuple[Message, ...]:
        """Construct and reset the environment; the first messages.

        Raises:
            EnvironmentFailedError: it raised, or its observation is malformed.
            DeadlineError: it took longer than `timeout_s`.
        """
        start = time.perf_counter()
        self._environment = await self._call(self._construct, timeout_s, "the environment's constructor")
        what = f"{type(self._environment).__name__}.reset"
        left = timeout_s - (time.perf_counter() - start)
        observation = await self._call(self._environment.reset, left, what, task)
        self.tools = checked_tools(self._environment.tools, type(self._environment).__name__)
        self.finalizes = type(self._environment).finalize is not Environment.finalize
        return messages_of(observation, what)

    async def step(self, action: Action, timeout_s: float) -> StepResult:
        """Apply an action. The result's observation is a tuple of messages, its numbers are finite floats.

        Raises:
            EnvironmentFailedError: it raised, or its result is malformed.
            DeadlineError: it took longer than `timeout_s`.
        """
        assert self._environment is not None, "step follows reset"
        if self._done:
            raise EnvironmentFailedError("step: the episode is done", hint="an environment is used once: make another one")
        what = f"{type(self._environment).__name__}.step"
        result = checked_step(await self._call(self._environment.step, timeout_s, what, action), what)
        self._done = result.done
        return result

    async def finalize(self, timeout_s: float) -> StepResult:
        """The environment's last reward, as the result of a step that is done.

        Raises:
            EnvironmentFailedError: it raised, or its reward is malformed.
            DeadlineError: it took longer than `timeout_s`.
        """
        assert self._environment is not None, "finalize follows reset"
        what = f"{type(self._environment).__name__}.finalize"
        reward = await self._call(self._environment.finalize, timeout_s, what)
        return checked_step(StepResult(0.0 if reward is None else reward, done=True), what)

    async def close(self, timeout_s: float) -> None:
        """Close the environment, if it was constructed; one that is constructed later closes itself.

        Raises:
            EnvironmentFailedError: it raised.
            DeadlineError: it took longer than `timeout_s`.
        """
        self._closed = True
        for environment in _taken(self._to_close):
            await self._call(environment.close, timeout_s, f"{type(environment).__name__}.close")

    def _construct(self) -> Environment:
        environment = self._make()
        self._to_close.append(environment)
        if self._closed:
            for late in _taken(self._to_close):
                late.close()
        return environment

    async def _call(self, function: Callable[..., Any], timeout_s: float, what: str, *args: Any) -> Any:
        start = time.perf_counter()
        task = asyncio.get_running_loop().create_task(self._invoke(function, what, args), context=context_with(timeout_s))
        try:
            done, _ = await asyncio.wait({task}, timeout=max(0.0, timeout_s))
            if not done:
                raise DeadlineError(f"{what} did not return within {timeout_s:.3g} s{self._place(task, function)}")
            if task.cancelled():
                raise EnvironmentFailedError(f"{what} raised CancelledError")
            return task.result()
        finally:
            # An async method that ignores its cancellation is left behind, like a thread that hangs.
            task.cancel()
            task.add_done_callback(_forget)
            self.seconds += time.perf_counter() - start

    async def _invoke(self, function: Callable[..., Any], what: str, args: tuple[Any, ...]) -> Any:
        if inspect.iscoroutinefunction(function):
            value = function(*args)
        else:

            def plain() -> Any:
                with reported(what, function):
                    return function(*args)

            self._plain = plain
            value = await self._threads.call(plain)
        if not isinstance(value, Awaitable):
            return value
        with reported(what, function):
            return await value

    def _place(self, task: "asyncio.Task[Any]", function: Callable[..., Any]) -> str:
        """The author's line at which a call is now, where that can be told."""
        stack = _suspended_at(task) + (self._threads.stack(self._plain) if self._plain is not None else [])
        code = getattr(inspect.unwrap(function), "__code__", None)
        own = [f" ({file}:{line})" for file, line in stack if code is not None and file == code.co_filename != __file__]
        return own[-1] if own else ""


def _suspended_at(task: "asyncio.Task[Any]") -> list[tuple[str, int]]:
    """Files and lines of the coroutines that a task waits in, the innermost last."""
    lines: list[tuple[str, int]] = []
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        waiting = waiting.cr_await
    return lines


def _taken(environments: list[Environment]) -> Iterator[Environment]:
    """Empties the list; each element goes to one taker only, whichever thread asks (`pop` is atomic)."""
    with suppress(IndexError):
        while True:
            yield environments.pop()


@contextmanager
def reported(what: str, function: Callable[..., Any]) -> Iterator[None]:
    """Turns whatever user code raises, SystemExit and StopIteration too, into an error that says where to look."""
    try:
        yield
    except (asyncio.CancelledError, EnvironmentFailedError, DeadlineError):
        raise  # an environment that runs elsewhere says itself what happened there
    except BaseException as error:
        # Python wraps a coroutine's StopIteration, which hides where it came from.
        first = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
        text = f"{type(first).__name__}: {first}".removesuffix(": ")
        raise EnvironmentFailedError(f"{what} raised {text}{_location(first, function)}") from error


def _location(error: BaseException, function: Callable[..., Any]) -> str:
    """The deepest line in the file that defines the method; if there is none, the deepest one of all."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [f for f in frames if code is not None and f[0] == code.co_filename]
    return " ({}:{})".format(*(own or frames)[-1]) if frames else ""


def messages_of(observation: Any, what: str) -> tuple[Message, ...]:
    """An observation as messages: a text, an image or parts are one user message.

    Raises:
        EnvironmentFailedError: it is none of these, or it is empty.
    """
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}] if observation else []
    elif _is_image(observation):
        observation = [{"role": "user", "content": [{"type": "image", "image": observation}]}]
    if not isinstance(observation, Sequence) or not all(isinstance(m, Mapping) for m in observation):
        raise EnvironmentFailedError(
            f"{what} gave an observation of type {type(observation).__name__}",
            hint="give a text, an image, a list of parts or a list of messages",
        )
    if observation and all("type" in part and "role" not in part for part in observation):
        observation = [{"role": "user", "content": observation}]
    if not observation:
        raise EnvironmentFailedError(f"{what} gave an empty observation, but the episode goes on")
    return tuple(_message(message, what) for message in observation)


def _message(message: Mapping[str, Any], what: str) -> Message:
    content = message.get("content")
    if message.get("role") not in ROLES or not isinstance(content, str | Sequence) or isinstance(content, bytes):
        raise EnvironmentFailedError(
            f"{what} gave a message that is not one: {dict(message)!r}"[:300],
            hint=f"a message has a 'role' ({', '.join(ROLES)}) and a 'content', a text or a list of parts",
        )
    if not isinstance(content, str):
        content = [_part(part, what) for part in content]
    return cast(Message, {**message, "content": content})


def _part(part: Any, what: str) -> Part:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "image": image}:
            try:
                return {"type": "image", "image": Image.of(image)}
            except (ValueError, OSError) as error:
                raise EnvironmentFailedError(f"{what} gave an image that is not one: {error}") from error
    raise EnvironmentFailedError(
        f"{what} gave a part that is not one: {part!r}"[:300],
        hint="a part is {'type': 'text', 'text': ...} or {'type': 'image', 'image': ...}",
    )


def _is_image(value: Any) -> bool:
    return isinstance(value, Image) or (not isinstance(value, Sequence | Mapping) and callable(getattr(value, "save", None)))


def checked_tools(tools: Any, what: str) -> tuple[Tool, ...]:
    """Tools as a tuple of JSON objects.

    Raises:
        EnvironmentFailedError: one is not OpenAI's schema of a function.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise EnvironmentFailedError(f"{what}.tools must be a list of tools, not {type(tools).__name__}")
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(), **rest}} if isinstance(rest.get("parameters", {}), Mapping):
                continue
        raise EnvironmentFailedError(
            f"{what}.tools has an entry that is not a tool: {tool!r}"[:300],
            hint="a tool is {'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': JSON schema}}",
        )
    return tuple(tools)


def checked_step(result: Any, what: str) -> StepResult:
    """`result` with its numbers as floats and its observation as messages; when done, the observation may be empty.

    Raises:
        EnvironmentFailedError: it is not a StepResult, or a field is not what it should be.
    """
    if not isinstance(result, StepResult):
        raise EnvironmentFailedError(
            f"{what} returned {type(result).__name__}",
            hint="return opentinker.StepResult(reward=..., done=..., observation=...)",
        )
    named = result.reward if isinstance(result.reward, Mapping) else result.components
    components = _numbers(named, what, "component")
    reward = sum(components.values()) if named is result.reward else _number(result.reward, f"{what}: the reward")
    metrics = _numbers(result.metrics, what, "metric")
    silent = bool(result.done) and not len(result.observation if isinstance(result.observation, Sequence) else "?")
    observation = () if silent else messages_of(result.observation, what)
    return StepResult(_number(reward, f"{what}: the reward"), bool(result.done), observation, metrics, components)


def _numbers(values: Any, what: str, noun: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise EnvironmentFailedError(f"{what}: {noun}s must be a dict of numbers, not {type(values).__name__}")
    return {str(name): _number(value, f"{what}: {noun} '{name}'") for name, value in values.items()}


def _number(value: Any, what: str) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise EnvironmentFailedError(f"{what} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailedError(f"{what} must be a number: {error}") from error
    if not math.isfinite(number):
        raise EnvironmentFailedError(f"{what} is {number}; it must be finite")
    return number


def _forget(task: "asyncio.Task[Any]") -> None:
    """A late answer or error is nobody's any more; looking at it keeps asyncio from logging it."""
    if not task.cancelled():
        task.exception()
