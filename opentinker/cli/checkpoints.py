"""`opentinker checkpoints`: what jobs have saved."""

import time
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    ago,
    connected,
    out,
    plain_table,
    print_json,
)

JOBS = 20
WIDE = 90
"""Columns from which on the model is shown."""


def checkpoints(
    job_id: Annotated[
        str | None,
        typer.Argument(metavar="[JOB_ID]", help=f"A job's id. Default: your newest {JOBS} jobs.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List the checkpoints of a job, or of your newest jobs, newest first.

    A new job starts from one with start_from=ADDRESS. --json prints one checkpoint per line.
    """
    with connected(url, key, state_dir) as client:
        jobs = [job_id] if job_id is not None else [job["id"] for job in client.jobs(limit=JOBS)]
        found = [checkpoint for job in jobs for checkpoint in client.checkpoints(job)]
    found.sort(key=lambda checkpoint: float(checkpoint["created_at"]), reverse=True)
    if as_json:
        for checkpoint in found:
            print_json(checkpoint)
    else:
        out.print(checkpoints_view(found, time.time(), out.width))


def checkpoints_view(found: list[dict[str, Any]], now: float, width: int) -> RenderableType:
    """The table, in `width` columns; an address is never cut, for it is there to be copied."""
    if not found:
        return Text("no checkpoints")
    table = plain_table(
        ("address", {"min_width": max(len(checkpoint["ref"]) for checkpoint in found)}),
        ("kind", {}),
        ("step", {"justify": "right"}),
        ("size", {"justify": "right"}),
        ("age", {"justify": "right"}),
        *([("tags", {})] if (tagged := any(checkpoint.get("tags") for checkpoint in found)) else []),
        *([("base model", {})] if width >= WIDE else []),
    )
    for checkpoint in found:
        table.add_row(
            Text(checkpoint["ref"]),
            checkpoint["kind"],
            str(checkpoint["step"]),
            size(checkpoint["bytes"]),
            ago(checkpoint["created_at"], now),
            *([Text(", ".join(checkpoint.get("tags", [])))] if tagged else []),
            *([Text((checkpoint["base_model"] or "?").rstrip("/").rpartition("/")[2])] if width >= WIDE else []),
        )
    return table


def size(amount: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.{0 if unit == 'B' else 1}f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
