"""Who plays the seats of a run beside its policies: scripts, models elsewhere, and past versions."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from opentinker.config.agents import AgentConfig
from opentinker.config.job import RLJobConfig
from opentinker.config.opponents import PoolConfig
from opentinker.config.rollout import SamplingConfig
from opentinker.env.load import load_function
from opentinker.errors import CheckpointError, NotFoundError
from opentinker.multiagent.games import Groups
from opentinker.multiagent.models import ChatModel
from opentinker.multiagent.players import ModelPlayer, Player, PolicyPlayer, ScriptedPlayer, SeatPlayer
from opentinker.training.metrics import Row
from opentinker.training.pools import PoolSeat, naming

Plays = Callable[[str, Any, SamplingConfig, float | None], PolicyPlayer]
"""(the agent on whose server it is, a policy, how it is sampled, an evaluation's temperature or None) -> a player that nobody
trains on."""


class Opponents:
    """`pools`, by seat, are added when there is a server."""

    def __init__(self, agents: Mapping[str, AgentConfig], base_dir: Path | None, transport: Any = None) -> None:
        """Files of scripts are relative to `base_dir`; `transport` is httpx's, for tests.

        Raises:
            ConfigError: a script cannot be loaded, or the variable with a model's key is not set.
        """
        scripts = {name: agent.script for name, agent in agents.items() if agent.script}
        self._models = {name: ChatModel(name, a.model, transport) for name, a in agents.items() if a.model is not None}
        self._fixed: dict[str, Player] = {
            **{name: ScriptedPlayer(load_function(script, base_dir), name) for name, script in scripts.items()},
            **{name: ModelPlayer(model.ask, name) for name, model in self._models.items()},
        }
        self.pools: dict[str, PoolSeat] = {}

    @property
    def fixed(self) -> dict[str, SeatPlayer]:
        """The same in every game."""
        return dict(self._fixed)

    async def drawn(self, step: int, groups: int, first_index: int = 0) -> dict[str, SeatPlayer]:
        """Past versions for the groups of a training step, from `first_index` on."""
        return {seat: await pool.players(step, groups, first_index) for seat, pool in self.pools.items()}

    async def reference(self, tasks: int, temperature: float, step: int) -> dict[str, SeatPlayer]:
        """The oldest past versions, for an evaluation after `step` steps."""
        return {seat: await pool.reference(tasks, temperature, step) for seat, pool in self.pools.items()}

    def record(self, groups: Groups, learners: Sequence[str]) -> dict[str, Row]:
        """Count the games of a step; what its row tells of the pools, if there are any."""
        found = {seat: pool.record(groups, learners) for seat, pool in self.pools.items()}
        return {"pools": found} if found else {}

    async def after(self, step: int) -> None:
        """The updates of a step are published."""
        for pool in self.pools.values():
            await pool.after(step)

    def to_json(self) -> dict[str, Any]:
        return {seat: pool.to_json() for seat, pool in self.pools.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what `to_json` gave; a pool that is not in it begins anew.

        Raises:
            CheckpointError: a pool's part cannot be read.
        """
        for seat, pool in self.pools.items():
            if seat in state:
                try:
                    pool.restore(state[seat])
                except CheckpointError as error:
                    raise CheckpointError(f"'{seat}': {error.detail}", hint=error.hint) from error

    async def close(self) -> None:
        for model in self._models.values():
            await model.close()


async def take_starts(agents: Mapping[str, AgentConfig], policies: Mapping[str, Any]) -> None:
    """Give each policy the weights of the checkpoint that its agent begins with, if it names one.

    Raises:
        OpenTinkerError: what the server reports, such as CheckpointError; it names the agent.
    """
    for name, policy in policies.items():
        if address := agents[name].begins_with:
            with naming(f"agents.{name}"):
                await policy.load_weights(address)


async def open_pools(config: RLJobConfig, policies: Mapping[str, Any], plays: Plays) -> dict[str, PoolSeat]:
    """The seats of past versions: makes the policies of their slots.

    Raises:
        OpenTinkerError: what the server reports; it names the agent.
    """
    found: dict[str, PoolSeat] = {}
    for seat, agent in config.agents.items():
        if agent.pool is None:
            continue
        of = agent.pool.of
        lora, sampling = config.lora_of(of), agent.sampling or config.agents[of].sampling or config.sampling
        with naming(f"agents.{seat}.pool"):
            slots = [
                await policies[of].create_policy(lora, name=name, seed=config.training.seed)
                for name in _slots(seat, agent.pool)
            ]
        player = partial(_player, plays, of, sampling)
        training = config.training
        found[seat] = PoolSeat(
            seat, agent.pool, policies[of], slots, player, seed=training.seed, save_every=training.save_every
        )
    return found


def _slots(seat: str, pool: PoolConfig) -> list[str]:
    """The names of the policies that past versions are loaded into."""
    return [f"{seat}.{place}" for place in range(pool.places)]


async def delete_made(config: RLJobConfig, hosts: Mapping[str, Any]) -> None:
    """Delete what an earlier loop made on these servers, by name ("" is the job's own), beside the policies they began with.

    Raises:
        OpenTinkerError: what a server reports, but for policies that are not there.
    """
    for server, host in hosts.items():
        here = [name for name in config.policies if config.agents[name].server == server]
        pools = {seat: agent.pool for seat, agent in config.agents.items() if agent.pool and agent.pool.of in here}
        for name in [*here[1:], *(slot for seat, pool in pools.items() for slot in _slots(seat, pool))]:
            with suppress(NotFoundError):
                await host.delete_policy(name)


def _player(plays: Plays, of: str, sampling: SamplingConfig, policy: Any, temperature: float | None) -> PolicyPlayer:
    return plays(of, policy, sampling, temperature)
