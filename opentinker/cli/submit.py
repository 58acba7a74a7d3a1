"""`opentinker submit`: a job that the cluster drives."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer
import yaml

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    ConfigArgument,
    KeyOption,
    OverridesArgument,
    StateDirOption,
    UrlOption,
    connected,
    err,
    out,
)
from opentinker.cli.follow import follow
from opentinker.client.submission import prepare
from opentinker.config.job import PreferenceJobConfig, RLJobConfig, SFTJobConfig
from opentinker.training.progress import Progress


def submit(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    follow_: Annotated[bool, typer.Option("--follow", "-f", help="Show progress until the job ends.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and submit nothing.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Submit a job from a YAML file. It runs on the cluster and does not need this terminal.

    An environment given as path/to/file.py:Class travels with its folder (up to 20 MiB). The cluster installs what it requires
    (environment.requirements, or a requirements.txt beside the file).
    """
    with redirect_stdout(sys.stderr):  # stdout is for the job's id or config, not for what user code prints
        sent = prepare(config, overrides or ())
    job = sent.config
    if sent.lacking:
        # The cluster will have it, and this machine need not.
        err.print(f"the environment is not checked before the job runs: {', '.join(sent.lacking)} missing here", soft_wrap=True)
    if dry_run:
        out.print(yaml.safe_dump(sent.fields(), sort_keys=False), end="", markup=False, soft_wrap=True)
        return
    code = sent.code()
    with connected(url, key, state_dir) as client:
        record = client.submit(sent.fields(), code=code)
        out.print(record["id"], soft_wrap=True)
        if not follow_ or not isinstance(job, RLJobConfig | SFTJobConfig | PreferenceJobConfig):
            err.print(f"follow it with `opentinker logs -f {record['id']}`")
            return
        with Progress(record["name"] or job.default_name(), job.training.steps) as progress:
            done = follow(client, record["id"], progress)
        out.print(f"completed; files in {done['run_dir']}", soft_wrap=True)
