"""An agent in an episode of several: who plays it, how far it is, and what waits until its turn."""

from dataclasses import dataclass, field
from typing import Any

from opentinker.env.environment import Message
from opentinker.multiagent.coordination.seat import RemotePlayer, RemoteSeat
from opentinker.multiagent.players import Player
from opentinker.multiagent.shared import Earned
from opentinker.rollout.episode import episode_of
from opentinker.rollout.machine import DeadlinePassed, EpisodeMachine, Failed, Finish
from opentinker.rollout.sampler import Sampler
from opentinker.rollout.types import Episode


@dataclass
class Waiting:
    """What an agent was shown and earned since its last action."""

    shown: tuple[Message, ...] = ()
    earned: Earned = field(default_factory=Earned)
    metrics: dict[str, float] = field(default_factory=dict)

    def then(self, later: "Waiting") -> "Waiting":
        """This, and what came after it."""
        return Waiting(self.shown + later.shown, _sum(self.earned, later.earned), self.metrics | later.metrics)


class Agent:
    """A seat, who plays it, and how far that is."""

    def __init__(
        self, name: str, player: Player | RemotePlayer, machine: EpisodeMachine | None, sampler: Sampler | RemoteSeat | None
    ) -> None:
        self.name = name
        self.player = player
        self.machine = machine
        self.sampler = sampler
        self.waiting = Waiting()
        self.messages: list[Message] = []
        """Of a player that is no policy; a policy's are its machine's."""
        self.turns = 0
        self.entered = False
        self.left = False

    @property
    def ended(self) -> bool:
        return self.machine is not None and isinstance(self.machine.pending, Finish)

    def take(self) -> Waiting:
        """What is waiting; nothing is, afterwards."""
        taken, self.waiting = self.waiting, Waiting()
        return taken

    def episode(self, task: Any, member: int, aborted: DeadlinePassed | Failed | None, environment_s: float) -> Episode:
        """What `episode_of` says of it, once its machine has ended."""
        assert self.machine is not None
        assert self.sampler is not None
        return episode_of(
            self.machine, task, member, generation_s=self.sampler.seconds, environment_s=environment_s, aborted=aborted
        )


def _sum(one: Earned, other: Earned) -> Earned:
    names = one.components.keys() | other.components.keys()
    components = {name: one.components.get(name, 0.0) + other.components.get(name, 0.0) for name in sorted(names)}
    return Earned(one.reward + other.reward, components)
