"""Guess a number: several turns, after each of which the reply says higher or lower."""

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from opentinker.env.environment import Action, Environment, Message, StepResult

SPAN = 10
"""Numbers in a range."""
LOWEST = range(1, 11)
"""Where ranges begin."""
_TASKS = tuple((low, number) for low in LOWEST for number in range(low, low + SPAN))
HELD_OUT = tuple((low, number) for low, number in _TASKS if (3 * low + number) % 5 == 0)
"""Two numbers of each range. Every number is found in training too, in another range."""
TRAINING = tuple(task for task in _TASKS if task not in HELD_OUT)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


_EXAMPLE = (
    _message("user", "Guess my number between 21 and 30."),
    _message("assistant", "25"),
    _message("user", "Lower."),
    _message("assistant", "22"),
    _message("user", "Higher."),
    _message("assistant", "23"),
)
"""A game played as earlier turns, in a range that no task has."""


class GuessNumber(Environment):
    """A number in a range of ten, after one game as an example. `max_guesses` ends the episode without a find.

    Finding it earns 1, less up to a half for the guesses it took: 1 - 0.5 * (guesses - 1) / max_guesses. Every other guess
    earns `shaping` / max_guesses if it is a number that the replies so far allow, and nothing otherwise.
    """

    def __init__(self, max_guesses: int = 6, shaping: float = 0.3) -> None:
        self._max_guesses = max_guesses
        self._shaping = shaping
        self._number = self._guesses = self._low = self._high = 0

    @classmethod
    def make_task(cls, seed: int) -> dict[str, int]:
        low, number = Random(seed).choice(TRAINING)
        return {"low": low, "number": number}

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, int]]:
        return [{"low": low, "number": number} for low, number in HELD_OUT]

    @classmethod
    def sample_actions(cls, task: Any) -> list[str]:
        return [str(task["low"] + SPAN // 2), str(task["number"])]

    def reset(self, task: Any) -> list[Message]:
        self._number, self._low, self._high = task["number"], task["low"], task["low"] + SPAN - 1
        return [*_EXAMPLE, _message("user", f"Correct! Guess my number between {self._low} and {self._high}.")]

    def step(self, action: Action) -> StepResult:
        self._guesses += 1
        last = self._guesses >= self._max_guesses
        match = re.search(r"\d+", action.text)
        guess = int(match[0][:9]) if match else None
        if guess == self._number:
            reward = 1.0 - 0.5 * (self._guesses - 1) / self._max_guesses
            return StepResult(reward, done=True, observation="Correct!", metrics=self._metrics(found=True))
        sensible = guess is not None and self._low <= guess <= self._high
        if guess is None:
            reply = "Answer with a number."
        elif guess < self._number:
            self._low = max(self._low, guess + 1)
            reply = "Higher."
        else:
            self._high = min(self._high, guess - 1)
            reply = "Lower."
        reward = self._shaping / self._max_guesses if sensible else 0.0
        return StepResult(reward, done=last, observation=reply, metrics=self._metrics(found=False))

    def _metrics(self, *, found: bool) -> dict[str, float]:
        return {"exact": float(found), "guesses": float(self._guesses)}
