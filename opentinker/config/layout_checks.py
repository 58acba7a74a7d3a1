"""Whether a job's engine and trainer fit the layout and the GPUs of its resources."""

from opentinker.config.resources import Resources
from opentinker.config.server import EngineConfig


def check_layout(kind: str, engine: EngineConfig, resources: Resources, *, trains: bool, trainer_ranks: int) -> None:
    """Whether the layout has a process and a GPU for each part of them. `kind` is the job's.

    Raises:
        ValueError: not so; it names the key, and says what would do.
    """
    _check_engine_parts(engine.tensor_parallel, resources, trains=trains)
    split = resources.layout == "split"
    if split and not trains:
        raise ValueError(f"resources.layout 'split' is for jobs that train; a job of kind '{kind}' has an engine only")
    if engine.weight_carrier in ("ipc", "nccl") and not split:
        raise ValueError(
            f"engine.weight_carrier={engine.weight_carrier} is between two processes: set resources.layout to 'split', "
            "or leave it out"
        )
    key, gpus = ("resources.trainer.gpus", resources.roles["trainer"].gpus) if split else ("resources.gpus", resources.gpus)
    if gpus and trainer_ranks > max(1, gpus):
        raise ValueError(
            f"trainer.ranks={trainer_ranks} needs a GPU for each, and {key} is {gpus:g}; set {key}={trainer_ranks}"
        )


def _check_engine_parts(ranks: int, resources: Resources, *, trains: bool) -> None:
    """A GPU for each part of a tensor-parallel engine."""
    split = resources.layout == "split"
    if ranks == 1 and not split:
        return
    if trains and not split:
        raise ValueError(
            f"engine.tensor_parallel={ranks} is for an engine apart from its trainer: set resources.layout to 'split'"
        )
    key, gpus = ("rollout.gpus", resources.roles["rollout"].gpus) if split else ("gpus", resources.gpus)
    if gpus and max(1, gpus) != ranks:
        raise ValueError(
            f"engine.tensor_parallel={ranks} takes a GPU for each part, and resources.{key} is {gpus:g}; give both the same"
        )
