"""What the author of an environment for several agents writes."""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from opentinker.env.environment import Action, Message, Observation, Reward, TaskEnvironment, Tool
from opentinker.multiagent.protocol import AgentProtocol, RoundRobin


@dataclass(frozen=True)
class MultiStepResult:
    """What the environment answers to an action, or to simultaneous ones. What is left out is nothing: no reward, no news.

    What an agent is shown comes before its next action. A reward belongs to the agent's own last action, whoever acted now.
    """

    rewards: Mapping[str, Reward] = field(default_factory=dict)
    observations: Mapping[str, Observation] = field(default_factory=dict)
    """By agent. One who is shown something and does not take part yet enters."""
    done: bool = False
    """The episode is over for everybody."""
    left: Sequence[str] = ()
    """For whom it is over. Others go on."""
    next_agents: Sequence[str] = ()
    """Who is to act next, where the protocol leaves that to the environment or to a moderator."""
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By agent: numbers worth averaging, such as {"black": {"won": 1.0}}."""


First = Mapping[str, Observation] | MultiStepResult
"""What `reset` gives: what each agent that takes part is shown first; as a result where `next_agents` is to say who begins."""


class MultiAgentEnvironment(TaskEnvironment):
    """One episode that several agents play. An instance is used once: reset, then steps until it is done.

    Methods may be plain or async, and run where the class says, as those of `opentinker.Environment`.
    """

    agents: ClassVar[tuple[str, ...]] = ()
    """The seats, in their order. Who takes part from the beginning is whom `reset` shows something."""
    protocol: ClassVar[AgentProtocol] = RoundRobin()
    """Who may act when."""
    version: ClassVar[str] = ""
    """Raise it when the rules change: agents that are driven by different processes must agree on it."""
    players: ClassVar[Mapping[str, Callable[[Sequence[Message], random.Random], str]]] = {}
    """Reference players that know the game, by name, for every seat: functions as those of a scripted agent. Policies are
    compared with them (`arena`); the first one is best a weak one."""
    tools: Sequence[Tool] = ()
    """Given to every agent's chat template; read after `reset`."""

    def reset(self, task: Any) -> First | Awaitable[First]:
        """Begin an episode: what each agent that takes part is shown first."""
        raise NotImplementedError(f"{type(self).__name__} must define reset(self, task)")

    def step(self, agent: str, action: Action) -> MultiStepResult | Awaitable[MultiStepResult]:
        """Apply an agent's action."""
        raise NotImplementedError(f"{type(self).__name__} must define step(self, agent, action)")

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult | Awaitable[MultiStepResult]:
        """Apply simultaneous actions, in the order of the seats. Agents whose turn was lost are missing. A class whose protocol
        has simultaneous turns defines this."""
        raise NotImplementedError(f"{type(self).__name__} must define step_together(self, actions)")

    def leave(self, agent: str) -> MultiStepResult | Awaitable[MultiStepResult]:
        """An agent is gone for good: it was too late, or its policy failed. Unless this says otherwise, the episode is over."""
        return MultiStepResult(done=True)

    def finalize(self) -> Mapping[str, float] | Awaitable[Mapping[str, float]] | None:
        """Last rewards by agent, added to their last turns'. Called once when the episode is over, be it done or cut
        short by a limit, unless it failed or nobody had a turn."""
        return None

    def close(self) -> None:
        """Called once when the episode is over, however it ended."""
