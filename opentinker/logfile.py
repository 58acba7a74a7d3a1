"""Where a process of the cluster writes: everything that it prints and logs goes to the end of one file."""

import logging
import os
import sys
from pathlib import Path


def write_to(path: Path, **fields: str) -> None:
    """Send this process's stdout, stderr and log to a file from now on, after what is there; other processes may do the same.

    Every line of the log carries `fields`. Also what C libraries print, and the traceback of a crash, arrive there.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, descriptor)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    constant = "".join(f" {name}={value}" for name, value in fields.items()).replace("%", "%%")
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s level=%(levelname)s{constant} logger=%(name)s %(message)s",
        force=True,
    )
