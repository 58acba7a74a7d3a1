"""Many games at once, whose policies answer after random delays: each comes to its end, in every order of play."""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from opentinker.client.messages import SamplingParams
from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.load import load_environment
from opentinker.multiagent.players import Player, PolicyPlayer
from opentinker.multiagent.protocol import make_protocol
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import Seats

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import coordinator_overhead as games

AT_ONCE, COUNT = 64, 192


@pytest.mark.parametrize("protocol", ["round_robin", "simultaneous", "free"])
async def test_64_games_of_three_at_once_all_come_to_their_end(protocol: str) -> None:
    policy, renderer, ends = games.Delayed(1), games.Letters(), Counter[str]()
    player = PolicyPlayer(renderer, policy, SamplingParams(max_tokens=4), 10_000)
    players: dict[str, Player] = dict.fromkeys(games.AGENTS, player)
    config = RolloutConfig(max_concurrent_episodes=AT_ONCE)
    seats = Seats(games.AGENTS, make_protocol(protocol))
    runner = GameRunner(load_environment(games.Talk), seats, config, TurnsConfig(), run_seed=0)

    def ended(game: Any) -> None:
        ends.update(str(episode.termination) for episode in game.values())

    await asyncio.wait_for(runner.run(players, [0], COUNT, 0, on_game=ended), 120)
    assert ends == {"done": COUNT * len(games.AGENTS)}
    assert policy.turns >= COUNT * len(games.AGENTS) * games.ROUNDS
