"""`opentinker cancel`: end jobs."""

import typer

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JobsArgument,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    connected,
    out,
    print_error,
    print_json,
    without_token,
)
from opentinker.errors import OpenTinkerError


def cancel(
    job_ids: JobsArgument,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Cancel jobs. Their processes stop and their resources return to the cluster; one that has ended stays as it is.

    Exits with 1 if any could not be cancelled; the others are.
    """
    failed = False
    with connected(url, key, state_dir) as client:
        for job_id in job_ids:
            try:
                job = client.cancel(job_id)
            except OpenTinkerError as error:
                print_error(error)
                failed = True
                continue
            print_json(without_token(job)) if as_json else out.print(f"{job['id']} {job['state']}")
    if failed:
        raise typer.Exit(1)
