"""One turn: a question whose answer is right or wrong."""

from collections.abc import Sequence
from random import Random

import opentinker as ot
from opentinker.env.parsing import last_number

HELD_OUT = 20
"""The first products are kept for evaluation."""
PAIRS = [(a, b) for a in range(2, 20) for b in range(2, 20)]
Random(0).shuffle(PAIRS)


class NewEnvironment(ot.Environment):
    """A product of two numbers. The last number of the answer counts: 1 for the right one, else 0."""

    @classmethod
    def make_task(cls, seed: int) -> dict[str, int]:
        """A training task, made from its seed alone. All members of a group get the same one."""
        a, b = Random(seed).choice(PAIRS[HELD_OUT:])
        return {"a": a, "b": b}

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, int]]:
        """Tasks for evaluation, which training never draws."""
        return [{"a": a, "b": b} for a, b in PAIRS[:HELD_OUT]]

    @classmethod
    def sample_actions(cls, task: dict[str, int]) -> list[str]:
        """What a good policy would say, for `opentinker env check`."""
        return [f"The answer is {task['a'] * task['b']}."]

    def reset(self, task: dict[str, int]) -> str | list[ot.Message]:
        self._product = task["a"] * task["b"]
        return [
            {"role": "system", "content": "Answer with a number and nothing else."},
            {"role": "user", "content": f"What is {task['a']} times {task['b']}?"},
        ]

    def step(self, action: ot.Action) -> ot.StepResult:
        exact = float(last_number(action.text) == self._product)
        return ot.StepResult(reward=exact, done=True, metrics={"exact": exact})
