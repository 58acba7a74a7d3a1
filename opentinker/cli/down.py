"""`opentinker down`: stop the cluster on this machine."""

import os
import signal
import time
from typing import TYPE_CHECKING

from opentinker.cli.common import DEFAULT_STATE_DIR, StateDirOption, out
from opentinker.errors import ConflictError, DeadlineError

if TYPE_CHECKING:
    from opentinker.scheduler.state_dir import StateDir

STOP_TIMEOUT_S = 60.0


def down(state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Stop the cluster that `opentinker up` started on this machine; its jobs end."""
    from opentinker.scheduler.state_dir import StateDir

    folder = StateDir(state_dir)
    record = folder.running()
    if record is None:
        out.print("no cluster is running here")
        return
    os.kill(record["pid"], signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not _released(folder):
        if time.monotonic() > deadline:
            raise DeadlineError(f"the cluster (pid {record['pid']}) did not stop within {STOP_TIMEOUT_S:.0f} s")
    out.print("stopped")


def _released(folder: "StateDir") -> bool:
    """Whether nobody holds the state folder any more, which a cluster does to its very end; takes up to a second."""
    try:
        with folder.held():
            return True
    except ConflictError:
        return False
