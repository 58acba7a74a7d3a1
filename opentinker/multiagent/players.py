"""Who plays a seat: a policy that samples tokens, a function that knows the game, or a model elsewhere."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentinker.client.messages import SamplingParams
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Message
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rollout.machine import EpisodeMachine
from opentinker.rollout.sampler import Sampler
from opentinker.rollout.types import GenerateFn, UploadFn

Act = Callable[[Sequence[Message], random.Random], str]
"""(what the agent was shown and said so far, its random numbers) -> what it says."""
SeedOfTurn = Callable[[str, int], int]
"""(agent, turn) -> the seed with which that turn is sampled."""


@dataclass(frozen=True)
class PolicyPlayer:
    """Samples its actions from a policy, and leaves trajectories."""

    renderer: ConversationRenderer
    generate: GenerateFn
    sampling: SamplingParams
    max_model_len: int
    upload: UploadFn | None = None
    trains: bool = True
    """False: a frozen policy, whose episodes nobody trains on."""

    def machine(self, task: Any, config: RolloutConfig) -> EpisodeMachine:
        """What its episode of a game is played by."""
        return EpisodeMachine(
            self.renderer,
            task,
            max_turns=config.max_turns,
            max_action_tokens=self.sampling.max_tokens,
            max_model_len=self.max_model_len,
            waits_for_turn=True,
        )

    def sampler(self, config: RolloutConfig, request_id: str, seed_of_turn: Callable[[int], int]) -> Sampler:
        """What asks the policy for the actions of that episode; `request_id` is its own."""
        return Sampler(self.generate, config, self.sampling, request_id, seed_of_turn, self.upload)


@dataclass(frozen=True)
class ScriptedPlayer:
    """Acts by a function, which is called in a thread."""

    act: Act
    name: str = "scripted"


Ask = Callable[[Sequence[Message], int], Awaitable[str]]
"""(what the agent was shown and said so far, the turn's seed) -> what it says."""


@dataclass(frozen=True)
class ModelPlayer:
    """Acts by asking a model that is no policy of ours. What `ask` raises ends the episode if it is an UnavailableError, and
    the run otherwise."""

    ask: Ask
    name: str = "model"


@dataclass(frozen=True)
class DrawnPlayers:
    """Another policy for each task of a call to `GameRunner.run`, in the order of the tasks: all games of a group are against
    the same one."""

    players: Sequence[PolicyPlayer]

    @property
    def trains(self) -> bool:
        return any(player.trains for player in self.players)


Player = PolicyPlayer | ScriptedPlayer | ModelPlayer
SeatPlayer = Player | DrawnPlayers
"""Who plays a seat in the games of a step."""
