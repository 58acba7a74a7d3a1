"""The folder of a cluster's state: what lies where, who holds it, and files that only their owner may read."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker.errors import ConfigError, ConflictError

MIN_SECRET = 32
"""Characters of the shortest secret of ours; less is a damaged file."""
LOCK_PATIENCE_S = 1.0
"""Someone who only asks whether a cluster runs holds the lock for an instant."""


def write_secret(path: Path, make: Callable[[], str], *, shortest: int = MIN_SECRET) -> str:
    """The content of `path`; if there is none, it is made and written, readable by its owner only.

    The file appears with its content or not at all, so that a crash or a full disk never leaves an empty secret.

    Raises:
        ConfigError: it cannot be written, or holds too little to be a secret.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with os.fdopen(os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
                    file.write(make())
                    file.flush()
                    os.fsync(file.fileno())
                with suppress(FileExistsError):  # another process was faster
                    os.link(draft, path)
            finally:
                draft.unlink(missing_ok=True)
        secret = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot write the secret {path}: {error.strerror}") from error
    if len(secret) < shortest:
        raise ConfigError(f"{path} holds no secret", hint="delete the file, and a new secret is made")
    return secret


@dataclass(frozen=True)
class StateDir:
    path: Path

    @property
    def database(self) -> Path:
        return self.path / "scheduler.db"

    @property
    def server_secret(self) -> Path:
        return self.path / "server_secret"

    @property
    def api_key(self) -> Path:
        return self.path / "api_key"

    @property
    def cluster(self) -> Path:
        """{"url", "pid", "key_path", "ray_address", "ray_dir"} of the running cluster; a leftover when the lock is free."""
        return self.path / "cluster.json"

    def create(self) -> None:
        """Raises: ConfigError when the folder cannot be made."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create the state folder {self.path}: {error.strerror}") from error

    def running(self) -> dict[str, Any] | None:
        """The record of the cluster that runs with this folder, or None. A dead cluster's record is not reported."""
        if not self.cluster.is_file() or self._lock_is_free():
            return None
        return self.record()

    def record(self) -> dict[str, Any] | None:
        """What the last cluster here wrote of itself; None if it stopped in order."""
        try:
            record: dict[str, Any] = json.loads(self.cluster.read_text())
        except FileNotFoundError:
            return None
        return record

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold this folder; the kernel lets go of it when the process dies, however it dies.

        Raises:
            ConflictError: a living cluster holds it.
        """
        with self._lock_file() as descriptor:
            deadline = time.monotonic() + LOCK_PATIENCE_S
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    record = self.running() or {}
                    where = f" at {record['url']} (pid {record['pid']})" if record else ""
                    raise ConflictError(
                        f"a cluster already runs{where} with the state folder {self.path}",
                        hint="stop it with `opentinker down`, or use another state folder",
                    )
                time.sleep(0.05)
            yield

    def write_cluster(self, record: dict[str, Any]) -> None:
        """Atomically, so that no reader sees half a record."""
        draft = self.cluster.with_suffix(".tmp")
        draft.write_text(json.dumps(record))
        draft.replace(self.cluster)

    def _lock_is_free(self) -> bool:
        with self._lock_file() as descriptor:
            return _try_lock(descriptor, fcntl.LOCK_SH)

    @contextmanager
    def _lock_file(self) -> Iterator[int]:
        descriptor = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
