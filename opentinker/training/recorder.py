"""The folder of a run: every file in it is written here."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from opentinker.errors import ConfigError
from opentinker.training.metrics import Row, finite, summarize
from opentinker.training.report import render_report

Listener = Callable[[Row], None]


class Recorder:
    """Appends rows as they come (a reader sees whole lines only) and finishes with summary.json and report.html."""

    def __init__(self, folder: Path, config: Mapping[str, Any], *, listeners: tuple[Listener, ...] = ()) -> None:
        """Raises: ConfigError if the folder cannot be written, or holds another run."""
        self.folder = folder
        self.rows: list[Row] = []
        self._config = dict(config)
        self._transcripts: list[dict[str, Any]] = []
        self._listeners = listeners
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "metrics.jsonl").exists():
                raise ConfigError(f"{folder} holds another run", hint="choose another folder")
            (folder / "config.yaml").write_text(yaml.safe_dump(self._config, sort_keys=False))
        except OSError as error:
            raise ConfigError(f"cannot write the run's folder {folder}: {error.strerror}") from error

    def row(self, row: Row) -> None:
        """A row of metrics; listeners (progress views) see it too."""
        row = {**row, "at": time.time()}
        self.rows.append(row)
        self._append("metrics.jsonl", row)
        for listener in self._listeners:
            listener(row)

    def transcript(self, row: dict[str, Any]) -> None:
        self._transcripts.append(row)
        self._append("transcripts.jsonl", row)

    def finish(self, *, wall_s: float, checkpoint: str | None) -> dict[str, Any]:
        """Write the summary and the report; the summary. May be called again after more rows."""
        report = self.folder / "report.html"
        summary = {
            **summarize(self.rows),
            "wall_s": wall_s,
            "report": str(report.resolve()),
            "checkpoint": checkpoint,
            "run_dir": str(self.folder.resolve()),
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        report.write_text(render_report(self._config, self.rows, self._transcripts, summary))
        return summary

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(finite(row), allow_nan=False, default=str) + "\n")
