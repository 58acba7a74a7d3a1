"""What a driver loop has to know to go on, besides the weights: it is saved within the checkpoint, as one with them.

Nothing here is the state of a random generator: tasks, samples and orders each derive their seed from the run's seed and from
where they are (step, task, member, turn), so that the places are all there is to save.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from opentinker.errors import CheckpointError
from opentinker.training.metrics import Row

FORMAT = 1
_LATER = ("agents",)
"""Fields that the checkpoints of older releases lack."""


@dataclass(frozen=True)
class DriverState:
    """A loop at the end of a step."""

    step: int
    seed: int
    task_position: int
    """Where the next step draws from the stream of tasks or examples."""
    rows: int
    """Rows of metrics that stand."""
    evaluated_at: int | None = None
    reductions: int = 0
    """Times that the learning rate was reduced."""
    fruitless: int = 0
    stopped: str = ""
    watch: dict[str, Any] = field(default_factory=dict)
    agents: dict[str, Any] = field(default_factory=dict)
    """What a run of several agents knows besides."""
    config: dict[str, Any] = field(default_factory=dict)
    """The job's, as it was resolved."""

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any] | None, step: int, seed: int) -> Self | None:
        """What `to_json` gave; None if the checkpoint was saved without one, as older releases do.

        Raises:
            CheckpointError: it is of another step or seed, or not of this format.
        """
        if state is None:
            return None
        try:
            found = cls(
                **{item.name: state[item.name] for item in fields(cls) if item.name in state or item.name not in _LATER}
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's driver state cannot be read: {error!r}") from error
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint's driver state has format {state.get('format')}, this version reads {FORMAT}"
            )
        if (found.step, found.seed) != (step, seed):
            raise CheckpointError(
                f"the checkpoint is of step {found.step} of a run with seed {found.seed}, not of step {step} with seed {seed}",
                hint="a run goes on with the seed that it began with",
            )
        return found

    def later(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Of the rows that stand, those that came after the checkpoint."""
        return rows[self.rows :]
