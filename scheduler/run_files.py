"""Reading on in the files that a run writes, by byte offset."""

import json
from pathlib import Path
from typing import Any, Literal

from opentinker.errors import InvalidRequestError, OpenTinkerError
from opentinker.scheduler.driver import LOG_NAME, SERVER_LOG_NAME
from opentinker.scheduler.packages import INSTALL_LOG_NAME
from opentinker.storage import Storage

LogSource = Literal["driver", "server"]
MAX_BYTES = 2**20
"""Of one answer."""


def log_path(run_dir: Path, source: LogSource | None, *, has_driver: bool, ended: bool, storage: Storage | None = None) -> Path:
    """A job's log. Without a `source` it is the driver's; or the server's where no driver on the cluster writes one: that of
    a job that the cluster does not drive, or of one that ended before its driver began. It changes only while nothing was read
    yet."""
    driver = run_dir / LOG_NAME
    if not driver.exists() and (run_dir / INSTALL_LOG_NAME).exists():  # what it will begin with
        driver = run_dir / INSTALL_LOG_NAME
    if source is None:
        source = "server" if not has_driver or (ended and not _is_there(driver, storage)) else "driver"
    return driver if source == "driver" else run_dir / SERVER_LOG_NAME


def _is_there(path: Path, storage: Storage | None) -> bool:
    return path.exists() or (storage is not None and storage.covers(path) and storage.exists(path))


def read_lines(path: Path, offset: int, *, complete: bool, storage: Storage | None = None) -> tuple[bytes, int, bool]:
    """Whole lines from `offset` on: (bytes, next offset, whether the file's end is reached).

    `complete`: nobody writes any more, so the last line is whole even without a newline. A line longer than `MAX_BYTES`
    comes in pieces. A file that is not here is read from the storage; one that does not exist yet is empty.

    Raises:
        InvalidRequestError: a negative offset.
        UnavailableError: the storage does not answer.
    """
    if offset < 0:
        raise InvalidRequestError("an offset cannot be negative")
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        kept = storage.read(path, offset, MAX_BYTES + 1) if storage is not None and storage.covers(path) else None
        if kept is None:
            return b"", offset, True
        data = kept
    at_end = len(data) <= MAX_BYTES
    data = data[:MAX_BYTES]
    if not (complete and at_end):
        cut = data.rfind(b"\n") + 1
        data = data[: cut or (0 if at_end else MAX_BYTES)]
    return data, offset + len(data), at_end


def parse_rows(data: bytes) -> list[dict[str, Any]]:
    """JSON lines; NaN and infinities, which JSON does not have, become null.

    Raises:
        OpenTinkerError: a line is not JSON.
    """
    try:
        return [json.loads(line, parse_constant=lambda _: None) for line in data.splitlines() if line.strip()]
    except ValueError as error:
        raise OpenTinkerError(f"the run's metrics are damaged: {error}") from error
