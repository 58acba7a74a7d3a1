"""PettingZoo's simultaneous games for several agents: `pettingzoo_parallel:classic.rps_v2`. Each seat is a player's."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from opentinker.env.adapters.pettingzoo_common import PettingZooAgents, agents_class
from opentinker.env.environment import Action
from opentinker.errors import EnvironmentFailedError
from opentinker.multiagent.environment import MultiStepResult
from opentinker.multiagent.protocol import AgentProtocol, Simultaneous


class PettingZooParallel(PettingZooAgents):
    """One game of PettingZoo in which all move at once. See `PettingZooAgents` for the arguments. Who has lost its turn plays a
    random legal move."""

    adapter: ClassVar[str] = "pettingzoo_parallel"
    maker: ClassVar[str] = "parallel_env"
    protocol: ClassVar[AgentProtocol] = Simultaneous()

    def reset(self, task: Any) -> dict[str, str]:
        observations, infos = self._begin(task)
        if not self._env.agents:
            raise EnvironmentFailedError("the game was over before the first move")
        return {agent: self._view(agent, observations[agent], infos.get(agent, {})) for agent in self._env.agents}

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        env = self._env
        playing = list(env.agents)
        rulings = {agent: self._ruling(agent, actions[agent].text) for agent in playing if agent in actions}
        costs = {agent: ruling.cost for agent, ruling in rulings.items()}
        if losers := [agent for agent, ruling in rulings.items() if ruling.move is None]:
            return self._ended_by(losers, costs, f"No legal move was named by: {', '.join(losers)}.")
        moves = {agent: rulings[agent].move if agent in rulings else self._lost(agent) for agent in playing}
        self._announce({agent: move for agent, move in moves.items() if move is not None})
        observations, rewards, terminated, truncated, infos = env.step(moves)
        over = {agent for agent in playing if terminated.get(agent) or truncated.get(agent) or agent not in env.agents}
        left = {agent: self._last_view(agent, observations[agent]) for agent in playing if agent in over}
        shown = {
            agent: self._view(agent, observations[agent], infos.get(agent, {})) for agent in env.agents if agent not in over
        }
        return self._played(rewards, costs, left | shown, list(left))

    def _lost(self, agent: str) -> int:
        """What an agent plays whose turn was lost: the others wait for a move of it."""
        name, move = self._any_move(agent, "")
        self._seats[agent].told.append(f"Your turn was lost: {name} was played for you.")
        return move


@functools.cache
def environment_class(spec: str) -> type[PettingZooAgents]:
    """The game of PettingZoo's module `spec`, such as `classic.rps_v2`; or of any module that has `parallel_env()`.

    Raises:
        EnvironmentLoadError: PettingZoo is not installed, or has no such game.
    """
    return agents_class("pettingzoo_parallel", spec, PettingZooParallel)
