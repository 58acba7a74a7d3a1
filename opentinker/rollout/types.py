"""The words of rollouts: how an episode stands, how it ended, what it leaves behind, and the groups that are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from opentinker.client.messages import Chunk, ImageChunk, IntArray, Sample, SamplingParams
from opentinker.env.environment import Message, Tool
from opentinker.images import Image
from opentinker.rollout.trajectory import Trajectory


class EpisodeStatus(StrEnum):
    """What an episode waits for: an observation or its turn, the policy, the environment, nothing any more."""

    PENDING = "pending"
    GENERATING = "generating"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class Termination(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    TRUNCATED_CONTEXT = "truncated_context"
    TRUNCATED_TURNS = "truncated_turns"
    ERROR_ENV = "error_env"
    ERROR_TIMEOUT = "error_timeout"
    ERROR_GENERATION = "error_generation"
    CANCELLED = "cancelled"

    @property
    def is_error(self) -> bool:
        """The episode says nothing about the policy; its member is run anew or dropped."""
        return self in (Termination.ERROR_ENV, Termination.ERROR_TIMEOUT, Termination.ERROR_GENERATION)

    @property
    def trains(self) -> bool:
        """Such an episode is trained on, if it holds an action."""
        return self in (Termination.DONE, Termination.TRUNCATED_CONTEXT, Termination.TRUNCATED_TURNS)


class GenerateFn(Protocol):
    """Where actions come from: a policy over HTTP in training and evaluation, a stub in a unit test."""

    async def __call__(self, prompt: IntArray | tuple[Chunk, ...], params: SamplingParams, request_id: str) -> Sample:
        """One sample for the prompt: its token ids, int32[P], or, where it shows images, its chunks.

        Raises:
            UnavailableError: try again with the same `request_id`.
            EngineError: try again with another `request_id`.
        """
        ...


class UploadFn(Protocol):
    """How the policy's server comes to know the images of an observation."""

    async def __call__(self, images: Sequence[Image]) -> Mapping[str, ImageChunk]:
        """What stands for each image in a prompt, by its hash.

        Raises:
            InvalidRequestError: an image is broken or too large.
            OpenTinkerError: no image will ever do.
        """
        ...


@dataclass
class Episode:
    """One finished run of a task.

    Several trajectories mean that the chat template did not preserve its prefix, so that turns are trained apart.
    """

    task: Any
    member: int
    termination: Termination
    trajectories: list[Trajectory] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The transcript, last observation included."""
    rewards: list[float] = field(default_factory=list)
    """One per completed turn."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's numbers; a later turn's value replaces an earlier one of the same name."""
    components: dict[str, float] = field(default_factory=dict)
    """The reward's named components, summed over turns."""
    tools: tuple[Tool, ...] = ()
    """What the policy was told that it may call."""
    error: str = ""
    """What went wrong, for `error_*` and `truncated_context`."""
    prefix_breaks: int = 0
    reward_without_turn: float = 0.0
    """What an agent among several earned in an episode that ended before it ever acted."""
    generation_s: float = 0.0
    environment_s: float = 0.0

    @property
    def reward(self) -> float:
        """Sum over turns, and what was earned without any."""
        return sum(self.rewards) + self.reward_without_turn

    @property
    def turns(self) -> int:
        """Actions that the environment answered."""
        return len(self.rewards)

    @property
    def action_tokens(self) -> int:
        return sum(t.action_tokens for t in self.trajectories)

    @property
    def trains(self) -> bool:
        return self.termination.trains and self.action_tokens > 0


@dataclass
class Group:
    """The episodes of one task, in the order of their members.

    A member whose episode ended in an error was run anew (`replaced`); if it failed too often, or was cancelled, it is missing
    (`dropped`). The failed attempts themselves are in `failures`.
    """

    task: Any
    index: int
    """The task's place in its batch."""
    episodes: list[Episode] = field(default_factory=list)
    failures: list[Episode] = field(default_factory=list)
    dropped: int = 0
    replaced: int = 0
