"""What goes with a checkpoint besides the trainer's part: the driver's state, and the deletion of earlier ones."""

import json
import logging
from pathlib import Path
from typing import Any

from opentinker.checkpoint_marks import Marks
from opentinker.checkpoints import versioned
from opentinker.errors import CheckpointError, InvalidRequestError, UnavailableError
from opentinker.retention import remove, surplus
from opentinker.storage import Storage, all_checkpoints

DRIVER = "driver_state.json"
"""What the driver gave with a `save`, and gets back from a `load`."""
MAX_DRIVER_BYTES = 2**20

log = logging.getLogger(__name__)


def driver_json(state: Any) -> str | None:
    """A driver's state as it is written; None if there is none.

    Raises:
        InvalidRequestError: it is no JSON object, or too large.
    """
    if state is None:
        return None
    try:
        text = json.dumps(state, indent=1, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"driver must be what JSON can hold: {error}") from error
    if not isinstance(state, dict) or len(text) > MAX_DRIVER_BYTES:
        raise InvalidRequestError(f"driver must be an object of at most {MAX_DRIVER_BYTES >> 10} KiB as JSON")
    return text


def read_driver(folder: Path) -> dict[str, Any] | None:
    """The driver's state of a checkpoint that was proved whole; None if it was saved without one.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / DRIVER
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return state if isinstance(state, dict) else None


def check_keep_last(value: Any) -> int | None:
    """Raises: InvalidRequestError when it is no number from 1."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise InvalidRequestError("keep_last must be a whole number from 1")


def prune(root: Path, name: str, keep_last: int | None, storage: Storage | None) -> list[str]:
    """After a save under `name`, remove the checkpoints of its family (`step-000010` and `step-000020`) but the newest
    `keep_last` and those that are tagged or that a job has started from; the folders that are gone. What cannot be removed now,
    the next save tries again: a save that is done does not fail over it."""
    if keep_last is None:
        return []
    gone = []
    try:
        marks = Marks(root, storage)
        marked = {*marks.tags().values(), *marks.holds().values()}
        for checkpoint in surplus(all_checkpoints(root, storage), name, keep_last, marked):
            folder = versioned(checkpoint.name, checkpoint.version)
            if remove(root, folder, storage):
                gone.append(folder)
    except (UnavailableError, OSError) as error:
        log.warning("event=not_pruned name=%s error=%s", name, error)
    if gone:
        log.info("event=pruned checkpoints=%r", " ".join(gone))
    return gone


def tags(root: Path, storage: Storage | None) -> dict[str, str]:
    """The tags of the checkpoints below a folder; none while the storage is away."""
    try:
        return Marks(root, storage).tags()
    except UnavailableError as error:
        log.warning("event=storage_away error=%s", error)
        return {}
