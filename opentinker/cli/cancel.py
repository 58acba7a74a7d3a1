"""`opentinker cancel`: end jobs."""

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JobsArgument,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    connected,
    out,
    print_json,
    without_token,
)
from opentinker.cli.each_job import for_each_job


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
    with connected(url, key, state_dir) as client:

        def end(job_id: str) -> None:
            job = client.cancel(job_id)
            print_json(without_token(job)) if as_json else out.print(f"{job['id']} {job['state']}")

        for_each_job(job_ids, end)
