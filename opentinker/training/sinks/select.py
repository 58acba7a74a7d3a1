"""The sinks that a config asks for."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opentinker.config.sinks import Sinks
from opentinker.errors import ConfigError
from opentinker.training.sinks.base import SafeSink, Sink, SinkRun
from opentinker.training.sinks.mlflow import MlflowSink
from opentinker.training.sinks.tensorboard import TensorBoardSink
from opentinker.training.sinks.trackio import TrackioSink
from opentinker.training.sinks.wandb import WandbSink

STATE = "sinks.json"
"""In the run's folder: the run's id at its sinks, and the last step that each was given."""


class SinkState:
    """What a run that goes on has to know of what it told its sinks. Each sink has a file of its own."""

    def __init__(self, path: Path, *, anew: bool) -> None:
        self._path = path
        state = {} if anew else _read(path)
        self.id = str(state.get("id") or uuid.uuid4().hex)
        self._steps: dict[str, int] = {str(kind): int(step) for kind, step in state.get("steps", {}).items()}
        self.resumed = bool(state)
        self._write()

    def seen(self, kind: str, step: int) -> bool:
        """Whether a sink may be given a row: not if it was given one of that kind and step, or a later one. Noted before it is
        given, so that a row may be missing there after a crash, but is never there twice."""
        if step <= self._steps.get(kind, -1):
            return False
        self._steps[kind] = step
        self._write()
        return True

    def _write(self) -> None:
        draft = self._path.with_name(f".{self._path.name}")
        draft.write_text(json.dumps({"id": self.id, "steps": self._steps}))
        draft.replace(self._path)


def make_sinks(sinks: Sinks, folder: Path, config: Mapping[str, Any], *, resume_at: int | None) -> tuple[SafeSink, ...]:
    """A listener for each sink; `resume_at` as the `Recorder`'s.

    Raises:
        ConfigError: a sink's package is not installed here, or the run's folder cannot be written.
    """
    check_installed(sinks)
    made = []
    for number, sink in enumerate(sinks):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{number}-{sink.kind}-{STATE}" if len(sinks) > 1 else f"{sink.kind}-{STATE}"
            state = SinkState(folder / name, anew=resume_at is None or resume_at < 0)
        except OSError as error:
            raise ConfigError(f"cannot write the run's folder {folder}: {error.strerror}") from error
        run = SinkRun(state.id, sink.run_name or folder.resolve().name, folder.resolve(), config, state.resumed)
        made.append(SafeSink(sink.kind, partial(_OPEN[sink.kind], sink, run), state.seen))
    return tuple(made)


def check_installed(sinks: Sinks) -> None:
    """Raises: ConfigError when a sink's package is not installed here."""
    for sink in sinks:
        if find_spec(sink.package) is None:
            raise ConfigError(
                f"sinks: '{sink.kind}' needs the package {sink.package}, which is not installed where the driver runs",
                hint=f"pip install {sink.package}, or name it in environment.requirements of a submitted job",
            )


_OPEN: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}
"""Each imports its package when it is made."""


def close_all(sinks: Sequence[SafeSink]) -> None:
    for sink in sinks:
        sink.close()


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
