"""The finite-state machine of one episode. It does no I/O: events go in, a request for the next thing to do comes out.

| request (status)        | its answer                            | other events                                          |
|-------------------------|---------------------------------------|-------------------------------------------------------|
| Reset (PENDING)         | ResetDone                             | Failed -> error_env, DeadlinePassed -> error_timeout  |
| AwaitTurn (PENDING)     | TurnGranted, or EpisodeEnded -> done  | Failed -> error_env, DeadlinePassed -> error_timeout  |
| Generate (GENERATING)   | ActionSampled, or EpisodeEnded -> done | Failed -> error_generation, DeadlinePassed -> ...    |
|                         | or TurnLost -> PENDING                |                                                       |
| Step (INTERACTING)      | StepDone, or EpisodeEnded -> done     | Failed -> error_env, DeadlinePassed -> error_timeout  |
| Finalize (INTERACTING)  | Finalized                             | Failed -> error_env, DeadlinePassed -> error_timeout  |
|                         | or EpisodeEnded                       |                                                       |
| Finish (TERMINATED)     |                                       | EpisodeEnded                                          |

`Cancelled` ends every status but TERMINATED. Any other event is a programming error and raises. Only an agent among several
waits for its turn and hears that another ended the episode; it also hears that after it has left, and what it has earned since.
What it is shown while it waits comes before its next action; what it earns while it waits belongs to its last one. An action
that the environment has not seen when the episode ends is no turn of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from opentinker.client.messages import Chunk, ImageChunk, IntArray, Sample, as_chunks
from opentinker.env.environment import Action, Message, Tool
from opentinker.errors import RenderingError
from opentinker.rendering.chunks import NO_IMAGES, Images, Rendered
from opentinker.rollout.trajectory import RunKind, Trajectory
from opentinker.rollout.types import EpisodeStatus, Termination


class Renderer(Protocol):
    """What the machine needs of `ConversationRenderer`."""

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), images: Images = NO_IMAGES
    ) -> Rendered: ...

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action: ...

    def observation_delta(
        self,
        action_tokens: Sequence[int],
        observation: Sequence[Message],
        tools: Sequence[Tool] = (),
        images: Images = NO_IMAGES,
    ) -> Rendered: ...


@dataclass(frozen=True)
class ResetDone:
    """`finalizes`: the environment has a last reward to give. `images` stand for those of the observation, by their hash."""

    observation: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    finalizes: bool = False
    images: Images = field(default_factory=dict)


@dataclass(frozen=True)
class TurnGranted:
    """In a multi-agent episode: this agent acts now. It was shown `observation` and earned `reward` since its last action."""

    observation: tuple[Message, ...] = ()
    images: Images = field(default_factory=dict)
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TurnLost:
    """In a multi-agent episode: the action came too late, and the others go on. It is as if the turn had not been granted."""


@dataclass(frozen=True)
class EpisodeEnded:
    """In a multi-agent episode: it is over for this agent, by what another did. `reward` is for its last action that the
    environment has seen."""

    observation: tuple[Message, ...] = ()
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    termination: Termination = Termination.DONE


@dataclass(frozen=True)
class ActionSampled:
    sample: Sample


@dataclass(frozen=True)
class StepDone:
    reward: float
    done: bool
    observation: tuple[Message, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    components: dict[str, float] = field(default_factory=dict)
    images: Images = field(default_factory=dict)
    earlier_reward: float = 0.0
    """In a multi-agent episode: what it earned while it made up its mind, which belongs to its action before this one."""


@dataclass(frozen=True)
class Finalized:
    """The environment's last reward, which is added to the last turn's."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """What was requested failed for good."""

    error: str


@dataclass(frozen=True)
class DeadlinePassed:
    error: str


@dataclass(frozen=True)
class Cancelled:
    pass


SharedEvent = TurnGranted | TurnLost | EpisodeEnded
"""Only in a multi-agent episode."""
Event = ResetDone | SharedEvent | ActionSampled | StepDone | Finalized | Failed | DeadlinePassed | Cancelled


@dataclass(frozen=True)
class Reset:
    task: Any


@dataclass(frozen=True)
class AwaitTurn:
    pass


@dataclass(frozen=True)
class Generate:
    """Sample an action of at most `max_tokens` tokens after `tokens` (int32[T]), which are `chunks` where they show images."""

    tokens: IntArray
    max_tokens: int
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class Step:
    action: Action


@dataclass(frozen=True)
class Finalize:
    """Ask the environment for its last reward, before the episode ends so."""

    termination: Termination


@dataclass(frozen=True)
class Finish:
    termination: Termination


Request = Reset | AwaitTurn | Generate | Step | Finalize | Finish

_STATUS: dict[type[Request], EpisodeStatus] = {
    Reset: EpisodeStatus.PENDING,
    AwaitTurn: EpisodeStatus.PENDING,
    Generate: EpisodeStatus.GENERATING,
    Step: EpisodeStatus.INTERACTING,
    Finalize: EpisodeStatus.INTERACTING,
    Finish: EpisodeStatus.TERMINATED,
}


class EpisodeMachine:
    """One episode. `pending` is what it waits for; `handle` answers that and gives the next request."""

    def __init__(
        self,
        renderer: Renderer,
        task: Any,
        *,
        max_turns: int,
        max_action_tokens: int,
        max_model_len: int,
        waits_for_turn: bool = False,
    ) -> None:
        self._renderer = renderer
        self._max_turns = max_turns
        self._max_action_tokens = max_action_tokens
        self._max_model_len = max_model_len
        self._waits_for_turn = waits_for_turn
        self._finalizes = False
        self.pending: Request = Reset(task)
        self.trajectories: list[Trajectory] = []
        self.messages: list[Message] = []
        self.rewards: list[float] = []
        self.metrics: dict[str, float] = {}
        self.components: dict[str, float] = {}
        self.tools: tuple[Tool, ...] = ()
        self._images: dict[str, ImageChunk] = {}
        self._news: tuple[Message, ...] = ()
        """What was shown while the agent waits for its turn."""
        self._shown_last: tuple[Message, ...] = ()
        """What the turn that is being played began with."""
        self.early_reward = 0.0
        """What it earned before it ever acted: its first action's, if there is one."""
        self.error = ""
        self.prefix_breaks = 0

    @property
    def status(self) -> EpisodeStatus:
        return _STATUS[type(self.pending)]

    def handle(self, event: Event) -> Request:
        """Advance by one event.

        Raises:
            ValueError: the event does not fit the pending request.
        """
        self.pending = self._next(event)
        return self.pending

    def _next(self, event: Event) -> Request:
        match self.pending, event:
            case Finish(termination) | Finalize(termination) as request, EpisodeEnded() as end if (
                self._waits_for_turn and termination.trains
            ):
                self._hear(end)
                return request
            case Finish(), _:
                pass
            case _, Cancelled():
                return Finish(Termination.CANCELLED)
            case _, DeadlinePassed(error):
                return self._fail(Termination.ERROR_TIMEOUT, error)
            case Generate(), Failed(error):
                return self._fail(Termination.ERROR_GENERATION, error)
            case _, Failed(error):
                return self._fail(Termination.ERROR_ENV, error)
            case Reset(), ResetDone(observation, tools, finalizes, images):
                self.tools, self._finalizes = tools, finalizes
                self._images |= images
                return self._shown((), observation)
            case AwaitTurn(), TurnGranted() as granted:
                return self._granted(granted)
            case Generate(), TurnLost() if self._waits_for_turn:
                return self._taken_back()
            case AwaitTurn() | Generate() | Step() as request, EpisodeEnded() as end if self._waits_for_turn:
                if isinstance(request, Step):
                    self._unsay()
                self.messages += self._news
                self._hear(end)
                return self._end(end.termination)
            case Generate() as request, ActionSampled(sample):
                return self._acted(request, sample)
            case Step(), StepDone() as result:
                return self._stepped(result)
            case Finalize(termination), Finalized(reward, components):
                self._earn(reward, components)
                return Finish(termination)
        raise ValueError(f"{type(event).__name__} cannot follow {type(self.pending).__name__}")

    def _fail(self, termination: Termination, error: str) -> Finish:
        self.error = error
        return Finish(termination)

    def _end(self, termination: Termination) -> Request:
        finalizes = self._finalizes and (self.rewards or self._waits_for_turn)
        return Finalize(termination) if finalizes else Finish(termination)

    def _hear(self, end: EpisodeEnded) -> None:
        self._earn(end.reward, end.components)
        self.metrics.update(end.metrics)
        self.messages += end.observation

    def _earn(self, reward: float, components: dict[str, float]) -> None:
        """Add to the last turn's reward, or to the first one's that is to come."""
        if self.rewards:
            self.rewards[-1] += reward
        else:
            self.early_reward += reward
        for name, value in components.items():
            self.components[name] = self.components.get(name, 0.0) + value

    def _earn_by_turn(self, reward: float) -> None:
        self.rewards.append(reward + self.early_reward)
        self.early_reward = 0.0

    def action_of(self, sample: Sample) -> Action:
        """The action that a sample would be, if it answered the pending request; nothing changes.

        Raises:
            ValueError: it is no answer to it.
        """
        assert isinstance(self.pending, Generate)
        self._check_sample(self.pending, sample)
        return self._parsed(sample)

    def _check_sample(self, request: Generate, sample: Sample) -> None:
        length = len(sample.tokens)
        if not 1 <= length <= request.max_tokens:
            raise ValueError(f"the policy answered with {length} tokens where 1 to {request.max_tokens} were asked")
        if not np.isfinite(sample.logprobs).all():
            raise ValueError("the policy answered with logprobs that are not finite")
        Trajectory().append_sample(sample)

    def _parsed(self, sample: Sample) -> Action:
        return self._renderer.parse(sample.tokens.tolist(), finished=sample.finish_reason == "stop")

    def _acted(self, request: Generate, sample: Sample) -> Request:
        try:
            self._check_sample(request, sample)
        except ValueError as error:
            return self._fail(Termination.ERROR_GENERATION, str(error))
        self.trajectories[-1].append_sample(sample)
        action = self._parsed(sample)
        message: Message = {"role": "assistant", "content": action.text}
        if action.reasoning:
            message["reasoning_content"] = action.reasoning
        self.messages.append(message)
        return Step(action)

    def _stepped(self, result: StepDone) -> Request:
        self._earn(result.earlier_reward, {})
        self._earn_by_turn(result.reward)
        self.metrics.update(result.metrics)
        self._earn(0.0, result.components)
        self._images |= result.images
        if result.done or len(self.rewards) >= self._max_turns:
            self.messages += result.observation
            return self._end(Termination.DONE if result.done else Termination.TRUNCATED_TURNS)
        return self._shown(self._last_action(), result.observation)

    def _unsay(self) -> None:
        """Take back an action that the environment has not seen: it earned nothing, so nothing is to be learnt from it. What
        the agent was shown before stays."""
        self.trajectories[-1].runs.pop()
        self.messages.pop()

    def _last_action(self) -> list[int]:
        return self.trajectories[-1].runs[-1].tokens.tolist() if self.trajectories else []

    def _shown(self, action: Sequence[int], observation: tuple[Message, ...]) -> Request:
        if not self._waits_for_turn:
            return self._observed(action, observation)
        self._news = observation
        return AwaitTurn()

    def _granted(self, granted: TurnGranted) -> Request:
        self._earn(granted.reward, granted.components)
        self.metrics.update(granted.metrics)
        self._images |= granted.images
        observation, self._news = self._news + granted.observation, ()
        if not observation:
            return self._fail(Termination.ERROR_ENV, "it is the agent's turn, and it was shown nothing since its last action")
        self._shown_last = observation
        return self._observed(self._last_action(), observation)

    def _taken_back(self) -> AwaitTurn:
        """Undo what `_observed` did; the observation will be shown again."""
        self.trajectories[-1].runs.pop()
        if not self.trajectories[-1].runs:
            self.trajectories.pop()
            self.prefix_breaks -= bool(self.trajectories)
        del self.messages[len(self.messages) - len(self._shown_last) :]
        self._news = self._shown_last
        return AwaitTurn()

    def _observed(self, action: Sequence[int], observation: tuple[Message, ...]) -> Request:
        """Append the observation if it leaves room for an answer."""
        self.messages += observation
        delta = self._delta(action, observation) if action else None
        try:
            prompt = delta or as_chunks(self._renderer.render_prompt(self.messages, self.tools, self._images))
        except RenderingError as error:
            return self._fail(Termination.ERROR_ENV, str(error))
        length = sum(len(chunk.tokens) for chunk in prompt) + (0 if delta is None else len(self.trajectories[-1]))
        if length >= self._max_model_len:
            self.error = (
                f"the context has {length} tokens, which leaves no room in engine.max_model_len = {self._max_model_len}"
            )
            return self._end(Termination.TRUNCATED_CONTEXT)
        if delta is None:
            self.prefix_breaks += bool(self.trajectories)
            self.trajectories.append(Trajectory())
        self.trajectories[-1].append_rendered(RunKind.PROMPT if delta is None else RunKind.OBSERVATION, prompt)
        return self._generate()

    def _delta(self, action: Sequence[int], observation: tuple[Message, ...]) -> tuple[Chunk, ...] | None:
        """None when the template cannot append to what was sampled, so that the conversation is rendered anew."""
        try:
            return as_chunks(self._renderer.observation_delta(action, observation, self.tools, self._images))
        except RenderingError:
            return None

    def _generate(self) -> Generate:
        tokens = self.trajectories[-1].tokens
        chunks = self.trajectories[-1].chunks if self._images else ()
        return Generate(tokens, min(self._max_action_tokens, self._max_model_len - len(tokens)), chunks)
