"""The folder of a run: every file in it is written here."""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from opentinker.errors import ConfigError
from opentinker.images import Image
from opentinker.training.book import CheckpointBook
from opentinker.training.metrics import Row, finite, summarize
from opentinker.training.report import Render, render_report
from opentinker.training.transcripts import image_file
from opentinker.training.whole_file import write_whole

Listener = Callable[[Row], None]
Summarize = Callable[[Sequence[Row]], dict[str, Any]]
"""The headline numbers of a run's rows."""
METRICS = "metrics.jsonl"


class Recorder:
    """Appends rows as they come (a reader sees whole lines only) and finishes with summary.json and report.html."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        listeners: tuple[Listener, ...] = (),
        resume_at: int | None = None,
        summarize: Summarize = summarize,
        render: Render = render_report,
        checkpoints: CheckpointBook | None = None,
    ) -> None:
        """With `resume_at` the folder's run goes on after that step; -1 starts it anew. What it did beyond stays in the
        files, before a row of kind `resumed` that says what no longer counts (`standing_rows`).

        Raises:
            ConfigError: the folder cannot be written, or holds another run, or rows that cannot be read.
        """
        self.folder = folder
        self.checkpoints = checkpoints or CheckpointBook()
        self.rows: list[Row] = []
        self._config = dict(config)
        self._transcripts: list[dict[str, Any]] = []
        self._listeners = listeners
        self._summarize, self._render = summarize, render
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resume_at is not None:
                self.rows = standing_rows(_whole_lines(folder / METRICS), resume_at)
                self._transcripts = [row for row in _whole_lines(folder / "transcripts.jsonl") if row["step"] <= resume_at]
            else:
                check_no_run(folder)
            write_whole(folder / "config.yaml", yaml.safe_dump(self._config, sort_keys=False))
            if resume_at is not None:
                self.row({"kind": "resumed", "step": resume_at})
        except OSError as error:
            raise ConfigError(f"cannot write the run's folder {folder}: {error.strerror}") from error

    def row(self, row: Row) -> None:
        """A row of metrics; listeners (progress views) see it too."""
        row = {**row, "at": time.time()}
        if row["kind"] != "resumed":
            self.rows.append(row)
        self._append(METRICS, row)
        for listener in self._listeners:
            listener(row)

    def take_back(self, step: int) -> None:
        """The run goes on after an earlier step: what came later no longer counts."""
        self.rows = standing_rows(self.rows, step)
        self._transcripts = [row for row in self._transcripts if row["step"] <= step]
        self.row({"kind": "resumed", "step": step})

    def transcript(self, row: dict[str, Any], images: Sequence[Image] = ()) -> None:
        """A sample episode; its images get files of their own."""
        for image in images:
            path = self.folder / image_file(image)
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                path.write_bytes(image.data)
        self._transcripts.append(row)
        self._append("transcripts.jsonl", row)

    def files(self, texts: Mapping[str, str]) -> None:
        """Write files of the run, by name, in place of what they held."""
        for name, text in texts.items():
            (self.folder / name).write_text(text, encoding="utf-8")

    def finish(self, *, wall_s: float, checkpoint: str | None) -> dict[str, Any]:
        """Write the summary and the report; the summary. May be called again after more rows."""
        report = self.folder / "report.html"
        summary = {
            **self._summarize(self.rows),
            "wall_s": wall_s,
            "report": str(report.resolve()),
            "checkpoint": checkpoint,
            "run_dir": str(self.folder.resolve()),
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        report.write_text(self._render(self._config, self.rows, self._transcripts, summary, self.folder))
        return summary

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(finite(row), allow_nan=False, default=str) + "\n")


def check_no_run(folder: Path) -> None:
    """Raises: ConfigError when the folder holds the rows of a run."""
    if (folder / METRICS).exists():
        raise ConfigError(
            f"{folder} holds another run",
            hint="choose another folder; or go on with it: resume=True in Python, --resume for `opentinker train`",
        )


def render_again(folder: Path, render: Render) -> None:
    """Write the report of a finished run anew, from its files; nothing if one of them is not there."""
    names = ("config.yaml", METRICS, "summary.json")
    if not all((folder / name).is_file() for name in names):
        return
    config, summary = yaml.safe_load((folder / names[0]).read_text()), json.loads((folder / names[2]).read_text())
    rows, talks = standing_rows(_whole_lines(folder / names[1])), _whole_lines(folder / "transcripts.jsonl")
    (folder / "report.html").write_text(render(config, rows, talks, summary, folder))


def standing_rows(rows: Iterable[Row], resume_at: int | None = None) -> list[Row]:
    """The rows that count: those that a later `resumed` row, or one at `resume_at`, does not take back."""
    standing: list[Row] = []
    for row in [*rows, *([] if resume_at is None else [{"kind": "resumed", "step": resume_at}])]:
        if row["kind"] == "resumed":
            standing = [earlier for earlier in standing if earlier["step"] <= row["step"]]
        else:
            standing.append(row)
    return standing


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file whose writer may have died within a line; that line is cut off, so that the next one starts anew.

    Raises:
        ConfigError: another line is no row.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return [_row(line, path, number) for number, line in enumerate(whole.splitlines(), 1)]


def _row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict) and "step" in row:
        return row
    raise ConfigError(f"{path}: line {number} is no row of a run", hint="mend it, or take the line out")
