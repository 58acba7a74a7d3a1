"""Tools: the policy calls functions before it answers. The chat template tells it which there are."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import opentinker as ot
from opentinker.env.parsing import last_number, tool_calls

PRICES = {
    "apple": 3,
    "bread": 4,
    "cheese": 11,
    "dates": 7,
    "eggs": 5,
    "flour": 2,
    "grapes": 6,
    "honey": 9,
}
PAIRS = [(one, other) for one in PRICES for other in PRICES if one < other]
COUNTS = [(n, m) for n in range(1, 4) for m in range(1, 4)]
BASKETS = [{one: n, other: m} for one, other in PAIRS for n, m in COUNTS]
Random(0).shuffle(BASKETS)
ARTICLE = {"type": "string", "enum": sorted(PRICES)}
HELD_OUT = 20
"""The first baskets are kept for evaluation."""


class NewEnvironment(ot.Environment):
    """What does a basket cost? Prices are known to the tool `price` only.

    The right sum earns 1. A call that is malformed is answered by what is wrong with it, and costs 0.05. `max_turns` ends the
    episode.
    """

    tools = (
        {
            "type": "function",
            "function": {
                "name": "price",
                "description": "The price of one piece of an article.",
                "parameters": {
                    "type": "object",
                    "properties": {"article": ARTICLE},
                    "required": ["article"],
                },
            },
        },
    )

    def __init__(self, max_turns: int = 6) -> None:
        self._max_turns = max_turns
        self._turns = 0

    @classmethod
    def make_task(cls, seed: int) -> dict[str, Any]:
        """A training task, made from its seed alone. All members of a group get the same one."""
        return {"basket": Random(seed).choice(BASKETS[HELD_OUT:])}

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, Any]]:
        """Tasks for evaluation, which training never draws."""
        return [{"basket": basket} for basket in BASKETS[:HELD_OUT]]

    @classmethod
    def sample_actions(cls, task: dict[str, Any]) -> list[str]:
        """What a good policy would say turn by turn, for `opentinker env check`."""
        calls = [{"name": "price", "arguments": {"article": a}} for a in task["basket"]]
        texts = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
        return [*texts, str(_sum(task["basket"]))]

    def reset(self, task: dict[str, Any]) -> str:
        self._sum = _sum(task["basket"])
        counts = task["basket"].items()
        basket = " and ".join(f"{count} {article}" for article, count in counts)
        return f"What do {basket} cost together? Look up prices with the tool, then answer with the sum alone."

    def step(self, action: ot.Action) -> ot.StepResult:
        self._turns += 1
        last = self._turns >= self._max_turns
        said = tool_calls(action.text, self.tools)
        if said.calls or said.errors:
            texts = [self._looked_up(call.arguments) for call in said.calls]
            texts += said.errors
            replies: list[ot.Message] = [{"role": "tool", "content": t} for t in texts]
            return ot.StepResult(
                reward={"malformed": 0.0 - 0.05 * len(said.errors)},
                observation=replies,
                done=last,
            )
        exact = float(last_number(action.text) == self._sum)
        reward, metrics = {"correct": exact}, {"exact": exact}
        return ot.StepResult(reward=reward, done=True, metrics=metrics)

    def _looked_up(self, arguments: dict[str, Any]) -> str:
        price = PRICES.get(arguments["article"])
        return "there is no such article" if price is None else str(price)


def _sum(basket: dict[str, int]) -> int:
    return sum(PRICES[article] * count for article, count in basket.items())
