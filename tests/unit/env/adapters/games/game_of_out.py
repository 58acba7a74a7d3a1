"""A turn game of several agents, who leave one after the other."""

from typing import Any, ClassVar

from gymnasium.spaces import Discrete
from pettingzoo import AECEnv


class Out(AECEnv):
    """Who plays 1 is out and pays the others; the last one is out, too. Each sees how often it played. The last seat begins."""

    metadata: ClassVar[dict[str, Any]] = {"name": "out_v0"}

    def __init__(self, players: int = 3) -> None:
        super().__init__()
        self.possible_agents = list("abcdefgh"[:players])
        self._spaces = {agent: Discrete(2) for agent in self.possible_agents}

    def action_space(self, agent: str) -> Discrete:
        return self._spaces[agent]

    def observe(self, agent: str) -> int:
        return self.count[agent]

    def close(self) -> None:
        """Nothing is open."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = self.possible_agents[:]
        self.count = dict.fromkeys(self.agents, 0)
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0), dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[-1]

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0
        self._clear_rewards()
        self.count[agent] += 1
        others = [other for other in self.agents if other != agent]
        self.agent_selection = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        if action == 1:
            self.terminations[agent] = True
            self.rewards = {name: -1 if name == agent else 1 / len(others) for name in self.agents}
            if len(others) == 1:
                self.terminations[others[0]] = True
        self._accumulate_rewards()
        self._deads_step_first()


env = Out
