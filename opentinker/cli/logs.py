"""`opentinker logs`: what a job's processes wrote."""

import time
from typing import Annotated

import typer

from opentinker.cli.common import DEFAULT_STATE_DIR, JobArgument, KeyOption, StateDirOption, UrlOption, connected, out

POLL_S = 0.5


def logs(
    job_id: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
    server: Annotated[bool, typer.Option("--server", help="What the job's server wrote, not its driver.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Print a job's logs."""
    offset = 0
    with connected(url, key, state_dir) as client:
        while True:
            answer = client.logs(job_id, offset=offset, source="server" if server else None)
            out.out(answer["text"], end="", highlight=False)
            more = answer["offset"] > offset
            offset = answer["offset"]
            if not more and (answer["finished"] or not follow):
                return
            if not more:
                time.sleep(POLL_S)
