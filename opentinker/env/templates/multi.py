"""Several turns: the environment answers each action, and the reward comes bit by bit."""

from collections.abc import Sequence
from random import Random

import opentinker as ot
from opentinker.env.parsing import last_number

LARGEST = 50
HELD_OUT = tuple(range(3, LARGEST, 7))
"""Numbers that are kept for evaluation."""
TRAINING = tuple(n for n in range(1, LARGEST + 1) if n not in HELD_OUT)


class NewEnvironment(ot.Environment):
    """A hidden number is to be found; each reply says higher or lower.

    Finding it earns 1, and up to 0.5 more the sooner it is. `max_guesses` ends the episode.
    """

    def __init__(self, max_guesses: int = 8) -> None:
        self._max_guesses = max_guesses
        self._guesses = 0

    @classmethod
    def make_task(cls, seed: int) -> dict[str, int]:
        """A training task, made from its seed alone. All members of a group get the same one."""
        return {"number": Random(seed).choice(TRAINING)}

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, int]]:
        """Tasks for evaluation, which training never draws."""
        return [{"number": number} for number in HELD_OUT]

    @classmethod
    def sample_actions(cls, task: dict[str, int]) -> list[str]:
        """What a good policy would say turn by turn, for `opentinker env check`."""
        return ["25", str(task["number"])]

    def reset(self, task: dict[str, int]) -> str:
        self._number = task["number"]
        return f"I think of a number from 1 to {LARGEST}. Guess it: answer with a number and nothing else."

    def step(self, action: ot.Action) -> ot.StepResult:
        self._guesses += 1
        last = self._guesses >= self._max_guesses
        guess = last_number(action.text)
        if guess == self._number:
            speed = 0.5 * (1 - self._guesses / self._max_guesses)
            return ot.StepResult(
                reward={"found": 1.0, "speed": speed},
                done=True,
                metrics=self._metrics(1.0),
            )
        reply = "That is no number."
        if guess is not None:
            reply = "Higher." if guess < self._number else "Lower."
        return ot.StepResult(observation=reply, done=last, metrics=self._metrics(0.0))

    def _metrics(self, found: float) -> dict[str, float]:
        return {"exact": found, "guesses": float(self._guesses)}
