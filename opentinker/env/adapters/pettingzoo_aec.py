"""PettingZoo's turn games (AEC) for several agents: `pettingzoo_aec:classic.tictactoe_v3`. Each seat is a player's."""

import functools
from typing import Any, ClassVar

from opentinker.env.adapters.pettingzoo_common import PettingZooAgents, agents_class
from opentinker.env.environment import Action
from opentinker.errors import EnvironmentFailedError
from opentinker.multiagent.environment import MultiStepResult
from opentinker.multiagent.protocol import AgentProtocol, EnvironmentChooses


class PettingZooAEC(PettingZooAgents):
    """One turn game of PettingZoo, whose order of play is the game's own. See `PettingZooAgents` for the arguments."""

    adapter: ClassVar[str] = "pettingzoo_aec"
    maker: ClassVar[str] = "env"
    protocol: ClassVar[AgentProtocol] = EnvironmentChooses()

    def reset(self, task: Any) -> MultiStepResult:
        self._begin(task)
        left = self._without_dead()
        if not self._env.agents:
            raise EnvironmentFailedError("the game was over before the first move")
        first = self._env.agent_selection
        shown = {agent: "\n\n".join(self._seats[agent].take()) for agent in self._env.agents if agent != first}
        return MultiStepResult(observations=shown | self._next_view(), next_agents=[first], left=list(left))

    def step(self, agent: str, action: Action) -> MultiStepResult:
        env = self._env
        if agent not in env.agents or agent != env.agent_selection:
            hint = "a game goes on with a move only, so that turns.on_late cannot be skip"
            raise EnvironmentFailedError(f"{agent} moves, and it is the turn of {env.agent_selection}", hint=hint)
        ruling = self._ruling(agent, action.text)
        if ruling.move is None:
            return self._ended_by([agent], {agent: ruling.cost}, f"The answer of {agent} named no legal move.")
        self._announce({agent: ruling.move})
        env.step(ruling.move)
        rewards = dict(env.rewards)  # before the dead are removed, which clears them
        left = self._without_dead()
        following = [env.agent_selection] if env.agents else []
        return self._played(rewards, {agent: ruling.cost}, left | self._next_view(), list(left), following)

    def _without_dead(self) -> dict[str, str]:
        """Takes out those for whom the game is over, as PettingZoo wants it: the last views of those who left."""
        env, left = self._env, {}
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            agent = env.agent_selection
            left[agent] = self._last_view(agent, env.observe(agent))
            env.step(None)
        return left

    def _next_view(self) -> dict[str, str]:
        """What the agent is shown whose turn it is."""
        env = self._env
        if not env.agents:
            return {}
        agent = env.agent_selection
        return {agent: self._view(agent, env.observe(agent), env.infos[agent])}


@functools.cache
def environment_class(spec: str) -> type[PettingZooAgents]:
    """The game of PettingZoo's module `spec`, such as `classic.connect_four_v3`; or of any module that has `env()`.

    Raises:
        EnvironmentLoadError: PettingZoo is not installed, or has no such game.
    """
    return agents_class("pettingzoo_aec", spec, PettingZooAEC)
