"""`opentinker ps`: the jobs."""

import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import islice
from pathlib import PurePath
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
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
    state_text,
)
from opentinker.cli.live import repeat, show
from opentinker.client.scheduler import ENDED, SchedulerClient

PERIOD_S = 2.0
ENDED_SHOWN = 10
LIMIT = 50
WIDE = 100
"""Columns from which on the kind is shown."""
WIDEST = 140
"""Columns from which on the model is shown."""


class State(StrEnum):
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


LIVE = [state.value for state in State if state.value not in ENDED]


def ps(
    state: Annotated[
        list[State] | None, typer.Option("--state", "-s", case_sensitive=False, help="Only jobs in this state; repeatable.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="Only jobs of this kind: rl, interactive, ...")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs with this text in their name.")] = None,
    owner: Annotated[str | None, typer.Option(help="Another user's jobs, or '*' for everybody's (administrators).")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Ended jobs too, however old.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help=f"At most so many jobs. Default: {LIMIT}; none with --all.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the list current until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List jobs, newest first: by default those that live, and the last that ended.

    --json prints one job per line; with --watch, each job again whenever it changes.
    """
    filters: dict[str, Any] = {"kind": kind, "name": name, "owner": owner}
    states = [s.value for s in state or ()]
    most = limit if limit is not None else (None if everything else LIMIT)
    with connected(url, key, state_dir) as client:

        def found() -> Iterator[dict[str, Any]]:
            if states or everything:
                return client.jobs(states=states, limit=most, **filters)
            return _recent(client, most, filters)

        def view(jobs: list[dict[str, Any]]) -> RenderableType:
            return jobs_view(jobs, time.time(), out.width, cut=most is not None and len(jobs) >= most)

        period_s = PERIOD_S if watch else None
        if as_json and not watch:
            for job in found():
                print_json(job)
        elif as_json:
            repeat(lambda: list(found()), _changes(), period_s)
        else:
            show(lambda: list(found()), view, period_s)


def _recent(client: SchedulerClient, limit: int | None, filters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The living and the last that ended, newest first. A job that ends between the two questions is not shown twice."""
    living = list(client.jobs(states=LIVE, limit=limit, **filters))
    ended = client.jobs(states=sorted(ENDED), limit=ENDED_SHOWN, **filters)
    by_id = {job["id"]: job for job in [*living, *ended]}
    return islice(sorted(by_id.values(), key=lambda job: float(job["created_at"]), reverse=True), limit)


def _changes() -> Callable[[list[dict[str, Any]]], None]:
    """Prints those jobs that are new or not as they were when it was last called."""
    seen: dict[str, Any] = {}

    def take(jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            if seen.get(job["id"]) != job:
                print_json(job)
                seen[job["id"]] = job

    return take


def jobs_view(jobs: list[dict[str, Any]], now: float, width: int, *, cut: bool = False) -> RenderableType:
    """The table, in `width` columns. What gives way on a narrow terminal is never the note: it says what is wrong."""
    if not jobs:
        return Text("no jobs")
    owners = len({job["owner"] for job in jobs}) > 1
    wide, widest = width >= WIDE, width >= WIDEST
    table = plain_table(
        ("id", {}),
        ("state", {}),
        *([("kind", {})] if wide else []),
        *([("owner", {"max_width": width // 10})] if owners else []),
        ("age", {"justify": "right"}),
        ("name", {"max_width": width // (8 if owners and not wide else 5)}),
        *([("model", {"max_width": width // 6})] if widest else []),
        ("note", {"no_wrap": False, "overflow": "fold"}),
    )
    for job in jobs:
        table.add_row(
            Text(job["id"]),
            state_text(job),
            *([Text(job["kind"])] if wide else []),
            *([Text(job["owner"])] if owners else []),
            ago(job["created_at"], now),
            Text(job["name"]),
            *([Text(PurePath(job["config"]["base_model"]).name)] if widest else []),
            Text(job["cause"] or job["waiting_for"] or ""),
        )
    if cut:
        return Group(table, Text(f"the newest {len(jobs)}; there may be more: --all, --limit", "dim"))
    return table
