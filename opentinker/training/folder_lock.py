"""One process drives the run in a folder: the lock that says so. It is gone with the process, however that ends."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from opentinker.errors import ConflictError

logger = logging.getLogger(__name__)

LOCK = ".driver.lock"
_locks: dict[Path, IO[str]] = {}
"""By folder. One process may go on with its own run."""


def lock(folder: Path) -> None:
    """From now on the folder's run is this process's, as long as it lives.

    Raises:
        ConflictError: another process drives it.
        OSError: the folder cannot be written.
    """
    if (resolved := folder.resolve()) in _locks:
        return
    file = (folder / LOCK).open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise ConflictError(
            f"another process drives the run in {folder}", hint="end it first, or choose another folder"
        ) from error
    except OSError as error:
        logger.warning("%s cannot be locked (%s): see to it that no other process drives its run", folder, error.strerror)
    _locks[resolved] = file


@contextmanager
def locked_if_whole(folder: Path) -> Iterator[None]:
    """As `lock`, unless what is done within fails: then the folder is let go again, if it was not this process's before.

    Raises: as `lock`.
    """
    resolved = folder.resolve()
    before = resolved in _locks
    lock(folder)
    try:
        yield
    except BaseException:
        if not before:
            _locks.pop(resolved).close()
        raise
