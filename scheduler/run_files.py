"""Reading on in the files that a run writes, by byte offset."""

import json
from pathlib import Path
from typing import Any, Literal

from opentinker.errors import InvalidRequestError, OpenTinkerError
from opentinker.scheduler.driver import LOG_NAME, SERVER_LOG_NAME
from opentinker.scheduler.packages import INSTALL_LOG_NAME
from opentinker.storage import Storage, file_size

LogSource = Literal["driver", "server"]
MAX_BYTES = 2**20
"""Of one answer."""


def log_path(
    run_dir: Path,
    source: LogSource | None,
    *,
    has_driver: bool,
    ended: bool,
    storage: Storage | None = None,
    all_here: bool = True,
) -> Path:
    """A job's log. Without a `source` it is the driver's; or the server's where no driver on the cluster writes one: that of
    a job that the cluster does not drive, or of one that ended before its driver began. It changes only while nothing was read
    yet. Unless `all_here`, what is on this node may be of an earlier server than the job's last."""
    driver = run_dir / LOG_NAME
    if all_here and not driver.exists() and (run_dir / INSTALL_LOG_NAME).exists():  # what it will begin with
        driver = run_dir / INSTALL_LOG_NAME
    if source is None:
        source = "server" if not has_driver or (ended and not _is_there(driver, storage)) else "driver"
    return driver if source == "driver" else run_dir / SERVER_LOG_NAME


def _is_there(path: Path, storage: Storage | None) -> bool:
    return path.exists() or (storage is not None and storage.covers(path) and storage.exists(path))


def read_lines(
    path: Path, offset: int, *, complete: bool, storage: Storage | None = None, all_here: bool = True
) -> tuple[bytes, int, bool]:
    """Whole lines from `offset` on: (bytes, next offset, whether the file's end is reached).

    `complete`: nobody writes any more, so the last line is whole even without a newline. A line longer than `MAX_BYTES`
    comes in pieces. A file that is not here is read from the storage; one that does not exist yet is empty. Unless `all_here`,
    the job's processes were not always on this node: then the longer file is the one that was written last.

    Raises:
        InvalidRequestError: a negative offset.
        UnavailableError: the storage does not answer.
    """
    if offset < 0:
        raise InvalidRequestError("an offset cannot be negative")
    data = _read(path, offset, storage, all_here)
    if data is None:
        return b"", offset, True
    at_end = len(data) <= MAX_BYTES
    data = data[:MAX_BYTES]
    if not (complete and at_end):
        cut = data.rfind(b"\n") + 1
        data = data[: cut or (0 if at_end else MAX_BYTES)]
    return data, offset + len(data), at_end


def _read(path: Path, offset: int, storage: Storage | None, all_here: bool) -> bytes | None:
    here = file_size(path)
    if storage is not None and storage.covers(path) and (here < 0 or (not all_here and storage.size(path) > here)):
        return storage.read(path, offset, MAX_BYTES + 1)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None


def parse_rows(data: bytes) -> list[dict[str, Any]]:
    """JSON lines; NaN and infinities, which JSON does not have, become null.

    Raises:
        OpenTinkerError: a line is not JSON.
    """
    try:
        return [json.loads(line, parse_constant=lambda _: None) for line in data.splitlines() if line.strip()]
    except ValueError as error:
        raise OpenTinkerError(f"the run's metrics are damaged: {error}") from error
