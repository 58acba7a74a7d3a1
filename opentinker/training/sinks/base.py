"""What a sink is, and how rows reach it without training ever waiting for it or failing over it."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opentinker.training.metrics import Row

WAITING_ROWS = 1000
"""Rows that wait for a sink; more are dropped and counted."""
CLOSE_S = 30.0
"""How long the end of a run waits for a sink."""
FAILURES = 3
"""Failures in a row after which a sink is given up."""
_PREFIX = {
    "step": "train",
    "evaluation": "evaluation",
    "agents_step": "train",
    "agents_evaluation": "evaluation",
    "cross_play": "cross_play",
    "sft_step": "train",
    "sft_evaluation": "evaluation",
    "preference_step": "train",
    "preference_evaluation": "evaluation",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SinkRun:
    """The run that a sink is told of."""

    id: str
    """The same when the run goes on after an interruption; unique among all runs."""
    name: str
    folder: Path
    config: Mapping[str, Any]
    resumed: bool


class Sink(Protocol):
    """One place. Its methods are called from one thread, may take long, and may raise whatever they like."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row, with the names of what they are nested in, below `train/`, `evaluation/` or `cross_play/`; empty
    for rows that no sink shows."""
    prefix = _PREFIX.get(str(row["kind"]))
    found: dict[str, float] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, bool) or name.endswith(("/kind", "/step", "/at")):
            return
        if isinstance(value, int | float):
            found[name] = float(value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{name}/{key}", item)

    if row["kind"] == "cross_play":  # those of pairs and of past versions would be other names each time
        row = {name: value for name, value in row.items() if name not in ("matrix", "ratings", "results")}
    if prefix is not None:
        visit(prefix, row)
    return found


class SafeSink:
    """A listener of a run's rows that passes them on in a thread of its own.

    A sink that cannot be opened, that fails, or that is too slow is logged once and costs rows there, never the run. `seen` is
    called with (kind, step) before a row is passed on, and says whether it may be: no step is shown twice, whatever dies when.
    """

    def __init__(self, kind: str, open_sink: Callable[[], Sink], seen: Callable[[str, int], bool]) -> None:
        self._kind = kind
        self._open = open_sink
        self._seen = seen
        self._rows: queue.Queue[Row | None] = queue.Queue(WAITING_ROWS)
        self.dropped = 0
        self.failed = ""
        """Why the sink does not get everything; empty if it does."""
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{kind}", daemon=True)
        self._thread.start()

    def __call__(self, row: Row) -> None:
        if self._given_up:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.dropped += 1
            self._report("it is too slow: rows are dropped")

    def close(self) -> None:
        """Wait a while for what is still to be passed on."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._report(f"it did not end within {CLOSE_S:g} s")

    def _run(self) -> None:
        sink, failures = None, 0
        while (row := self._rows.get()) is not None:
            values = scalars(row)
            if not values or self._given_up:
                continue
            try:
                # Opened with the first row: a run that never gets that far leaves nothing there.
                sink = sink or self._open()
                if self._seen(str(row["kind"]), int(row["step"])):
                    sink.log(int(row["step"]), values)
                failures = 0
            except BaseException as error:  # whatever these packages raise, SystemExit included
                failures += 1
                self._given_up = failures >= FAILURES
                self._report(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if sink is not None:
            try:
                sink.close()
            except BaseException as error:
                self._report(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _report(self, reason: str) -> None:
        if not self.failed:
            self.failed = reason
            log.warning(
                "event=sink_failed sink=%s error=%s; the run goes on, and metrics.jsonl has everything", self._kind, reason
            )
