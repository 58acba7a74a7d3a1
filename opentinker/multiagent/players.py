"""Who plays a seat: a policy that samples tokens, or a function that knows the game."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentinker.client.messages import SamplingParams
from opentinker.env.environment import Message
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rollout.types import GenerateFn, UploadFn

Act = Callable[[Sequence[Message], random.Random], str]
"""(what the agent was shown and said so far, its random numbers) -> what it says."""


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


@dataclass(frozen=True)
class ScriptedPlayer:
    """Acts by a function, which is called in a thread."""

    act: Act
    name: str = "scripted"


Player = PolicyPlayer | ScriptedPlayer
