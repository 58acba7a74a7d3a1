"""What all driver loops share: learning rates by step, and the names of checkpoints."""

from typing import Literal, Protocol

from opentinker.client.messages import AdamParams


class Schedule(Protocol):
    """The part of a training config that says how fast to learn."""

    @property
    def steps(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def decay(self) -> Literal["none", "linear"]: ...
    @property
    def optimizer(self) -> AdamParams: ...


class Saving(Protocol):
    """The part of a training config that says what is saved."""

    @property
    def keep_last(self) -> int | None: ...


BEST = "best"
"""The checkpoint of the best evaluation."""


def kept(training: Saving, name: str, spare: int = 0) -> int | None:
    """How many checkpoints of a name are to be kept, of a job that keeps its last ones: of the periodic ones as many as it
    says and `spare` more, of the best one; all others stay."""
    if training.keep_last is None:
        return None
    return training.keep_last + spare if name.startswith(_STEP) else 1 if name == BEST else None


_STEP = "step-"


def checkpoint_name(step: int) -> str:
    """Of the checkpoint that a loop writes after a step."""
    return f"{_STEP}{step:06d}"


def scheduled(training: Schedule, step: int, scale: float = 1.0) -> AdamParams:
    """The optimizer of the `step`-th step (from 1), with the learning rate that warm-up and decay give it, times `scale`."""
    if step < training.warmup_steps:
        scale *= step / training.warmup_steps
    elif training.decay == "linear":
        falling = training.steps + 1 - max(training.warmup_steps, 1)
        scale *= max(0.0, (training.steps + 1 - step) / falling) if falling > 0 else 1.0
    return training.optimizer.model_copy(update={"learning_rate": training.optimizer.learning_rate * scale})
