"""TensorBoard's event files, written without torch or TensorFlow."""

import time
from collections.abc import Mapping
from pathlib import Path

from opentinker.config.sinks import TensorBoardConfig
from opentinker.training.sinks.base import SinkRun


class TensorBoardSink:
    """Another event file in the same folder when the run goes on; TensorBoard shows them as one."""

    def __init__(self, config: TensorBoardConfig, run: SinkRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(config.folder).expanduser() / run.name if config.folder else run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()  # a process that is killed flushes nothing

    def close(self) -> None:
        self._writer.close()
