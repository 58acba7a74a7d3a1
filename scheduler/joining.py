"""A node of this machine in a cluster that runs elsewhere: started, watched and ended by this process."""

import contextlib
import ipaddress
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from ray._private import node as ray_node
from ray._private import services
from ray._private.parameter import RayParams
from ray._raylet import Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError as RayAuthenticationError
from ray.exceptions import RayError

from opentinker.errors import AuthenticationError, ConfigError, UnavailableError
from opentinker.scheduler.placement import count
from opentinker.scheduler.processes import reap_with
from opentinker.scheduler.ray_daemons import (
    OBJECT_STORE_BYTES,
    RAY_DIR,
    daemons_in_own_groups,
    default_slots,
    is_loopback,
    within_loopback,
)
from opentinker.scheduler.ray_tools import CPU_SLOT
from opentinker.scheduler.shared_runs import KEY, KV_NAMESPACE, check

NODE_VARIABLE = "OPENTINKER_NODE"
"""Every process of a joined node carries it, and so do the jobs' children: so none is overlooked at the end."""
NODE_DIR = f"{RAY_DIR.name}n"
"""Prefix of the names of nodes' folders."""
REACH_S = 5.0
"""How long the head may take to accept a connection."""
LOOK_S = 1.0
HEAD_GONE_S = 20.0
"""A head that accepts no connection for this long is gone. Ray's own processes would wait for it for a minute."""
KILL_AFTER_S = 1.0
EXIT_S = 10.0
TOKEN_FILE = Path("~/.ray/auth_token")
_TOKEN_HINT = (
    "bring the cluster's token here: copy the head's ~/.ray/auth_token to ~/.ray/auth_token of this account (chmod 600), "
    "or name a file with it in $RAY_AUTH_TOKEN_PATH"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where a cluster's head listens for nodes."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises: ConfigError if it is not HOST:PORT."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or "/" in text or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"'{text}' is not an address to join", hint="it is HOST:PORT, as `opentinker up` prints it")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def answers(self, timeout_s: float) -> str:
        """Why no connection is accepted there; empty if one is."""
        try:
            socket.create_connection((self.host, self.port), timeout_s).close()
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__
        return ""

    def resolved(self) -> Self:
        """With the host's IP address, which is all that Ray understands.

        Raises:
            UnavailableError: the name is not known.
        """
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise UnavailableError(f"cannot find {self.host}: {error.strerror}") from error
        return type(self)(str(family[4][0]), self.port)


def clean_up_after_killed(parent: Path) -> None:
    """Remove the folders of nodes whose process was killed; they carry its number."""
    for folder in parent.glob(f"{NODE_DIR}*"):
        number = folder.name.removeprefix(NODE_DIR).partition("-")[0]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(folder, ignore_errors=True)


class JoinedNode:
    """A node that is part of a cluster; `start` makes one. Also a context manager that takes it out again.

    Start it from a thread that lives as long as the node does: Linux ends Ray's processes with the thread that started them.
    """

    def __init__(self, address: Address, node: Any, offers: "Offer", stack: contextlib.ExitStack) -> None:
        self.address = address
        self.offers = offers
        self._node = node
        self._stack = stack

    @classmethod
    def start(cls, address: str, cpu_slots: int | None = None, gpus: int | None = None, host: str | None = None) -> Self:
        """Add this machine to the cluster whose head is at `address`. `cpu_slots` is by default half the cores, `gpus` what Ray
        finds. `host` is the IP address at which the other nodes reach this one; Ray finds that too.

        Raises:
            ConfigError: an address is none, or the cluster's runs folder is not here.
            AuthenticationError: the cluster's token is missing here, or it is another one.
            UnavailableError: nothing answers there, or the node did not start.
        """
        if host is not None:
            _check_own(host)
        head = Address.parse(address).resolved()
        if why := head.answers(REACH_S):
            raise UnavailableError(
                f"nothing accepts nodes at {head}: {why}",
                hint="`opentinker up` on the head prints the address; it takes other machines' nodes only if it was started "
                "with --host, and a firewall between the machines must let Ray through (docs/deploy.md)",
            )
        mark = secrets.token_hex(8)
        with contextlib.ExitStack() as stack:
            clean_up_after_killed(RAY_DIR.parent)
            folder = tempfile.mkdtemp(prefix=f"{NODE_DIR}{os.getpid()}-", dir=RAY_DIR.parent)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if is_loopback(head.host):
                stack.enter_context(within_loopback())
            _authenticate(head)
            _check_runs(head)
            slots = default_slots() if cpu_slots is None else cpu_slots
            stack.callback(_end_processes, mark)
            node = _start_node(head, host, slots, gpus, folder, mark)
            stack.callback(node.kill_all_processes, check_alive=False, allow_graceful=True)
            has = node.get_resource_and_label_spec()
            offers = Offer(node.node_id, node.node_ip_address, int(has.num_gpus or 0), slots, int(has.num_cpus or 1))
            return cls(head, node, offers, stack.pop_all())
        raise AssertionError("unreachable")

    def wait(self, stop: threading.Event | None = None) -> str:
        """Block until the node is no longer part of the cluster, and say why; empty if `stop` was set."""
        stop = stop or threading.Event()
        heard_at = time.monotonic()
        while not stop.wait(LOOK_S):
            if self._node.dead_processes():
                return f"the cluster at {self.address} let this node go, or one of the node's own processes died"
            if not (why := self.address.answers(REACH_S)):
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > HEAD_GONE_S:
                return f"the cluster at {self.address} is gone: {why}"
        return ""

    def stop(self) -> None:
        """Leave the cluster, and end every process of the node and of the jobs on it. Once is enough."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


@dataclass(frozen=True)
class Offer:
    """What a node brings into the cluster."""

    node_id: str
    ip: str
    gpus: int
    cpu_slots: int
    cpus: int

    def __str__(self) -> str:
        return f"{count(self.gpus, 'GPU')}, {count(self.cpu_slots, 'CPU slot')} on {count(self.cpus, 'core')}"


def _check_own(host: str) -> None:
    """Raises: ConfigError if it is not an IP address that this machine has."""
    try:
        ip = ipaddress.ip_address(host)
        socket.create_server((host, 0), family=socket.AF_INET6 if ip.version == 6 else socket.AF_INET).close()
    except (ValueError, OSError):
        ip = ipaddress.ip_address("0.0.0.0")
    if ip.is_unspecified:
        raise ConfigError(
            f"{host} is not an IP address of this machine",
            hint="with --join, --host is the address at which the other nodes reach this one; leave it out to have it found",
        )


def _authenticate(head: Address) -> None:
    """Make this process and its children speak to the cluster as it wants to be spoken to.

    Raises:
        AuthenticationError: the cluster wants a token that is not here.
        UnavailableError: whatever answers there is no cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        if _admitted(head):
            return
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")
    # Without one, Ray's library would not say so but end this process.
    if os.environ["RAY_AUTH_MODE"].lower() == "token" and (why := _no_token()):
        raise AuthenticationError(f"the cluster at {head} wants a token, and {why}", hint=_TOKEN_HINT)
    if not _admitted(head):
        raise AuthenticationError(
            f"the cluster at {head} refuses this account's token: it is another cluster's", hint=_TOKEN_HINT
        )


def _check_runs(head: Address) -> None:
    """A cluster without a scheduler yet has no runs folder to look for."""
    record = GcsClient(address=str(head)).internal_kv_get(KEY, KV_NAMESPACE)
    if record is not None:
        check(record)


def _no_token() -> str:
    """Why there is no token of Ray's; empty if there is one."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return ""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else TOKEN_FILE.expanduser()
    try:
        return "" if path.read_text().strip() else f"{path} is empty"
    except FileNotFoundError:
        return f"there is no {path}"
    except (OSError, UnicodeDecodeError) as error:
        return f"{path} cannot be read: {error}"


def _admitted(head: Address) -> bool:
    """Whether the cluster answers to us."""
    with _stderr_silenced():
        try:
            return GcsClient(address=str(head)).cluster_id is not None
        except RayAuthenticationError:
            return False
        except RayError as error:
            raise UnavailableError(
                f"what answers at {head} is no Ray cluster: {' '.join(str(error).split())}",
                hint="`opentinker up` prints the address to join; it is not the API's",
            ) from error


@contextlib.contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Ray's library prints refusals by itself, past Python; ours say more."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _start_node(head: Address, host: str | None, slots: int, gpus: int | None, folder: str, mark: str) -> Any:
    parameters = RayParams(
        gcs_address=str(head),
        node_ip_address=host or services.get_node_ip_address(str(head)),
        num_gpus=gpus,
        resources={CPU_SLOT: slots} if slots else {},
        object_store_memory=OBJECT_STORE_BYTES,
        temp_dir=folder,
        include_log_monitor=False,
    )
    os.environ[NODE_VARIABLE] = mark
    try:
        with daemons_in_own_groups():
            return ray_node.Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=True)
    except (RayError, RuntimeError, OSError, ValueError) as error:
        raise UnavailableError(f"the node did not start: {' '.join(str(error).split())}") from error
    finally:
        del os.environ[NODE_VARIABLE]


def _end_processes(mark: str) -> None:
    if left := reap_with(NODE_VARIABLE, mark, KILL_AFTER_S, EXIT_S):
        logger.error("event=processes_left pids=%s", left)
