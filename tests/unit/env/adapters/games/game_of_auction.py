"""A simultaneous game of three agents, who may leave."""

from typing import Any, ClassVar

from gymnasium.spaces import Discrete
from pettingzoo import ParallelEnv


class Auction(ParallelEnv):
    """Three rounds; who bids 0 is out, the highest bid alone earns 1. In the first round the info's mask forbids 2."""

    metadata: ClassVar[dict[str, Any]] = {"name": "auction_v0"}
    possible_agents: ClassVar[list[str]] = ["a", "b", "c"]

    def __init__(self) -> None:
        self._spaces = {agent: Discrete(3) for agent in self.possible_agents}

    def action_space(self, agent: str) -> Discrete:
        return self._spaces[agent]

    def close(self) -> None:
        """Nothing is open."""

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, int], dict[str, Any]]:
        self.agents, self.round = self.possible_agents[:], 0
        return self._seen(), {agent: {"action_mask": [1, 1, 0]} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        assert set(actions) == set(self.agents)
        self.round += 1
        top = max(actions.values())
        alone = list(actions.values()).count(top) == 1
        rewards = {agent: float(alone and bid == top) for agent, bid in actions.items()}
        seen, infos = self._seen(), {agent: {} for agent in self.agents}
        terminated = {agent: bid == 0 for agent, bid in actions.items()}
        truncated = dict.fromkeys(actions, self.round == 3)
        self.agents = [agent for agent in self.agents if not terminated[agent] and not truncated[agent]]
        return seen, rewards, terminated, truncated, infos

    def _seen(self) -> dict[str, int]:
        return {agent: len(self.agents) for agent in self.agents}


parallel_env = Auction
