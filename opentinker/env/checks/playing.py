"""Plays episodes for the checks as training would, and writes down everything that can be compared."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from opentinker.env.checks.source import location_in, method_line
from opentinker.env.environment import Action, Environment, Message, StepResult, Tool
from opentinker.env.processes import Session
from opentinker.errors import DeadlineError, EnvironmentFailedError

ProblemKind = Literal["raised", "malformed", "late"]
Script = Callable[[Sequence[Tool]], Iterator[Action]]
"""The actions of an episode whose tools are known."""


@dataclass(frozen=True)
class Problem:
    """What an environment's method did wrong."""

    kind: ProblemKind
    method: str
    detail: str
    hint: str = ""
    where: str = ""
    said: str = ""
    """The action that it was answering, shortened."""


@dataclass
class Transcript:
    """One episode in plain values, so that two can be compared with `==`."""

    task: Any
    first: list[Any] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] | None = None
    """What `finalize` gave."""
    tools: list[Any] = field(default_factory=list)
    done: bool = False
    failure: str = ""
    problem: Problem | None = field(default=None, compare=False)
    seconds: dict[str, list[float]] = field(default_factory=dict, compare=False)
    close_problem: Problem | None = field(default=None, compare=False)

    @property
    def rewards(self) -> list[float]:
        rewards = [turn["reward"] for turn in self.turns]
        if self.last is not None and rewards:
            rewards[-1] += self.last["reward"]
        return rewards


def difference(one: Transcript, other: Transcript) -> tuple[str, str]:
    """In words where two episodes begin to differ, and in which method; empty if they don't."""
    if one.first != other.first:
        return f"the first observation: {_apart(one.first, other.first)}", "reset"
    if one.tools != other.tools:
        return "the tools", "reset"
    for number, (a, b) in enumerate(zip(one.turns, other.turns, strict=False), 1):
        for key in a:
            if a[key] != b[key]:
                return f"turn {number}, {key}: {_apart(a[key], b[key])}", "step"
    if len(one.turns) != len(other.turns) or one.failure != other.failure:
        return f"the end: {one.failure or f'{len(one.turns)} turns'} or {other.failure or f'{len(other.turns)} turns'}", "step"
    if one.last != other.last:
        return f"the last reward: {_apart(one.last, other.last)}", "finalize"
    return "", ""


def _apart(one: Any, other: Any) -> str:
    first, second = repr(one), repr(other)
    start = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    begin = max(0, start - 20) if max(len(first), len(second)) > 60 else 0
    return f"{shortened(first[begin:])} or {shortened(second[begin:])}"


def shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def plain_messages(messages: Sequence[Message]) -> list[Any]:
    """Messages as JSON values; an image as its hash."""
    return [{**message, "content": _plain_content(message["content"])} for message in messages]


def _plain_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else {"type": "image", "sha256": part["image"].sha256} for part in content]


class Player:
    """One episode, turn by turn; a problem ends it."""

    def __init__(self, environment: type[Environment], session: Session, task: Any, timeout_s: float) -> None:
        self._environment = environment
        self._session = session
        self._timeout_s = timeout_s
        self._said = ""
        self.transcript = Transcript(task)
        self.over = self.closed = False

    async def start(self) -> None:
        first = await self._call("reset", self._session.reset(self.transcript.task, self._timeout_s))
        if first is not None:
            self.transcript.first = plain_messages(first)
            self.transcript.tools = [dict(tool) for tool in self._session.tools]

    async def act(self, action: Action) -> None:
        self._said = action.text
        result = cast(StepResult | None, await self._call("step", self._session.step(action, self._timeout_s)))
        self._said = ""
        if result is not None:
            self.transcript.turns.append(
                {
                    "reward": result.reward,
                    "observation": plain_messages(cast(Sequence[Message], result.observation)),
                    "done": result.done,
                    "metrics": result.metrics,
                    "components": result.components,
                }
            )
            self.over = self.transcript.done = result.done

    async def finish(self) -> None:
        """Ask for the last reward, if the episode went well, and close."""
        transcript = self.transcript
        if self._session.finalizes and transcript.turns and not transcript.failure:
            last = cast(StepResult | None, await self._call("finalize", self._session.finalize(self._timeout_s)))
            if last is not None:
                transcript.last = {"reward": last.reward, "components": last.components}
        await self.close()

    async def close(self) -> None:
        """Close the environment; what is wrong with that is noted apart from the episode's own problem."""
        transcript = self.transcript
        self.over = self.closed = True
        problem, failure, transcript.problem, transcript.failure = transcript.problem, transcript.failure, None, ""
        await self._call("close", self._session.close(self._timeout_s))
        transcript.close_problem = transcript.problem
        transcript.problem, transcript.failure = problem, failure

    async def _call(self, method: str, answer: Any) -> Any:
        start = time.perf_counter()
        try:
            return await answer
        except DeadlineError as error:
            where = location_in(error.detail) or method_line(self._environment, method)
            self._problem(Problem("late", method, error.detail, error.hint, where))
        except EnvironmentFailedError as error:
            kind: ProblemKind = "raised" if error.__cause__ is not None or _raised_elsewhere(error) else "malformed"
            where = location_in(error.detail) or method_line(self._environment, method)
            self._problem(Problem(kind, method, error.detail, error.hint, where, shortened(repr(self._said))))
        finally:
            self.transcript.seconds.setdefault(method, []).append(time.perf_counter() - start)

    def _problem(self, problem: Problem) -> None:
        self.transcript.problem = problem
        self.transcript.failure = problem.detail
        self.over = True


def _raised_elsewhere(error: EnvironmentFailedError) -> bool:
    """An error that comes from another process has its text alone."""
    what = error.detail.partition(":")[0]
    return " raised " in what or what == "the session was lost"


async def play(player: Player, script: Script, max_turns: int) -> Transcript:
    """A whole episode. The environment is closed also when this is cancelled."""
    try:
        await player.start()
        actions = script(player.transcript.tools)
        while not player.over and len(player.transcript.turns) < max_turns:
            await player.act(next(actions))
        await player.finish()
    finally:
        if not player.closed:
            await player.close()
    return player.transcript
