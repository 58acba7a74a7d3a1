"""`opentinker describe`: all about one job."""

import time
from typing import Any

import yaml
from rich.text import Text

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JobArgument,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    ago,
    connected,
    duration,
    out,
    print_json,
    state_text,
    without_token,
)
from opentinker.cli.events import event_line


def describe(
    job_id: JobArgument,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Show a job's state, why it waits or ended, its servers, events and resolved config. Its policy's token is not shown.

    --json prints the job as one document, with its events.
    """
    with connected(url, key, state_dir) as client:
        job, events = without_token(client.job(job_id)), client.events(job_id)
    if as_json:
        print_json({**job, "events": events})
        return
    out.print(Text.assemble((job["id"], "bold"), "  ", state_text(job), f"  {job['kind']}  {job['name']}"), soft_wrap=True)
    if job["cause"]:
        out.print(Text(f"cause: {job['cause']}", "red"), soft_wrap=True)
    if job["waiting_for"]:
        out.print(Text(f"waits for: {job['waiting_for']}", "yellow"), soft_wrap=True)
    out.print(Text(f"owner: {job['owner']}"))
    out.print(Text(times(job, time.time())), soft_wrap=True)
    out.print(Text(f"run folder: {job['run_dir']}"), soft_wrap=True)
    _section("events", Text("\n").join(event_line(event) for event in events))
    if job["server"]:
        _section("server", Text(_yaml(job["server"])))
    for name, server in job.get("servers", {}).items():
        _section(f"server {name}", Text(_yaml(server)))
    _section("config", Text(_yaml(job["config"])))


def times(job: dict[str, Any], now: float) -> str:
    """When it was submitted, and how long it waited and ran."""
    words = [f"submitted {ago(job['created_at'], now)} ago"]
    started, ended = job["started_at"], job["ended_at"]
    if started is not None:
        words.append(f"was running after {duration(started - job['created_at'])}")
        words.append(f"ran {duration((ended or now) - started)}" if ended else f"has been for {duration(now - started)}")
    if ended is not None:
        words.append(f"ended {ago(ended, now)} ago")
    return ", ".join(words)


def _section(title: str, body: Text) -> None:
    out.print(Text(f"\n{title}", "bold"))
    body.rstrip()
    out.print(body, soft_wrap=True)


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False)
