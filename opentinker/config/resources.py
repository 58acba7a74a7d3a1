"""The configs of what a job occupies, and when."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from opentinker.config.base import Config, Seconds


def _whole_or_fraction(gpus: float) -> float:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"{gpus:g} GPUs: more than one GPU must be a whole number; only a fraction of one GPU can be shared")
    if 0 < gpus < 0.01:
        raise ValueError(f"{gpus:g} of a GPU is less than the smallest share, 0.01")
    return int(gpus) if gpus == int(gpus) else round(gpus, 4)


Gpus = Annotated[float, Field(ge=0.0, le=100_000, allow_inf_nan=False), AfterValidator(_whole_or_fraction)]
"""0, a fraction of one GPU, or a whole number."""


class RoleResources(Config):
    """What one role occupies in the split layout."""

    gpus: Gpus | None = None
    """GPUs of one replica; None = one GPU if the cluster has any, otherwise one CPU slot; 0 = one CPU slot. A replica is never
    split over nodes, so a tensor-parallel engine stays on one."""
    replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Replicas of this size; each may be on another node. They start together or not at all. More than one are not served
    yet."""


class Resources(Config):
    """What the job's server occupies."""

    gpus: Gpus | None = None
    """GPUs on one node; None = one GPU if the cluster has any, otherwise one CPU slot; 0 = one CPU slot. A fraction, such as
    0.25, shares one GPU with other fractions. With `trainer.ranks` or `engine.tensor_parallel` it is one for each rank or part,
    whichever are more, which share them."""
    layout: Literal["colocated", "split"] = "colocated"
    """'colocated' keeps trainer and rollout engine on the same GPUs, where they take turns; 'split' gives the engine a process
    and resources of its own, maybe on another node, and samples while the trainer computes."""
    trainer: RoleResources | None = None
    """Layout 'split' only: what the trainer occupies; None = its defaults."""
    rollout: RoleResources | None = None
    """Layout 'split' only: what the rollout engine occupies; None = its defaults."""

    @model_validator(mode="after")
    def _roles_fit_layout(self) -> "Resources":
        roles = {"trainer": self.trainer, "rollout": self.rollout}
        if self.layout == "colocated" and (given := [name for name, role in roles.items() if role is not None]):
            raise ValueError(f"{' and '.join(given)} can only be sized with layout 'split'; 'colocated' takes gpus")
        if self.layout == "split" and self.gpus is not None:
            raise ValueError("layout 'split' takes trainer.gpus and rollout.gpus, not gpus")
        return self

    @property
    def roles(self) -> dict[str, RoleResources]:
        """What each role occupies in the split layout."""
        return {"trainer": self.trainer or RoleResources(), "rollout": self.rollout or RoleResources()}


class Scheduling(Config):
    """When the job's turn comes."""

    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    """Jobs of a higher priority go first, whatever anybody used; within a priority, fair share and waiting time decide."""
    time_limit_s: Seconds | None = None
    """Longest time that the job may hold its resources; then it FAILs, with its weights saved as checkpoint `stopped`. With a
    limit, a job may fill gaps in front of larger jobs; without one, it never overtakes."""
    idle_limit_s: Seconds | None = None
    """Longest time that a RUNNING job's server may have nothing to do; then the job ends: FAILED if the cluster drives it,
    CANCELLED if a client does, COMPLETED if nobody has to. None = no limit."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 0
    """How often a job whose server or driver died goes back into the queue, to go on from its last checkpoint; without one, it
    starts anew. Not for jobs with a lease: their client gets a ServerLostError, and goes on in another job (`resume`)."""
