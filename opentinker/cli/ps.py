"""`opentinker ps`: the jobs."""

import time
from pathlib import PurePath

from rich import box
from rich.table import Table
from rich.text import Text

from opentinker.cli.common import DEFAULT_STATE_DIR, KeyOption, StateDirOption, UrlOption, ago, connected, out, state_text


def ps(url: UrlOption = None, key: KeyOption = None, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """List your jobs, newest first."""
    with connected(url, key, state_dir) as client:
        jobs = client.jobs()
    if not jobs:
        out.print("no jobs")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("id", "state", "kind", "age", "name", "model"):
        table.add_column(column, no_wrap=True)  # what has to give way on a narrow terminal is the note
    table.add_column("note")
    now = time.time()
    for job in jobs:
        name = "" if job["name"] == job["id"] else job["name"]
        model = PurePath(job["config"]["base_model"]).name
        note = job["cause"] or job["waiting_for"] or ""
        table.add_row(job["id"], state_text(job), job["kind"], ago(job["created_at"], now), name, model, Text(note))
    out.print(table)
