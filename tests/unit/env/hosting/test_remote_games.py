"""Games of several agents on an environment server: its seats are known, and games are those that are played here."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hosting_tools import Serve

from opentinker.config.agents import TurnsConfig
from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Environment, Message
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError
from opentinker.multiagent.players import ScriptedPlayer
from opentinker.multiagent.protocol import Alternating
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import Seats, described, seats_of
from opentinker.training.agents import check_agents

OWN_ORDER = """
import opentinker as ot

class Mine:
    def next_turn(self, table):
        return ot.Turn(table.present[:1])

class Alone(ot.MultiAgentEnvironment):
    agents = ("a", "b")
    protocol = Mine()
    def reset(self, task):
        return {"a": "go", "b": "wait"}
    def step(self, agent, action):
        return ot.MultiStepResult(done=True)
"""


def job(**agents: Any) -> RLJobConfig:
    fields = {"base_model": "m", "lora": {"rank": 4}, "environment": {"name": "x"}, "agents": agents}
    return parse_config(RLJobConfig, fields)


async def games(environment: type[Environment]) -> list[str]:
    """What both sides were shown in two games of the first free cells."""
    heard: list[str] = []

    def first(messages: Sequence[Message], numbers: Any) -> str:
        heard.append(str(messages[-1]["content"]))
        return next(f"{c}{r}" for r in range(1, 6) for c in "abcde" if f"{c}{r}" not in str(heard))

    seats = await asyncio.to_thread(seats_of, environment, {})
    assert seats is not None
    runner = GameRunner(environment, seats, RolloutConfig(max_concurrent_episodes=1), TurnsConfig(), run_seed=0)
    players = {name: ScriptedPlayer(first) for name in seats.agents}
    tasks = load_environment("gomoku_duel").held_out_tasks()[:2]
    await runner.run(players, tasks, 1, step=0)
    await runner.close()
    return heard


async def test_a_hosted_game_has_the_seats_of_its_class_and_is_played_as_here(serve: Serve) -> None:
    here = load_environment("gomoku_duel")
    there = await serve(here)
    remote: Any = there.remote
    assert await asyncio.to_thread(seats_of, remote, {}) == seats_of(here, {}) == Seats(("black", "white"), Alternating())
    played = await games(remote)
    assert played == await games(here)
    assert len(played) > 10
    await asyncio.to_thread(check_agents, job(black={}, white={}), remote)
    with pytest.raises(ConfigError, match="nobody plays 'white'"):
        await asyncio.to_thread(check_agents, job(black={}), remote)


async def test_a_hosted_environment_for_one_and_one_with_an_order_of_its_own_are_refused(serve: Serve, tmp_path: Path) -> None:
    one: Any = (await serve(load_environment("guess_number"))).remote
    with pytest.raises(ConfigError, match="is an environment for one agent"):
        await asyncio.to_thread(check_agents, job(a={}, b={}), one)
    (tmp_path / "alone.py").write_text(OWN_ORDER)
    made = load_environment(f"{tmp_path}/alone.py:Alone")
    assert described(made) == {"agents": ["a", "b"], "protocol": None, "version": ""}
    own: Any = (await serve(made)).remote
    with pytest.raises(ConfigError, match="the hosted Alone has an order of play of its own"):
        await asyncio.to_thread(check_agents, job(a={}, b={}), own)
