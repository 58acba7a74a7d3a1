"""Process groups: a signal to one job's processes, or to the cluster's own, must not reach anybody else's."""

import contextlib
import os


def own_process_group() -> None:
    """Make this process the leader of a group of its own; its children join it."""
    with contextlib.suppress(PermissionError):  # it leads a whole session already
        os.setpgid(0, 0)
