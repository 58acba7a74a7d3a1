"""Dynamic loss scaling (Micikevicius et al., 2018, section 3.2): gradients in float16 are computed larger than they are, so
that small ones are not lost, and no larger than float16 holds.
"""

from collections.abc import Mapping
from typing import Any

INITIAL = 2.0**16
LARGEST = 2.0**24
GROWTH_STEPS = 200
"""Good steps in a row after which the scale is doubled."""


class LossScale:
    """The factor of the loss while gradients are computed; changes between steps only."""

    def __init__(self) -> None:
        self.value = INITIAL
        self.good_steps = 0
        """Since the scale last changed."""
        self.skipped = 0
        """Steps in all that were left out because a gradient did not fit."""

    def worked(self) -> None:
        """A step's gradients were finite."""
        self.good_steps += 1
        if self.good_steps >= GROWTH_STEPS:
            self.value, self.good_steps = min(2 * self.value, LARGEST), 0

    def overflowed(self) -> bool:
        """A step's gradients were not finite: whether a smaller scale may help."""
        if self.value <= 1:
            return False
        self.value, self.good_steps = self.value / 2, 0
        self.skipped += 1
        return True

    def restart(self) -> None:
        self.value, self.good_steps, self.skipped = INITIAL, 0, 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.value, self.good_steps, self.skipped = float(state["value"]), int(state["good_steps"]), int(state["skipped"])
