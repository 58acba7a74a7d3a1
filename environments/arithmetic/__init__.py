"""One-digit additions: a single turn, and an answer that is right or wrong."""

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from opentinker.env.environment import Action, Environment, Message, StepResult

LARGEST = 9
EXAMPLES = ((3, 3), (7, 1), (5, 9))
"""Solved in the prompt; neither they nor their mirror images are held out or drawn."""
_HELD_OUT_UNORDERED = "04 08 09 13 16 27 29 35 38 46 49 57 58 69 78"
"""15 unordered pairs, every digit at least twice."""

HELD_OUT = tuple(pair for a, b in [map(int, p) for p in _HELD_OUT_UNORDERED.split()] for pair in ((a, b), (b, a)))
_SEEN = {*HELD_OUT, *EXAMPLES, *((b, a) for a, b in EXAMPLES)}
TRAINING = tuple((a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1) if (a, b) not in _SEEN)


class Arithmetic(Environment):
    """Three additions solved as earlier turns, then a question. The first number in the answer counts.

    The exact sum earns 1; another number earns `near_credit`, less what it is off by, down to 0 at 10 off; no number earns 0.
    """

    def __init__(self, near_credit: float = 0.3) -> None:
        self._near_credit = near_credit
        self._sum = 0

    @classmethod
    def make_task(cls, seed: int) -> dict[str, int]:
        a, b = Random(seed).choice(TRAINING)
        return {"a": a, "b": b}

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, int]]:
        return [{"a": a, "b": b} for a, b in HELD_OUT]

    @classmethod
    def sample_actions(cls, task: Any) -> list[str]:
        return [str(task["a"] + task["b"])]

    def reset(self, task: Any) -> list[Message]:
        self._sum = task["a"] + task["b"]
        messages: list[Message] = []
        for a, b in EXAMPLES:
            messages += [_question(a, b), {"role": "assistant", "content": str(a + b)}]
        return [*messages, _question(task["a"], task["b"])]

    def step(self, action: Action) -> StepResult:
        number = re.search(r"\d+", action.text)
        off = abs(int(number[0][:9]) - self._sum) if number else 10
        reward = 1.0 if off == 0 else self._near_credit * max(0.0, 1.0 - off / 10)
        return StepResult(reward=reward, done=True, metrics={"exact": float(off == 0)})


def _question(a: int, b: int) -> Message:
    return {"role": "user", "content": f"{a} + {b}"}
