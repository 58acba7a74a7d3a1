"""`opentinker events`: what happened to a job."""

import time
from typing import Annotated, Any

import typer
from rich.text import Text

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JobArgument,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    connected,
    out,
    print_json,
)
from opentinker.cli.patience import Patience
from opentinker.client.scheduler import ENDED

POLL_S = 1.0


def events(
    job_id: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Print what happened to a job, oldest first. --json prints one event per line."""
    patience = Patience()
    shown = 0
    with connected(url, key, state_dir) as client:
        while True:
            # The state comes first: what is read after the end is all there is, but for the release of what it held.
            job = patience.ask(lambda: client.job(job_id))
            happened = patience.ask(lambda: client.events(job_id))
            for event in happened[shown:]:
                print_json(event) if as_json else out.print(event_line(event), soft_wrap=True)
            shown = len(happened)
            if not follow or (job["state"] in ENDED and job["server"] is None):
                return
            time.sleep(POLL_S)


def event_line(event: dict[str, Any]) -> Text:
    """An event for people."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    return Text(f"{at}  {event['kind']:<10}  {event['detail']}".rstrip())
