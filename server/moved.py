"""A job that was moved to this node: what its earlier servers and drivers left in the storage, it goes on with here."""

import fcntl
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from opentinker.checkpoints import MANIFEST, folders, parse_folder
from opentinker.errors import OpenTinkerError
from opentinker.images import IMAGES_FOLDER
from opentinker.storage import Storage, open_storage

APPENDED = ("config.yaml", "metrics.jsonl", "transcripts.jsonl", "driver.log")
"""What a job's driver goes on writing, beside the log of its server."""
STEP = "step-"
"""How the names of checkpoints begin that a driver goes on from."""

logger = logging.getLogger(__name__)


def bring_log(storage_at: Mapping[str, str] | None, log_path: Path) -> OpenTinkerError | None:
    """Bring the server's log here, before a process of the server opens it; why it could not be brought, if it could not.

    Each process of a server calls this, and the first one brings it: a log that is open must not be replaced.
    """
    if not storage_at:
        return None
    log_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        storage = open_storage(**storage_at)
        assert storage is not None
        folder = os.open(log_path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            storage.fetch_longer(log_path.parent, [log_path.name])
        finally:
            os.close(folder)
    except OpenTinkerError as error:
        return error
    return None


def bring_run(storage: Storage, run_dir: Path) -> None:
    """Bring what the job's driver will look for: its code, the files that it appends to, the images of its transcripts, and the
    checkpoint of the newest step. To be called before anything here is copied to the storage, in place of what is there.

    Raises:
        UnavailableError: the storage does not answer.
    """
    if not (run_dir / "code").exists():
        storage.fetch_folder(run_dir / "code")
    storage.fetch_longer(run_dir / IMAGES_FOLDER)  # which the transcripts name, and the report shows
    if brought := storage.fetch_longer(run_dir, APPENDED):
        logger.info("event=moved_here files=%r", " ".join(brought))
    root = run_dir / "checkpoints"
    steps = {folder: _step(folder) for folder in storage.checkpoint_folders(root)}
    last = max(steps.values(), default=-1)
    if last < max((_step(path.name) for path in folders(root).values()), default=0):
        return  # what is here is newer
    for newest in storage.checkpoints(root, [folder for folder, step in steps.items() if step == last])[:1]:
        if not newest.path.exists() and storage.fetch_folder(newest.path, last=MANIFEST):
            logger.info("event=moved_here checkpoint=%s", newest.path.name)


def _step(folder: str) -> int:
    """Of which step a checkpoint is; -1 if no driver goes on from it."""
    named = parse_folder(folder)
    digits = named[0].removeprefix(STEP) if named is not None and named[0].startswith(STEP) else ""
    return int(digits) if digits.isdigit() else -1
