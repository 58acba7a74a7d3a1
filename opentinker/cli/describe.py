"""`opentinker describe`: all about one job."""

import time
from typing import Any

import yaml
from rich.text import Text

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JobArgument,
    KeyOption,
    StateDirOption,
    UrlOption,
    connected,
    out,
    state_text,
)


def describe(
    job_id: JobArgument, url: UrlOption = None, key: KeyOption = None, state_dir: StateDirOption = DEFAULT_STATE_DIR
) -> None:
    """Show a job's state, cause, server, events and resolved config. The policy's token is not shown."""
    with connected(url, key, state_dir) as client:
        job, events = client.job(job_id), client.events(job_id)
    out.print(Text.assemble((job["id"], "bold"), "  ", state_text(job), f"  {job['kind']}  {job['name']}"))
    if job["cause"]:
        out.print(Text(f"cause: {job['cause']}", "red"), soft_wrap=True)
    if job["waiting_for"]:
        out.print(Text(f"waiting for {job['waiting_for']}"), soft_wrap=True)
    out.print(Text(f"run folder: {job['run_dir']}"), soft_wrap=True)
    _section("events", "\n".join(f"{_clock(e['at'])}  {e['kind']}  {e['detail']}".rstrip() for e in events))
    if job["server"]:
        _section("server", _yaml({k: v for k, v in job["server"].items() if k != "token"}))
    _section("config", _yaml(job["config"]))


def _section(title: str, body: str) -> None:
    out.print(Text(f"\n{title}", "bold"))
    out.print(Text(body.rstrip()), soft_wrap=True)


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
