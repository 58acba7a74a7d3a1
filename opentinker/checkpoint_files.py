"""The files of a checkpoint against its manifest. No torch here, so that whoever copies one can prove what they copied."""

import hashlib
import json
from pathlib import Path
from typing import Any

from opentinker.checkpoints import MANIFEST, STATE
from opentinker.errors import CheckpointError

FORMAT = 1


def manifest_text(files: dict[str, dict[str, Any]]) -> str:
    """A manifest as it is written; read back, it has to be this to the letter."""
    return json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True)


def proved_state(folder: Path) -> dict[str, Any]:
    """The trainer state of a checkpoint, once all its files are proved whole.

    Raises:
        CheckpointError: a file is missing or corrupt; the detail names it.
    """
    try:
        text = (folder / MANIFEST).read_text()
        files = json.loads(text)["files"]
        for name, expected in files.items():
            path = folder / name
            if path.stat().st_size != expected["bytes"] or digest(path) != expected["sha256"]:
                raise CheckpointError(f"the checkpoint file {path} is corrupt: it is not what its manifest says")
        if text != manifest_text(files):
            raise CheckpointError(f"the checkpoint file {folder / MANIFEST} is corrupt: it is not as it was written")
        if STATE not in files:
            raise CheckpointError(f"the checkpoint {folder} is incomplete: its manifest has no {STATE}")
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
    except OSError as error:
        raise CheckpointError(f"the checkpoint {folder} is incomplete: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {folder} has no valid manifest: {MANIFEST}: {error}") from error
    return state


def digest(path: Path) -> str:
    """SHA-256, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
