"""Games for agents whose drivers are different processes, and those drivers, in the test's own event loop."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from coordination_tools import TOKEN, Place

import opentinker.training.meeting as meeting_module
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.multiagent.coordination.member import Member
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import RoundRobin
from opentinker.training.agents import AgentsLoop
from opentinker.training.book import CheckpointBook
from opentinker.training.recorder import Recorder


class Digits(MultiAgentEnvironment):
    """Black earns 1 for a 7, white for a 3, red for a 5; each says its digit in its turn."""

    agents = ("black", "white")
    protocol = RoundRobin()
    version = "2"
    right: Mapping[str, str] = {"black": "7", "white": "3", "red": "5"}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"question": i} for i in range(3)]

    def reset(self, task: Any) -> Mapping[str, str]:
        return {name: f"{name}: which digit?" for name in self.agents}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        hit = float(action.text.strip() == self.right[agent])
        return MultiStepResult({agent: hit}, done=agent == self.agents[-1], left=[agent], metrics={agent: {"exact": hit}})

    def leave(self, agent: str) -> MultiStepResult:
        return MultiStepResult(done=agent == self.agents[-1], left=[agent])


class Three(Digits):
    agents = ("black", "white", "red")


class Sits(Three):
    """Red is needed in no task."""

    def reset(self, task: Any) -> Mapping[str, str]:
        return dict.fromkeys(("black", "white"), "which digit?")

    def step(self, agent: str, action: Action) -> MultiStepResult:
        return replace(super().step(agent, action), done=agent == "white")


SMALL = {
    "rollout": {"groups_per_step": 3, "max_turns": 1},
    "algorithm": {"group_size": 4},
    "evaluation": {"samples_per_task": 2, "at_start": False},
}


class Drivers:
    """One loop for each agent, with a policy of its own."""

    def __init__(
        self, make_policy: Any, make_config: Any, folder: Path, environment: type[MultiAgentEnvironment], **changes: Any
    ):
        self.policies = {name: make_policy() for name in environment.agents}
        self._environment = environment
        self._folder = folder
        self._changes = SMALL | changes
        self._make_config = make_config

    def config(self, *agents: str, **changes: Any) -> RLJobConfig:
        meets = {"run": "duel", "url": "http://coordinator"}
        given = {"agents": {name: {} for name in agents}, "coordinator": meets} | self._changes | changes
        found: RLJobConfig = self._make_config(**given)
        return found

    async def connect(
        self,
        name: str,
        steps: Sequence[int] = (),
        resume_at: int | None = None,
        book: CheckpointBook | None = None,
        **changes: Any,
    ) -> AgentsLoop:
        config = self.config(name, **changes)
        recorder = Recorder(self._folder / name, config.model_dump(mode="json"), resume_at=resume_at, checkpoints=book)
        environment = load_environment(self._environment)
        return await AgentsLoop.connect(config, environment, self.policies[name], recorder, steps=steps)

    async def drive(self, name: str, count: int, **options: Any) -> AgentsLoop:
        loop = await self.connect(name, **options)
        await loop.resume(max(options.get("steps", ()), default=0))
        await loop.run(count)
        await loop.close()
        return loop


def reach(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    """Have the drivers that are made from now on reach a place without a network."""
    monkeypatch.setenv("OPENTINKER_ENV_TOKEN", TOKEN)
    transport = httpx.ASGITransport(place.app)
    monkeypatch.setattr(meeting_module, "Member", partial(Member, transport=transport))
