"""For commands that end several jobs: one that fails keeps none of the others from being ended."""

from collections.abc import Callable, Sequence

import typer

from opentinker.cli.common import print_error
from opentinker.errors import OpenTinkerError


def for_each_job(job_ids: Sequence[str], act: Callable[[str], None]) -> None:
    """`act` on every one of the jobs; the OpenTinkerErrors that it raises are printed.

    Raises:
        typer.Exit: with 1, after the last, if it raised any.
    """
    failed = False
    for job_id in job_ids:
        try:
            act(job_id)
        except OpenTinkerError as error:
            print_error(error)
            failed = True
    if failed:
        raise typer.Exit(1)
