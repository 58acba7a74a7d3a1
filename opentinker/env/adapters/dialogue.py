"""Turns a program that asks a model for answers into an environment: each of its model calls becomes a turn of the policy."""

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from opentinker.env.adapters.chat import function_of, message_of
from opentinker.env.environment import Action, Environment, Message, Reward, StepResult
from opentinker.errors import EnvironmentFailedError

T = TypeVar("T")
CANCEL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Question:
    """A model call: the whole conversation and the tools, as the program sent them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


Ask = Callable[[Question], Awaitable[Action]]


class Dialogue(Generic[T]):
    """One run of a program. All methods belong to one event loop."""

    def __init__(self, run: Callable[[Ask], Coroutine[Any, Any, T]]) -> None:
        self._questions: asyncio.Queue[Question] = asyncio.Queue()
        self._answer: asyncio.Future[Action] | None = None
        self._task = asyncio.get_running_loop().create_task(run(self._ask))

    async def next(self, answer: Action | Exception | None = None) -> Question | T:
        """Answers the last question, or fails it, then waits for the next one or for the program's result.

        Raises:
            whatever the program raises.
        """
        if answer is not None:
            assert self._answer is not None, "an answer follows a question"
            if isinstance(answer, Exception):
                self._answer.set_exception(answer)
            else:
                self._answer.set_result(answer)
        question = asyncio.ensure_future(self._questions.get())
        try:
            await asyncio.wait({question, self._task}, return_when=asyncio.FIRST_COMPLETED)
            return question.result() if question.done() else self._task.result()
        finally:
            question.cancel()

    async def stop(self) -> None:
        """Cancels the program and waits a while for it to clean up."""
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=CANCEL_TIMEOUT_S)
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # whatever it was, it has been reported, or nobody waits for it

    async def _ask(self, question: Question) -> Action:
        if self._answer is not None and not self._answer.done():
            raise EnvironmentFailedError(
                "the environment asks the policy two things at once", hint="one conversation per episode can be trained"
            )
        self._answer = asyncio.get_running_loop().create_future()
        self._questions.put_nowait(question)
        return await self._answer


def new_messages(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """What a conversation says after `before` and the policy's answer to it.

    Raises:
        EnvironmentFailedError: it does not continue `before`.
    """
    kept = len(now) > len(before) and all(_same(a, b) for a, b in zip(before, now, strict=False))
    if not kept or now[len(before)].get("role") != "assistant":
        raise EnvironmentFailedError(
            "the environment rewrites the conversation between turns",
            hint="only environments that append to it can be trained: what the policy saw must be what it is trained on",
        )
    return now[len(before) + 1 :]


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.get("role") == b.get("role") and (a.get("content") or "") == (b.get("content") or "")


class DialogueEnvironment(Environment):
    """An environment whose episode is a run of a program that calls a model."""

    def __init__(self) -> None:
        self._dialogue: Dialogue[Any] | None = None
        self._said: Sequence[Mapping[str, Any]] = ()
        self._done = False

    async def run(self, task: Any, ask: Ask) -> Any:
        """The program: it calls `ask` for every answer of the policy, and gives its outcome."""
        raise NotImplementedError

    def cut_short(self) -> Exception:
        """What a model call raises when the episode ends before the program does, so that the program stops and scores."""
        raise NotImplementedError

    def result(self, outcome: Any) -> StepResult:
        """The last step's result.

        Raises:
            EnvironmentFailedError: the program failed.
        """
        raise NotImplementedError

    async def reset(self, task: Any) -> list[Message]:
        asked = await apart(self._begin(task))
        if not isinstance(asked, Question):
            self._done = True
            self.result(asked)
            raise EnvironmentFailedError(f"{type(self).__name__} ended before it asked the policy anything")
        self.tools, self._said = [function_of(tool) for tool in asked.tools], asked.messages
        return [message_of(message) for message in asked.messages]

    async def step(self, action: Action) -> StepResult:
        if self._done:
            raise RuntimeError("the episode is over")
        assert self._dialogue is not None, "step follows reset"
        asked = await apart(self._dialogue.next(action))
        if isinstance(asked, Question):
            news = new_messages(self._said, asked.messages)
            self._said = asked.messages
            return StepResult(0.0, observation=[message_of(message) for message in news])
        self._done = True
        return self.result(asked)

    async def finalize(self) -> Reward | None:
        """An episode that was cut short is scored as it stands."""
        if self._done or self._dialogue is None:
            return None
        self._done = True
        asked = await apart(self._dialogue.next(self.cut_short()))
        if isinstance(asked, Question):
            raise EnvironmentFailedError(f"{type(self).__name__} goes on although it was told that there is no more room")
        return self.result(asked).reward

    async def close(self) -> None:  # type: ignore[override]
        if self._dialogue is not None:
            await apart(self._dialogue.stop())

    async def _begin(self, task: Any) -> Any:
        self._dialogue = Dialogue(functools.partial(self.run, task))
        return await self._dialogue.next()


@functools.cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"opentinker-dialogues-{process}", daemon=True).start()
    return loop


async def apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs in an event loop of its own thread, one per process, so that code that blocks it blocks no other environment."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, _loop_of(os.getpid())))
