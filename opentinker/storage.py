"""Files of jobs behind an fsspec URL: what a node wrote is copied there, and read from there where the node's own is missing.

A job works in its run folder on its node. A `Storage` maps every path below the folder of all runs to a key behind the URL, so
callers name files by their local paths only. `docs/storage.md` says what is copied when.
"""

import json
import logging
import shutil
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentinker.checkpoints import (
    MANIFEST,
    STATE,
    Checkpoint,
    checkpoint_of,
    checkpoints,
    newest_first,
    parse_folder,
    policy_root,
)
from opentinker.errors import ConfigError, OpenTinkerError, UnavailableError
from opentinker.images import IMAGES_FOLDER

FOLLOW_S = 5.0
"""Pause between two copies of files that grow."""

logger = logging.getLogger(__name__)


class Storage:
    """Copies below `root` to `url` and back. Methods block; all but `covers` may raise UnavailableError: the storage does not
    answer, or refuses."""

    def __init__(self, url: str, root: Path) -> None:
        """Raises: ConfigError when nothing here can talk to such a URL."""
        from fsspec.core import url_to_fs

        self.url, self.root = url, root
        try:
            self._fs, base = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"storage_url: {url} cannot be used: {error}",
                hint="its protocol is fsspec's, whose package has to be installed, such as s3fs for s3://",
            ) from error
        except Exception as error:
            raise UnavailableError(f"the storage {url} cannot be reached: {_reason(error)}") from error
        self._base = str(base).rstrip("/")

    def covers(self, path: Path) -> bool:
        """Whether a local path has a place in the storage."""
        return path.is_relative_to(self.root)

    def put(self, path: Path) -> None:
        """Copy one file there, in place of what is there."""
        with self._asking():
            self._put(path)

    def write(self, path: Path, content: bytes) -> None:
        """Write a small file there, in place of what is there."""
        with self._asking():
            key = self._key(path)
            self._fs.makedirs(key.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(key, content)

    def remove(self, path: Path) -> bool:
        """Remove one file; whether it was there."""
        with self._asking():
            self._fs.invalidate_cache()
            if not self._fs.exists(self._key(path)):
                return False
            self._fs.rm_file(self._key(path))
            return True

    def files(self, folder: Path) -> list[Path]:
        """The files that are there in a folder, not below it, as where each would lie here."""
        with self._asking():
            self._fs.invalidate_cache()
            return [folder / str(name).rpartition("/")[2] for name in self._fs.find(self._key(folder), maxdepth=1)]

    def subfolders(self, folder: Path) -> set[str]:
        """What the folders are called that are there in a folder."""
        with self._asking():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._key(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return set()
            return {str(each["name"]).rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory"}

    def put_folder(self, folder: Path, *, last: str = "") -> None:
        """Copy a folder's files there. The one called `last` is removed first and copied last: a reader who finds it finds
        all of them, however this ends."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        with self._asking():
            if last and self._fs.exists(self._key(folder / last)):
                self._fs.rm_file(self._key(folder / last))
            for path in sorted(files, key=lambda path: path.name == last):
                self._put(path)

    def fetch_folder(self, folder: Path, *, last: str = "") -> bool:
        """Copy a folder from there to where it is missing here, whole or not at all; whether it was there."""
        with self._asking():
            self._fs.invalidate_cache()
            key = self._key(folder)
            found = [str(name) for name in self._fs.find(key)]
            if not found or (last and not self._fs.exists(self._key(folder / last))):
                return False
        draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.fetched")
        try:
            with self._asking():
                for name in found:
                    target = draft / name.rstrip("/").rpartition(f"{key}/")[2]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(name, str(target))
            if not folder.exists():
                draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True

    def fetch_longer(self, folder: Path, names: Collection[str] | None = None) -> list[str]:
        """Of files that are only ever appended to, bring those to a folder that are longer there than here, each whole or not
        at all; their names. By default of all files that are there. Nobody may write to them meanwhile."""
        with self._asking():
            self._fs.invalidate_cache()
            found = self._fs.find(self._key(folder), maxdepth=1, detail=True)
        there = {str(name).rpartition("/")[2]: int(info["size"]) for name, info in found.items()}
        longer = sorted(name for name in (there if names is None else names) if there.get(name, -1) > file_size(folder / name))
        for name in longer:
            folder.mkdir(parents=True, exist_ok=True)
            draft = folder / f".{name}.{uuid.uuid4().hex[:8]}.fetched"
            try:
                with self._asking():
                    self._fs.get_file(self._key(folder / name), str(draft))
                draft.replace(folder / name)
            finally:
                draft.unlink(missing_ok=True)
        return longer

    def remove_folder(self, folder: Path) -> None:
        """Remove what is there of a folder."""
        with self._asking():
            self._fs.invalidate_cache()
            if self._fs.exists(self._key(folder)):
                self._fs.rm(self._key(folder), recursive=True)

    def size(self, path: Path) -> int:
        """Bytes of a file; -1 if it is not there."""
        with self._asking():
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self._key(path))["size"])
            except FileNotFoundError:
                return -1

    def read(self, path: Path, offset: int = 0, size: int | None = None) -> bytes | None:
        """A piece of a file; None if it is not there."""
        with self._asking():
            self._fs.invalidate_cache()
            try:
                length = int(self._fs.info(self._key(path))["size"])
                end = length if size is None else min(length, offset + size)
                return bytes(self._fs.cat_file(self._key(path), start=offset, end=end)) if offset < end else b""
            except FileNotFoundError:
                return None

    def exists(self, path: Path) -> bool:
        return self.read(path, 0, 0) is not None

    def checkpoints(self, root: Path, only: Collection[str] | None = None) -> list[Checkpoint]:
        """As `opentinker.checkpoints.checkpoints`, by default of all its folders; `path` is where each would lie here."""
        folders = self.checkpoint_folders(root) if only is None else only
        return newest_first(c for folder in folders if (c := self._checkpoint(root / folder)) is not None)

    def checkpoint_folders(self, root: Path) -> set[str]:
        """What the folders of whole checkpoints there are called."""
        with self._asking():
            self._fs.invalidate_cache()
            names = [str(name) for name in self._fs.find(self._key(root), maxdepth=2)]
        return {Path(name).parent.name for name in names if name.endswith(f"/{MANIFEST}")}

    def _checkpoint(self, folder: Path) -> Checkpoint | None:
        named = parse_folder(folder.name)
        state, manifest = self.read(folder / STATE), self.read(folder / MANIFEST)
        if named is None or state is None or manifest is None:
            return None
        try:
            return checkpoint_of(*named, folder, json.loads(state), json.loads(manifest), 0.0)
        except ValueError:
            return None

    def _put(self, path: Path) -> None:
        key = self._key(path)
        self._fs.makedirs(key.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), key)

    def _key(self, path: Path) -> str:
        return f"{self._base}/{path.relative_to(self.root).as_posix()}"

    @contextmanager
    def _asking(self) -> Iterator[None]:
        # What is behind the URL raises errors of its own kind, of packages that are not known here.
        try:
            yield
        except OpenTinkerError:
            raise
        except Exception as error:
            raise UnavailableError(
                f"the storage {self.url} does not do it: {_reason(error)}", hint="is it reachable and writable from this node?"
            ) from error


def all_checkpoints(root: Path, storage: Storage | None) -> list[Checkpoint]:
    """The checkpoints below `root`, on this node and in the storage, newest first."""
    here = checkpoints(root)
    if storage is None or not storage.covers(root):
        return here
    known = {(c.name, c.version) for c in here}
    return newest_first([*here, *(c for c in storage.checkpoints(root) if (c.name, c.version) not in known)])


def further_policies(root: Path, storage: Storage | None) -> list[str]:
    """The policies that have checkpoints below those of a job's own policy, on this node or in the storage."""
    folder = policy_root(root, "any").parent
    found = {path.name for path in folder.glob("*") if path.is_dir()}
    if storage is not None and storage.covers(folder):
        found |= storage.subfolders(folder)
    return sorted(name for name in found if not name.startswith("."))


class Mirror:
    """A thread that copies the files of a run folder to the storage as they grow, and of its subfolders that of the images."""

    def __init__(self, storage: Storage, folder: Path, period_s: float = FOLLOW_S) -> None:
        self._storage = storage
        self._folder = folder
        self._period_s = period_s
        self._copied: dict[Path, tuple[int, int]] = {}
        self._away = False
        self._passing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Copy what is not there yet, and stop."""
        self._closed.set()
        self.sync()

    def sync(self) -> bool:
        """Copy what has changed since it was copied, small files first; whether everything is there now. What is not stays to
        be copied."""
        with self._passing:
            try:
                found = [*self._folder.glob("*"), *self._folder.glob(f"{IMAGES_FOLDER}/*")]
                for path in sorted((p for p in found if p.is_file()), key=lambda p: (file_size(p), p)):
                    now = path.stat()
                    if self._copied.get(path) != (now.st_size, now.st_mtime_ns):
                        self._storage.put(path)
                        self._copied[path] = (now.st_size, now.st_mtime_ns)
            except (UnavailableError, OSError) as error:
                if not self._away:  # said once: this very log is one of the files
                    logger.warning("event=storage_away error=%s; copying goes on when it is back", error)
                self._away = True
                return False
            if self._away:
                logger.info("event=storage_back")
            self._away = False
            return True

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            self.sync()


def open_storage(url: str, root: str | Path) -> Storage | None:
    """The storage behind a URL; None if there is none."""
    return Storage(url, Path(root)) if url else None


def file_size(path: Path) -> int:
    """Bytes of a file on this node; -1 if it is not here."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _reason(error: Exception) -> Any:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
