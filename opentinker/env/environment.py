"""What the author of an environment writes."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict


class Message(TypedDict):
    """One chat message; `role` is system, user, assistant or tool."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    """What the assistant thought before it answered, where the model thinks."""


@dataclass(frozen=True)
class Action:
    """What the policy said: its text without template tokens, and whether it was cut at the token limit."""

    text: str
    truncated: bool = False
    reasoning: str = ""
    """What a thinking model wrote between its thinking marks; not part of `text`."""


@dataclass(frozen=True)
class StepResult:
    """What the environment answers to an action.

    `observation` is the text (a user turn) or the messages that the policy sees next; it may be empty when `done`.
    `metrics` are numbers worth averaging, such as {"exact": 1.0}.
    """

    reward: float = 0.0
    done: bool = False
    observation: str | Sequence[Message] = ""
    metrics: dict[str, float] = field(default_factory=dict)


Observation = str | Sequence[Message]


class Environment:
    """One episode of a task. An instance is used once: reset, then steps until done.

    `reset` and `step` may be plain or async functions; plain ones run in a thread of their own.
    Tasks are JSON values. A simulated environment overrides `make_task`; one with a dataset is given tasks instead.
    """

    @classmethod
    def make_task(cls, seed: int) -> Any:
        """A training task, determined by its seed alone."""
        return {"seed": seed}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        """Tasks for evaluation, never drawn in training."""
        return ()

    def reset(self, task: Any) -> Observation | Awaitable[Observation]:
        """Begin an episode: the first observation, as text or as messages (system prompt, solved examples, question)."""
        raise NotImplementedError(f"{type(self).__name__} must define reset(self, task)")

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Apply an action."""
        raise NotImplementedError(f"{type(self).__name__} must define step(self, action)")

    def close(self) -> None:
        """Called once when the episode is over, however it ended."""
