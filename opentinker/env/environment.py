"""What the author of an environment writes."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

from opentinker.env.tasks import GeneratedTasks, ListTasks, Split, TaskSource
from opentinker.images import Image


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    type: Literal["image"]
    image: Image


Part = TextPart | ImagePart


class Message(TypedDict):
    """One chat message; `role` is system, user, assistant or tool. Its content is a text, or texts and images in order."""

    role: str
    content: str | Sequence[Part]
    reasoning_content: NotRequired[str]
    """What the assistant thought before it answered, where the model thinks."""


def images_of(messages: Sequence[Message]) -> list[Image]:
    """The images that the messages show, in order."""
    parts = (part for m in messages if not isinstance(m["content"], str) for part in m["content"])
    return [part["image"] for part in parts if part["type"] == "image"]


Tool = Mapping[str, Any]
"""What the policy may call, as OpenAI's schema: {"type": "function", "function": {"name", "description", "parameters"}}."""
Reward = float | Mapping[str, float]
"""A number, or named components, whose sum is the reward."""
Observation = str | Image | Sequence[Part] | Sequence[Message]
"""What the policy sees next. A text, an image or parts are one user message."""


@dataclass(frozen=True)
class Action:
    """What the policy said: its text without template tokens, and whether it was cut at the token limit.

    `opentinker.env.parsing` finds tool calls and answers in the text.
    """

    text: str
    truncated: bool = False
    reasoning: str = ""
    """What a thinking model wrote between its thinking marks; not part of `text`."""


@dataclass(frozen=True)
class StepResult:
    """What the environment answers to an action.

    `reward` may be a dict of named components, which are logged apart. `observation` may be empty when `done`. `metrics` are
    numbers worth averaging, such as {"exact": 1.0}.
    """

    reward: Reward = 0.0
    done: bool = False
    observation: Observation = ""
    metrics: dict[str, float] = field(default_factory=dict)
    components: dict[str, float] = field(default_factory=dict)
    """The reward's components; filled in from `reward`."""


class TaskEnvironment:
    """What an environment's class says before any episode, be it for one agent or several: where it runs, and its tasks.

    Tasks are JSON values. A simulated environment overrides `make_task`; one with a dataset overrides `task_source`.
    """

    execution: ClassVar[Literal["thread", "process"]] = "thread"
    """Where an episode's plain methods run. A process can be killed when a call hangs, whatever it is doing."""
    task_columns: ClassVar[tuple[str, ...]] = ()
    """Keys that a task must have; checked when tasks come from a file or a dataset."""
    host_args: ClassVar[tuple[str, ...]] = ()
    """Constructor arguments that, on a server, only whoever hosts may set (`env serve --args`): walls and limits, files to
    load, addresses to connect to. "*" stands for all arguments. Those of base classes count too."""

    @classmethod
    def make_task(cls, seed: int) -> Any:
        """A training task, determined by its seed alone."""
        return {"seed": seed}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        """Tasks for evaluation, never drawn in training."""
        return ()

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        """Where the tasks of a split come from; `args` are the constructor's arguments."""
        return GeneratedTasks(cls.make_task) if split == "train" else ListTasks(cls.held_out_tasks(), shuffle=False)

    @classmethod
    def required_columns(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        """`task_columns`, for an environment with these arguments."""
        return cls.task_columns

    @classmethod
    def check_tasks(cls, tasks: TaskSource, args: Mapping[str, Any]) -> None:
        """Called once, before any episode, with tasks from a file or dataset: raise a ConfigError if they are unfit."""


class Environment(TaskEnvironment):
    """One episode of a task. An instance is used once: reset, then steps until done.

    `reset`, `step` and `finalize` may be plain or async functions; plain ones run in a thread of their own, or in a process of
    their own if the class says `execution = "process"`.
    """

    tools: Sequence[Tool] = ()
    """Given to the chat template; read after `reset`."""

    def reset(self, task: Any) -> Observation | Awaitable[Observation]:
        """Begin an episode: the first observation, as text, image or messages (system prompt, solved examples, question)."""
        raise NotImplementedError(f"{type(self).__name__} must define reset(self, task)")

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Apply an action."""
        raise NotImplementedError(f"{type(self).__name__} must define step(self, action)")

    def finalize(self) -> Reward | Awaitable[Reward | None] | None:
        """A last reward, added to the last turn's. Called once when the episode is over, whether it is done or was cut short by
        a limit, unless it failed or had no turn."""
        return None

    def close(self) -> None:
        """Called once when the episode is over, however it ended."""
