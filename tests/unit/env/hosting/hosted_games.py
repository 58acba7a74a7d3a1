"""A game for two, hosted by tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import opentinker as ot


class Digits(ot.MultiAgentEnvironment):
    """Black earns 1 for a 7, white for a 3; both say their digit in turn."""

    agents = ("black", "white")
    version = "1"

    @classmethod
    def make_task(cls, seed: int) -> Any:
        return {"seed": seed}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"question": 1}]

    def reset(self, task: Any) -> Mapping[str, str]:
        return {name: f"{name}: which digit?" for name in self.agents}

    def step(self, agent: str, action: ot.Action) -> ot.MultiStepResult:
        hit = float(action.text.strip() == {"black": "7", "white": "3"}[agent])
        return ot.MultiStepResult({agent: hit}, done=agent == "white", left=[agent])
