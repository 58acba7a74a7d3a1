"""Each agent of a game trains on exactly what it would train on if its part had been an episode of its own."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from test_games import Bidding, Debate, Letters, Relay, policies, runner

from opentinker.algorithms.select import advantage_function
from opentinker.client.messages import Sample, SamplingParams
from opentinker.config.algorithms import GRPOConfig
from opentinker.config.rollout import RolloutConfig, SamplingConfig
from opentinker.env.environment import Action, Environment, StepResult
from opentinker.rollout.runner import RolloutRunner
from opentinker.rollout.types import Episode, Group
from opentinker.training.batch import build_batch, members_of


def parts(episode: Episode) -> list[list[Any]]:
    """What the agent was shown before each of its actions, and after the last one."""
    shown: list[list[Any]] = [[]]
    for message in episode.messages:
        if message["role"] == "assistant":
            shown.append([])
        else:
            shown[-1].append(message)
    return shown


class Recorded(Environment):
    """Shows and pays what was recorded; the task is the member's number."""

    episodes: Sequence[Episode] = ()

    def reset(self, task: Any) -> Any:
        self.episode = Recorded.episodes[task]
        self.shown, self.turn = parts(self.episode), 0
        return self.shown[0]

    def step(self, action: Action) -> StepResult:
        self.turn += 1
        done = self.turn == len(self.episode.rewards)
        reward = self.episode.rewards[self.turn - 1]
        return StepResult(reward, done, "" if done else self.shown[self.turn])


async def alone(group: Group) -> list[Episode]:
    """The group's episodes again, one agent in an environment that replays the others."""
    Recorded.episodes = group.episodes
    found = []
    for number, episode in enumerate(group.episodes):
        samples = iter([r.sample for t in episode.trajectories for r in t.runs if r.sample is not None])

        async def generate(prompt: Any, params: SamplingParams, request_id: str, samples: Any = samples) -> Sample:
            await asyncio.sleep(0)
            found_sample: Sample = next(samples)
            return found_sample

        renderer: Any = Letters()
        single = RolloutRunner(renderer, generate, Recorded, RolloutConfig(), SamplingConfig(max_tokens=4), 10_000, 0)
        [again] = await single.run([number], 1, 0)
        [episode] = again.episodes
        episode.member = number
        found.append(episode)
    return found


async def test_tokens_masks_and_advantages_are_those_of_recorded_runs_of_one_agent() -> None:
    for environment in (Relay, Debate, Bidding):
        groups = await runner(environment).run(policies(environment), ["x", "y"], 4, step=0)
        for name, of_agent in groups.items():
            config = GRPOConfig(group_size=4)
            single = [Group(group.task, group.index, await alone(group)) for group in of_agent]
            batches = [
                build_batch(members_of(of), advantage_function(config, None), config, longest_tokens=4)
                for of in (of_agent, single)
            ]
            assert batches[0].data or environment is not Relay
            assert batches[0].minibatches == batches[1].minibatches, name
            for one, other in zip(batches[0].data, batches[1].data, strict=True):
                assert np.array_equal(one.tokens, other.tokens)
                assert np.array_equal(one.targets, other.targets)
                for array in ("weights", "behaviour_logprobs", "advantages"):
                    assert np.array_equal(one.arrays[array], other.arrays[array]), (name, array)
