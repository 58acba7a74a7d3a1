"""Weights & Biases."""

from collections.abc import Mapping

from opentinker.config.sinks import WandbConfig
from opentinker.training.sinks.base import SinkRun


class WandbSink:
    """The run keeps its id, so that it is one run there, however often it goes on."""

    def __init__(self, config: WandbConfig, run: SinkRun) -> None:
        import wandb

        self._run = wandb.init(
            project=config.project,
            entity=config.entity or None,
            name=run.name,
            id=run.id,
            resume="allow",
            mode=config.mode,
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Steps and evaluations come with the same numbers, which its own counter would take for one row or refuse.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()
