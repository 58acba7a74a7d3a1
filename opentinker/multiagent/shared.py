"""An environment of several agents behind the interface of one: what runs, isolates, checks and hosts `Environment`s does it
for these, too.

An action's text is a JSON document that says who acts; a result's first message is one that says whom the others are for:

    {"act": {"black": [text, truncated, reasoning]}, "together": false}   or   {"leave": "black"}
    {"shown": {"black": 2, "white": 1}, "rewards": {...}, "left": [...], "next": [...], "metrics": {...}}

The messages that agents are shown follow in that order, as they are, so that images in them need no other way.
"""

import copyreg
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from opentinker.env.environment import Action, Environment, Message, StepResult
from opentinker.env.execution import checked_step, messages_of
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import EnvironmentFailedError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult


@dataclass(frozen=True)
class Earned:
    """A reward, and its named components."""

    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class News:
    """A `MultiStepResult` that was checked: numbers are floats, observations messages."""

    shown: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    earned: dict[str, Earned] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    next_agents: tuple[str, ...] = ()
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    done: bool = False


class SharedType(type):
    """The type of classes that `shared` makes. They travel between processes as what they were made of."""

    played: type[MultiAgentEnvironment]


def _travel(cls: SharedType) -> Any:
    return (shared, (cls.played,)) if "played" in vars(cls) else cls.__qualname__


copyreg.pickle(SharedType, _travel)


class SharedEnvironment(Environment, metaclass=SharedType):
    """`played`, as an Environment. Its observations and actions are encoded; see the module."""

    played: ClassVar[type[MultiAgentEnvironment]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._played = self.played(*args, **kwargs)

    @classmethod
    def make_task(cls, seed: int) -> Any:
        return cls.played.make_task(seed)

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return cls.played.held_out_tasks()

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        return cls.played.task_source(split, args)

    @classmethod
    def required_columns(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        return cls.played.required_columns(args)

    @classmethod
    def check_tasks(cls, tasks: TaskSource, args: Mapping[str, Any]) -> None:
        cls.played.check_tasks(tasks, args)

    def close(self) -> Any:
        return self._played.close()  # to be awaited, if the author's is

    def _first(self, observations: Any) -> Sequence[Message]:
        what = f"{type(self).__name__}.reset"
        first = observations if isinstance(observations, MultiStepResult) else MultiStepResult(observations=observations)
        if not isinstance(first.observations, Mapping) or not first.observations:
            raise EnvironmentFailedError(
                f"{what} gave {type(observations).__name__}", hint="give what each agent is shown first, by its name"
            )
        self.tools = self._played.tools
        return self._encoded(first, what)[0]

    def _result(self, result: Any, method: str) -> StepResult:
        what = f"{type(self).__name__}.{method}"
        if not isinstance(result, MultiStepResult):
            raise EnvironmentFailedError(
                f"{what} returned {type(result).__name__}",
                hint="return opentinker.MultiStepResult(rewards={...}, observations={...}, done=...)",
            )
        messages, done = self._encoded(result, what)
        return StepResult(done=done, observation=messages)

    def _encoded(self, result: MultiStepResult, what: str) -> tuple[list[Message], bool]:
        """Raises: EnvironmentFailedError when the result is malformed or names an agent that has no seat."""
        for noun, names in (
            ("observations", result.observations),
            ("rewards", result.rewards),
            ("metrics", result.metrics),
            ("left", result.left),
            ("next_agents", result.next_agents),
        ):
            if not isinstance(names, Mapping | Sequence) or isinstance(names, str):
                raise EnvironmentFailedError(f"{what}: {noun} is {type(names).__name__}", hint="it goes by the agents' names")
            if unknown := [name for name in names if name not in self.played.agents]:
                raise EnvironmentFailedError(
                    f"{what}: {noun} names {unknown[0]!r}, which is no agent", hint=f"there are {', '.join(self.played.agents)}"
                )
        shown = {name: messages_of(seen, f"{what} for '{name}'") for name, seen in result.observations.items()}
        checked = {
            name: checked_step(StepResult(reward, done=True), f"{what} for '{name}'") for name, reward in result.rewards.items()
        }
        metrics = {
            name: checked_step(StepResult(done=True, metrics=dict(numbers)), f"{what} for '{name}'").metrics
            for name, numbers in result.metrics.items()
        }
        header = {
            "shown": {name: len(messages) for name, messages in shown.items()},
            "rewards": {name: [step.reward, step.components] for name, step in checked.items()},
            "left": list(result.left),
            "next": list(result.next_agents),
            "metrics": metrics,
        }
        messages: list[Message] = [{"role": "system", "content": json.dumps(header)}]
        return messages + [message for seen in shown.values() for message in seen], bool(result.done)

    def _last(self, rewards: Any) -> dict[str, float]:
        """Last rewards as components named by the agents."""
        what = f"{type(self).__name__}.finalize"
        if not isinstance(rewards, Mapping | None):
            raise EnvironmentFailedError(f"{what} returned {type(rewards).__name__}", hint="return rewards by agent, or None")
        if unknown := [name for name in rewards or {} if name not in self.played.agents]:
            raise EnvironmentFailedError(f"{what} names {unknown[0]!r}, which is no agent")
        return dict(rewards or {})

    def _asked(self, action: Action) -> tuple[str, Callable[[], Any]]:
        """The method of the author's that an action stands for, and the call of it.

        Raises:
            EnvironmentFailedError: the action is not encoded.
        """
        try:
            asked = json.loads(action.text)
            if "leave" in asked:
                return "leave", functools.partial(self._played.leave, asked["leave"])
            actions = {name: Action(*words) for name, words in asked["act"].items()}
            if asked["together"]:
                return "step_together", functools.partial(self._played.step_together, actions)
            [(agent, said)] = actions.items()
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailedError(
                f"{type(self).__name__}.step: the action does not say who acts: {action.text!r}"[:300],
                hint="an environment of several agents is played by a multi-agent run",
            ) from error
        return "step", functools.partial(self._played.step, agent, said)


_STEPS = ("step", "step_together", "leave")
"""The methods of the author's that an action may stand for."""


@functools.cache
def shared(played: type[MultiAgentEnvironment]) -> type[SharedEnvironment]:
    """The class as an Environment of the same name, whose errors point to the author's lines."""

    class Shared(SharedEnvironment):
        # Plain functions: what an async method of the author's gives is awaited by whoever runs environments.
        def reset(self, task: Any) -> Any:
            return _then(self._played.reset(task), self._first)

        def step(self, action: Action) -> Any:
            method, call = self._asked(action)
            return _then(call(), lambda result: self._result(result, method))

    made: type[SharedEnvironment] = Shared
    # On the event loop run only async methods: a plain one would hold up all other episodes.
    if inspect.iscoroutinefunction(played.reset):

        async def reset(self: SharedEnvironment, task: Any) -> Any:
            return self._first(await _awaited(self._played.reset(task)))

        setattr(made, "reset", reset)  # noqa: B010  mypy takes it for an assignment to a method
    own = [getattr(played, name) for name in _STEPS if getattr(played, name) is not getattr(MultiAgentEnvironment, name)]
    if all(map(inspect.iscoroutinefunction, own)):

        async def step(self: SharedEnvironment, action: Action) -> Any:
            method, call = self._asked(action)
            return self._result(await _awaited(call()), method)

        setattr(made, "step", step)  # noqa: B010
    for name in ("reset", "step"):
        getattr(made, name).__wrapped__ = getattr(played, name)
    if played.finalize is not MultiAgentEnvironment.finalize:

        def finalize(self: SharedEnvironment) -> Any:
            return _then(self._played.finalize(), self._last)

        finalize.__wrapped__ = played.finalize  # type: ignore[attr-defined]
        setattr(made, "finalize", finalize)  # noqa: B010  mypy does not know which class it is
    made.played = played
    made.execution, made.task_columns = played.execution, played.task_columns
    # A server goes through its bases' for what clients may not set, and these bases are not the author's.
    made.host_args = tuple(dict.fromkeys(name for base in played.__mro__ for name in vars(base).get("host_args", ())))
    made.__name__, made.__qualname__, made.__module__ = played.__name__, played.__qualname__, played.__module__
    made.__doc__, made.__signature__ = played.__doc__, inspect.signature(played)  # type: ignore[attr-defined]
    return made


def acted(actions: Mapping[str, Action], *, together: bool) -> Action:
    """What tells a shared environment who acts."""
    said = {agent: [action.text, action.truncated, action.reasoning] for agent, action in actions.items()}
    return Action(json.dumps({"act": said, "together": together}))


def gone(agent: str) -> Action:
    """What tells a shared environment that an agent is gone."""
    return Action(json.dumps({"leave": agent}))


def news_of(observation: Sequence[Message], *, done: bool = False) -> News:
    """What a shared environment's observation says."""
    header = json.loads(cast(str, observation[0]["content"]))
    shown, at = {}, 1
    for agent, count in header["shown"].items():
        shown[agent] = tuple(observation[at : at + count])
        at += count
    return News(
        shown=shown,
        earned={agent: Earned(reward, components) for agent, (reward, components) in header["rewards"].items()},
        left=tuple(header["left"]),
        next_agents=tuple(header["next"]),
        metrics=header["metrics"],
        done=done,
    )


def _then(value: Any, convert: Callable[[Any], Any]) -> Any:
    """`convert(value)`, or what becomes that when it is awaited."""
    if not isinstance(value, Awaitable):
        return convert(value)

    async def later() -> Any:
        return convert(await value)

    return later()


async def _awaited(value: Any) -> Any:
    return await value if isinstance(value, Awaitable) else value
