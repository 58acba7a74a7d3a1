"""Whether a job's engine and trainer fit the layout and the GPUs of its resources."""

from opentinker.config.resources import Resources
from opentinker.config.server import EngineConfig


def check_layout(kind: str, engine: EngineConfig, resources: Resources, *, trains: bool, trainer_ranks: int) -> None:
    """Whether the layout has a process and a GPU for each part of them. `kind` is the job's.

    Raises:
        ValueError: not so; it names the key, and says what would do.
    """
    split = resources.layout == "split"
    if split and not trains:
        raise ValueError(f"resources.layout 'split' is for jobs that train; a job of kind '{kind}' has an engine only")
    parts = engine.tensor_parallel
    if not split:
        _check_carrier(engine, trains=trains)
    if trains and not split:  # on the same GPUs
        name, most = max((("trainer.ranks", trainer_ranks), ("engine.tensor_parallel", parts)), key=lambda each: each[1])
        _check_gpus(name, most, "gpus", resources)
        return
    if split:
        _check_gpus("trainer.ranks", trainer_ranks, "trainer.gpus", resources)
    key = "rollout.gpus" if split else "gpus"
    gpus = _gpus(key, resources)
    if gpus and (split or parts > 1) and max(1, gpus) != parts:
        raise ValueError(
            f"engine.tensor_parallel={parts} takes a GPU for each part, and resources.{key} is {gpus:g}; give both the same"
        )


def _check_carrier(engine: EngineConfig, *, trains: bool) -> None:
    """Colocated, weights go to other processes only where the engine has several parts, one of them on the trainer's GPU."""
    carrier = engine.weight_carrier
    if carrier in ("ipc", "nccl") and not trains:
        raise ValueError(f"engine.weight_carrier={carrier} is for jobs that train: leave it out")
    if carrier in ("ipc", "nccl") and engine.tensor_parallel == 1:
        raise ValueError(
            f"engine.weight_carrier={carrier} is between two processes: set resources.layout to 'split', or leave it out"
        )
    if carrier == "nccl":
        raise ValueError(
            "engine.weight_carrier=nccl is between different GPUs, and in the layout 'colocated' trainer and engine share "
            "theirs: set it to 'auto', or resources.layout to 'split'"
        )


def _check_gpus(name: str, wanted: int, key: str, resources: Resources) -> None:
    """At least one for each of so many; more may stay unused. 0 are CPU slots."""
    gpus = _gpus(key, resources)
    if gpus and wanted > max(1, gpus):
        raise ValueError(f"{name}={wanted} needs a GPU for each, and resources.{key} is {gpus:g}; set resources.{key}={wanted}")


def _gpus(key: str, resources: Resources) -> float | None:
    role = key.removesuffix("gpus").rstrip(".")
    return resources.roles[role].gpus if role else resources.gpus
