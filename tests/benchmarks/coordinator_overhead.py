"""What the coordination of several agents costs: 3-agent episodes, 64 at once, whose policies answer after random delays.

Usage: python tests/benchmarks/coordinator_overhead.py [--episodes 10000] [--protocol round_robin]
Prints the processor time per turn of the whole driver (rendering, machines, barrier, session), that of the same policies alone,
and their difference; and that every episode came to its end.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opentinker.client.messages import Sample, SamplingParams
from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Action, Message, Tool
from opentinker.env.load import load_environment
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.players import Player, PolicyPlayer
from opentinker.multiagent.protocol import make_protocol
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import Seats
from opentinker.rendering.chunks import NO_IMAGES, Images

AGENTS = ("a", "b", "c")
ROUNDS = 4
TOKENS = np.array([50, 1], np.int32)
LOGPROBS = np.full(2, -0.5, np.float32)


class Talk(MultiAgentEnvironment):
    """Everybody is told everything, four rounds long."""

    agents = AGENTS

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, task: Any) -> Mapping[str, str]:  # type: ignore[override]
        return dict.fromkeys(AGENTS, "speak")

    async def step(self, agent: str, action: Action) -> MultiStepResult:  # type: ignore[override]
        self.turns += 1
        return MultiStepResult({agent: 1.0}, dict.fromkeys(AGENTS, f"{agent} spoke"), done=self.turns == ROUNDS * len(AGENTS))

    async def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:  # type: ignore[override]
        self.turns += len(actions)
        return MultiStepResult({}, dict.fromkeys(AGENTS, "all spoke"), done=self.turns >= ROUNDS * len(AGENTS))


class Letters:
    """Renders a message as its characters' codes."""

    stop_token_ids = (1,)
    preserves_prefix = True

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), images: Images = NO_IMAGES) -> list[int]:
        return [ord(c) for m in messages for c in str(m["content"])]

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action:
        return Action("x")

    def observation_delta(
        self,
        action_tokens: Sequence[int],
        observation: Sequence[Message],
        tools: Sequence[Tool] = (),
        images: Images = NO_IMAGES,
    ) -> list[int]:
        return self.render_prompt(observation)


class Delayed:
    """A policy that answers after a random delay."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.turns = 0

    async def __call__(self, prompt: Any, params: SamplingParams, request_id: str) -> Sample:
        self.turns += 1
        await asyncio.sleep(self.random.uniform(0.0, 0.004))
        return Sample(TOKENS, LOGPROBS, "stop", ((0, 2),))


async def alone(turns: int, at_once: int) -> float:
    """Processor seconds of the same policies without any coordination."""
    policy = Delayed(0)
    params = SamplingParams()

    async def one(count: int) -> None:
        for _ in range(count):
            await policy([], params, "r")

    start = time.process_time()
    await asyncio.gather(*(one(turns // at_once) for _ in range(at_once)))
    return time.process_time() - start


async def main(episodes: int, at_once: int, protocol: str) -> None:
    policy = Delayed(1)
    renderer: Any = Letters()
    players: dict[str, Player] = {name: PolicyPlayer(renderer, policy, SamplingParams(max_tokens=4), 10_000) for name in AGENTS}
    seats = Seats(AGENTS, make_protocol(protocol))
    config = RolloutConfig(max_concurrent_episodes=at_once)
    runner = GameRunner(load_environment(Talk), seats, config, TurnsConfig(), run_seed=0)
    ends: Counter[str] = Counter()
    start, wall = time.process_time(), time.monotonic()
    await runner.run(players, [0], episodes, 0, on_game=lambda game: ends.update(str(e.termination) for e in game.values()))
    cpu_s, wall_s = time.process_time() - start, time.monotonic() - wall
    turns = policy.turns
    bare_s = await alone(turns, at_once)
    print(f"{episodes} episodes, {at_once} at once, {protocol}: ends {dict(ends)}, {turns} turns, {wall_s:.0f} s")
    print(
        f"processor time per turn: {1e3 * cpu_s / turns:.3f} ms, of which the policies alone {1e3 * bare_s / turns:.3f} ms: "
        f"overhead {1e3 * (cpu_s - bare_s) / turns:.3f} ms"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--protocol", default="round_robin")
    options = parser.parse_args()
    asyncio.run(main(options.episodes, options.at_once, options.protocol))
