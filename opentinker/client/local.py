"""Where the cluster on this machine leaves its address and key."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from opentinker.errors import AuthenticationError, UnavailableError

STATE_DIR = Path("~/.opentinker").expanduser()
"""Default folder of the embedded cluster's state."""
API_KEY_VARIABLE = "OPENTINKER_API_KEY"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})


@dataclass(frozen=True)
class LocalCluster:
    """What `cluster.json` and `api_key` say; the cluster may be gone."""

    url: str
    pid: int
    key: str | None

    def serves(self, url: str) -> bool:
        """Whether `url` is this cluster's address, by whatever name of this machine, and the cluster lives.

        After its death the same address may lead elsewhere, such as through a tunnel.
        """
        mine, theirs = urlsplit(self.url), urlsplit(url)
        same_host = mine.hostname == theirs.hostname or {mine.hostname, theirs.hostname} <= _LOOPBACK
        return same_host and mine.port == theirs.port and _is_alive(self.pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's process
    return True


def local_cluster(state_dir: Path = STATE_DIR) -> LocalCluster | None:
    """The cluster that was last started with this state folder; None if there never was one or it stopped in order."""
    try:
        record = json.loads((state_dir / "cluster.json").read_text())
        url, pid = str(record["url"]), int(record["pid"])
    except (OSError, ValueError, KeyError):
        return None
    key_file = state_dir / "api_key"
    return LocalCluster(url, pid, key_file.read_text().strip() if key_file.is_file() else None)


def find_cluster(url: str | None, key: str | None, state_dir: Path = STATE_DIR) -> tuple[str, str]:
    """(url, key) of the cluster to talk to. The key is the argument, else the local cluster's if the url is its address,
    else the environment variable's, which may be meant for another cluster; without a url the local cluster is meant.

    Raises:
        UnavailableError: no url, and no local cluster.
        AuthenticationError: no key for this url.
    """
    local = local_cluster(state_dir)
    if url is None:
        if local is None:
            raise UnavailableError(
                "no cluster is running on this machine", hint="start one with `opentinker up`, or pass its URL"
            )
        url = local.url
    if not key and local is not None and local.serves(url):
        key = local.key
    key = key or os.environ.get(API_KEY_VARIABLE)
    if not key:
        raise AuthenticationError(f"no API key for {url}", hint=f"pass it, or set the environment variable {API_KEY_VARIABLE}")
    return url.rstrip("/"), key
