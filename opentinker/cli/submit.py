"""`opentinker submit`: a job that the cluster drives."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer
import yaml

from opentinker.cli.code import environment_file, lacking, pack_folder, relative_to_code
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
    read_job_config,
)
from opentinker.cli.follow import follow
from opentinker.config.job import RLJobConfig
from opentinker.errors import ConfigError
from opentinker.training.progress import Progress
from opentinker.training.run import checked_environment


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
    job = read_job_config(config, overrides)
    if job.leased:
        raise ConfigError(
            f"a job of kind '{job.kind}' lives as long as its client renews the lease, so it cannot be submitted and left",
            hint="create it from Python, or use `opentinker train`",
        )
    file = None
    if isinstance(job, RLJobConfig):
        file = environment_file(job, config.parent)
        if file is not None:
            job = relative_to_code(job, file)
        if absent := lacking(job, file):
            # The cluster will have it, and this machine need not.
            err.print(f"the environment is not checked before the job runs: {', '.join(absent)} missing here", soft_wrap=True)
        else:
            with redirect_stdout(sys.stderr):  # stdout is for the job's id or config, not for what user code prints
                checked_environment(job, file.parent if file else None)
    if dry_run:
        out.print(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False), end="", markup=False, soft_wrap=True)
        return
    code = pack_folder(file.parent) if file else None
    with connected(url, key, state_dir) as client:
        record = client.submit(job.model_dump(mode="json"), code=code)
        out.print(record["id"], soft_wrap=True)
        if not follow_ or not isinstance(job, RLJobConfig):
            err.print(f"follow it with `opentinker logs -f {record['id']}`")
            return
        with Progress(record["name"] or job.environment.name, job.training.steps) as progress:
            done = follow(client, record["id"], progress)
        out.print(f"completed; files in {done['run_dir']}", soft_wrap=True)
