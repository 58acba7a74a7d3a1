"""Deleting checkpoints: which ones a job that keeps only its last no longer needs, and how one is removed whole."""

import contextlib
import re
import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from opentinker.checkpoint_marks import Marks
from opentinker.checkpoints import MANIFEST, Checkpoint, versioned
from opentinker.storage import Storage

_NUMBER = re.compile(r"-\d+$")
_DELETED = re.compile(r"\..+\.[0-9a-f]{8}\.deleted")


def family(name: str) -> str:
    """What a checkpoint's name is without its number: `step-000010` and `step-000020` are of one family."""
    return _NUMBER.sub("", name)


def surplus(found: Sequence[Checkpoint], name: str, keep_last: int, marked: Iterable[str]) -> list[Checkpoint]:
    """Of checkpoints that come newest first, those of `name`'s family behind the newest `keep_last` that nothing marks. The
    marked ones (by folder) stay, and are not counted."""
    kept = set(marked)
    free = [c for c in found if family(c.name) == family(name) and versioned(c.name, c.version) not in kept]
    return free[keep_last:]


def remove(root: Path, folder: str, storage: Storage | None) -> bool:
    """Remove a checkpoint here and in the storage, at each place whole or not at all; False if a job holds it by now.

    It is renamed first, so that however this ends no half of one is taken for a checkpoint; what an interrupted removal left,
    the next one clears away. Whoever starts from a checkpoint holds it first and looks for it then, and here it is the other
    way round: one of the two sees the other.

    Raises:
        OSError, UnavailableError: it cannot be removed.
    """
    stored = storage if storage is not None and storage.covers(root) else None
    marks = Marks(root, stored)
    path, aside = root / folder, _aside(root / folder)
    # A replacement of it that was interrupted would be taken for it.
    with contextlib.suppress(FileNotFoundError):
        path.with_name(f".{folder}.previous").rename(_aside(path))
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
    if stored is not None:
        manifest = stored.read(path / MANIFEST)
        stored.remove(path / MANIFEST)
        if folder in marks.holds().values():
            if manifest is not None:
                stored.write(path / MANIFEST, manifest)
            _back(aside, path)
            return False
        stored.remove_folder(path)
    elif folder in marks.holds().values():
        _back(aside, path)
        return False
    for left in root.glob(".*.deleted"):
        if _DELETED.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    return True


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.deleted")


def _back(aside: Path, path: Path) -> None:
    if aside.exists() and not path.exists():
        aside.rename(path)
