"""Every node has to see the cluster's runs folder, at the same path: what jobs write there, others read; unless
a storage behind a URL has it all."""

import json
import secrets
from pathlib import Path

from opentinker.errors import ConfigError
from opentinker.scheduler.settings import Settings

KEY = b"runs"
KV_NAMESPACE = b"opentinker"
"""Where the head leaves the record for nodes that join: Ray's internal key-value store."""
MARKER = ".cluster"
"""A file in the runs folder with a number that only this cluster has."""


def record_of(settings: Settings) -> bytes | None:
    """What nodes that join have to find; None with a storage behind a URL: then each has a folder of its own.

    Raises:
        ConfigError: the folder of all runs cannot be made or written.
    """
    if settings.remote_storage:
        _make(settings.run_root)
        return None
    return mark(settings.run_root)


def mark(runs_dir: Path) -> bytes:
    """Mark the folder, and return what a node needs to find out whether it sees it.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    number = secrets.token_hex(16)
    _make(runs_dir, number)
    return json.dumps({"path": str(runs_dir), "number": number}).encode()


def _make(runs_dir: Path, number: str = "") -> None:
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        if number:
            (runs_dir / MARKER).write_text(number)
    except OSError as error:
        raise ConfigError(f"cannot write the runs folder {runs_dir}: {error.strerror}") from error


def check(record: bytes) -> None:
    """Raises: ConfigError if the folder of a `mark` is not the same one on this machine."""
    told = json.loads(record)
    path = Path(told["path"])
    try:
        seen = (path / MARKER).read_text()
    except OSError:
        seen = ""
    if seen != told["number"]:
        raise ConfigError(
            f"the cluster's jobs write to {path}, which on this machine is not the cluster's folder",
            hint="share that folder between the machines, at the same path (such as with NFS; docs/deploy.md), or give the "
            "cluster a storage_url that is a URL (docs/storage.md)",
        )
