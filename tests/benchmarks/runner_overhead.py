"""What the client's side of a turn costs: rendering, FSM, threads and runner, with generation stubbed out.

Usage: python tests/benchmarks/runner_overhead.py MODEL_DIR [--episodes 128] [--turns 8]
Prints `runner_us_per_turn N` for a plain environment (a thread per call) and for an async one. The aim is under 1,000.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from opentinker.client.messages import IntArray, Sample, SamplingParams
from opentinker.config.rollout import RolloutConfig, SamplingConfig
from opentinker.env.environment import Action, Environment, StepResult
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.tokenizer import ChatTokenizer
from opentinker.rollout.runner import RolloutRunner


class Plain(Environment):
    """As cheap as an environment can be."""

    turns = 8

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, task: Any) -> str:
        return "Guess my number between 1 and 10."

    def step(self, action: Action) -> StepResult:
        self.turn += 1
        return StepResult(1.0, done=self.turn == self.turns, observation="Higher.", metrics={"exact": 1.0})


class Async(Plain):
    async def reset(self, task: Any) -> str:  # type: ignore[override]
        return Plain.reset(self, task)

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        return Plain.step(self, action)


async def microseconds_per_turn(renderer: ConversationRenderer, environment: type[Plain], episodes: int, turns: int) -> float:
    tokens = np.array([*renderer.tokenizer.encode("It is 7"), renderer.stop_token_ids[0]], np.int32)
    sample = Sample(tokens, np.full(len(tokens), -0.5, np.float32), "stop", ((0, len(tokens)),))

    async def generate(prompt: IntArray, params: SamplingParams, request_id: str) -> Sample:
        return sample

    environment.turns = turns
    config = RolloutConfig(max_turns=turns, max_concurrent_episodes=episodes)
    runner = RolloutRunner(renderer, generate, environment, config, SamplingConfig(), 100_000, run_seed=0)
    await runner.run([0], 8, step=0)
    start = time.perf_counter()
    groups = await runner.run(range(episodes // 8), 8, step=1)
    seconds = time.perf_counter() - start
    assert all(e.turns == turns for g in groups for e in g.episodes)
    return seconds / (episodes // 8 * 8 * turns) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    tokenizer = ChatTokenizer.from_files({n: (args.model_dir / n).read_bytes() for n in names if (args.model_dir / n).exists()})
    assert tokenizer.eos_token_id is not None
    renderer = ConversationRenderer(tokenizer, [tokenizer.eos_token_id])
    for kind in (Plain, Async):
        cost = asyncio.run(microseconds_per_turn(renderer, kind, args.episodes, args.turns))
        print(f"runner_us_per_turn {cost:.0f} environment {kind.__name__.lower()}")


if __name__ == "__main__":
    main()
