"""Tags of checkpoints, and holds on them: small files beside a job's checkpoints, each of which names one of them.

A tag is another name that a user gave a checkpoint. A hold says that another job starts, or has started, from it. Neither is
ever deleted by a job that keeps only its last checkpoints. Where a storage has the checkpoints, the marks are there and nowhere
else: there is one truth. No torch here.
"""

import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from opentinker.checkpoints import Checkpoint, find, parse_folder, parse_name, versioned
from opentinker.errors import ConflictError, InvalidRequestError
from opentinker.storage import Storage

TAGS, HOLDS = ".tags", ".holds"
"""Folders beside the checkpoints, whose names never begin with a dot."""
RESERVED = ("final", "best", "stopped", "stopped-early")
"""What the cluster and its drivers call checkpoints, beside `step-...`."""


class Marks:
    """The tags and holds of the checkpoints below `root`. Methods block; UnavailableError when the storage is away."""

    def __init__(self, root: Path, storage: Storage | None) -> None:
        self._root = root
        self._storage = storage if storage is not None and storage.covers(root) else None

    def tags(self) -> dict[str, str]:
        """Tag -> folder of a checkpoint."""
        return self._read(TAGS)

    def holds(self) -> dict[str, str]:
        """Job -> folder of the checkpoint that it starts from."""
        return self._read(HOLDS)

    def tag(self, tag: str, folder: str) -> None:
        """Give a checkpoint a tag; one that has it loses it."""
        self._write(TAGS, tag, folder)

    def untag(self, tag: str) -> bool:
        """Take a tag away; whether it was there."""
        return self._remove(TAGS, tag)

    def hold(self, job: str, folder: str) -> None:
        self._write(HOLDS, job, folder)

    def release(self, job: str) -> None:
        self._remove(HOLDS, job)

    def _read(self, kind: str) -> dict[str, str]:
        folder, found = self._root / kind, {}
        if self._storage is not None:
            contents = {path.name: self._storage.read(path) for path in self._storage.files(folder)}
        else:
            contents = {path.name: _content(path) for path in folder.glob("*") if not path.name.startswith(".")}
        for name, content in contents.items():
            # One that another process takes away now, or that a dying disk left half, is not there.
            target = _target(content)
            if target is not None:
                found[name] = target
        return found

    def _write(self, kind: str, name: str, folder: str) -> None:
        path, content = self._root / kind / name, json.dumps({"checkpoint": folder}).encode()
        if self._storage is not None:
            self._storage.write(path, content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{name}.{uuid.uuid4().hex[:8]}.tmp")
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def _remove(self, kind: str, name: str) -> bool:
        path = self._root / kind / name
        if self._storage is not None:
            return self._storage.remove(path)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True


def resolve(found: Iterable[Checkpoint], tags: dict[str, str], name: str, version: int | None) -> Checkpoint | None:
    """Of checkpoints that come newest first, the one that `name`, or `name@version`, or a tag means; None if none does. A
    checkpoint's own name goes before a tag."""
    saved = list(found)
    if (named := find(saved, name, version)) is not None:
        return named
    target = parse_folder(tags[name]) if version is None and name in tags else None
    return None if target is None else next((c for c in saved if (c.name, c.version) == target), None)


def check_tag(tag: str, found: Iterable[Checkpoint]) -> str:
    """The tag, if checkpoints may be given it.

    Raises:
        InvalidRequestError: it is no name, or one that drivers use.
        ConflictError: a checkpoint of this job is called that.
    """
    name, version = parse_name(tag)
    if version is not None:
        raise InvalidRequestError(f"'{tag}' is not a tag", hint="a tag has no '@version' behind it")
    if name in RESERVED or name.startswith("step-"):
        raise InvalidRequestError(f"'{name}' is what drivers call their checkpoints", hint="choose another tag")
    if find(found, name) is not None:
        raise ConflictError(f"a checkpoint of this job is called '{name}'", hint="choose another tag")
    return name


def tags_of(tags: dict[str, str], checkpoint: Checkpoint) -> list[str]:
    """The tags of one checkpoint, by name."""
    folder = versioned(checkpoint.name, checkpoint.version)
    return sorted(tag for tag, target in tags.items() if target == folder)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _target(content: bytes | None) -> str | None:
    try:
        folder = json.loads(content or b"")["checkpoint"]
    except (ValueError, KeyError, TypeError):
        return None
    return folder if isinstance(folder, str) and parse_folder(folder) is not None else None
