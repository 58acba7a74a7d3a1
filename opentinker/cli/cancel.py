"""`opentinker cancel`: end a job."""

from opentinker.cli.common import DEFAULT_STATE_DIR, JobArgument, KeyOption, StateDirOption, UrlOption, connected, out


def cancel(
    job_id: JobArgument, url: UrlOption = None, key: KeyOption = None, state_dir: StateDirOption = DEFAULT_STATE_DIR
) -> None:
    """Cancel a job. Its processes stop and its resources return to the cluster."""
    with connected(url, key, state_dir) as client:
        job = client.cancel(job_id)
    out.print(f"{job['id']} {job['state']}")
