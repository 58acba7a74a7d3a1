"""Trackio."""

from collections.abc import Mapping
from typing import Any

from opentinker.config.sinks import TrackioConfig
from opentinker.training.sinks.base import SinkRun


class TrackioSink:
    """Trackio knows runs by their names; the run's id is a part of it, so that no other run is continued."""

    def __init__(self, config: TrackioConfig, run: SinkRun) -> None:
        import trackio

        self._trackio = trackio
        settings = {name: run.config.get(name) for name in ("kind", "base_model")}
        self._run: Any = trackio.init(project=config.project, name=f"{run.name}-{run.id[:8]}", resume="allow", config=settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()
