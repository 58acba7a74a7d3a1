"""Files that a run cannot go on without."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """In place of what the file held: all of it or nothing, also when the disk is full or the machine dies.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
