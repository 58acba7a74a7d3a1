"""A cluster from one command: Ray, the scheduler's actor and its HTTP API, started and stopped by this process."""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
import uvicorn
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

from opentinker.config.base import parse_config
from opentinker.errors import ConfigError, ConflictError, UnavailableError
from opentinker.scheduler.actor import RemoteScheduler, create_scheduler
from opentinker.scheduler.api import create_app
from opentinker.scheduler.ray_daemons import (
    OBJECT_STORE_BYTES,
    RAY_DIR,
    TOKEN_VARIABLES,
    daemons_in_own_groups,
    default_slots,
    is_loopback,
    node_ip,
    within_loopback,
)
from opentinker.scheduler.ray_tools import CPU_SLOT, NAMESPACE
from opentinker.scheduler.service import SHUTDOWN_S
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.shared_runs import KEY, KV_NAMESPACE, record_of
from opentinker.scheduler.state_dir import StateDir, write_secret
from opentinker.scheduler.store import SqlStore, sqlite_url
from opentinker.storage import open_storage

RAY_CONFIG = {
    # Ray's own values let what a job gave back lie idle for up to a second before the next one gets it.
    "raylet_report_resources_period_milliseconds": 25,
    "gcs_create_placement_group_retry_min_interval_ms": 25,
    "gcs_create_placement_group_retry_max_interval_ms": 200,
    # Ray would start a process per core at once, for tasks of the driver; each of ours has an environment of its own, for which
    # none of those is taken.
    "prestart_worker_first_driver": False,
}
ACTOR_START_S = 60.0
HTTP_START_S = 10.0
HTTP_STOP_S = 2
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that a client never sends into a closing one."""

logger = logging.getLogger(__name__)


class EmbeddedCluster:
    """A running cluster; `start` makes one. Also a context manager that stops it.

    Start it from a thread that lives as long as the cluster does: Linux ends Ray's processes with the thread that started
    them, which is what cleans up after a `kill -9`. Install signal handlers after the start: Ray sets its own.
    """

    def __init__(self, url: str, state: StateDir, ray_address: str, stack: contextlib.ExitStack) -> None:
        self.url = url
        self.key_path = state.api_key
        self.ray_address = ray_address
        """Where further nodes join."""
        self._stack = stack

    @classmethod
    def start(
        cls,
        state_dir: Path,
        runs_dir: Path,
        host: str = "127.0.0.1",
        port: int = 8780,
        cpu_slots: int | None = None,
        gpus: int | None = None,
        *,
        ray_address: str | None = None,
        ray_port: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> Self:
        """Start a cluster, or with `ray_address` only serve the scheduler of an existing Ray cluster, which is created
        there if it has none and goes on after `stop`.

        `port` 0 takes any free one, and so does `ray_port`, the one that nodes join at. Ray listens where the API does: on
        loopback only, or on all of this machine's addresses. `cpu_slots` is by default half the cores, `gpus` what Ray finds.
        `settings` are further fields of `Settings`.

        Raises:
            ConfigError: a port is in use, a folder cannot be made, a setting is wrong, or the database is a newer version's.
            ConflictError: a cluster already runs with this state folder, or this process already uses Ray.
            UnavailableError: Ray or the scheduler did not start.
        """
        state = StateDir(state_dir.expanduser().resolve())
        fields = {"state_dir": state.path, "runs_dir": runs_dir.expanduser().resolve(), **(settings or {})}
        parsed = parse_config(Settings, fields)
        with contextlib.ExitStack() as stack:
            state.create()
            stack.enter_context(state.held())
            open_storage(parsed.remote_storage, parsed.runs_dir)  # a URL that cannot be used is told here, and at once
            # The port comes first: it is what most often is wrong, and Ray takes seconds.
            listener = stack.enter_context(_bind(host, port))
            ray_dir: str | None = None
            if ray_address is None:
                _clean_up_after(state.record())
                # The scheduler opens it again; what is wrong with it is told better, and sooner, from here.
                SqlStore.open(parsed.database_url or sqlite_url(state.database)).close()
                bound = listener.getsockname()[0]
                _bind(bound, ray_port, "--ray-port").close()
                ray_dir = stack.enter_context(_local_ray(bound, ray_port, cpu_slots, gpus))
            else:
                stack.enter_context(_existing_ray(ray_address))
            record = record_of(parsed)
            if record is None:
                _internal_kv_del(KEY, namespace=KV_NAMESPACE)  # of an earlier scheduler of this Ray cluster
            else:
                _internal_kv_put(KEY, record, namespace=KV_NAMESPACE)
            scheduler = create_scheduler(parsed)
            if ray_address is None:
                stack.callback(ray.kill, scheduler, no_restart=True)
            _await(scheduler.describe.remote(), ACTOR_START_S, "the scheduler did not start")
            stack.enter_context(_serve(RemoteScheduler(scheduler), listener))
            url = _url(host, listener.getsockname()[1])
            address = str(ray.get_runtime_context().gcs_address)
            stack.callback(state.cluster.unlink, missing_ok=True)
            key_path = str(state.api_key)
            state.write_cluster(
                {"url": url, "pid": os.getpid(), "key_path": key_path, "ray_address": address, "ray_dir": ray_dir}
            )
            if ray_address is None:
                stack.callback(_end_jobs, scheduler)
            return cls(url, state, address, stack.pop_all())
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Cancel all jobs, wait for their processes to be gone, and stop everything that `start` started. Once is enough."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _bind(host: str, port: int, option: str = "--port") -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint=f"choose another port, or `{option} 0` for any free one"
        ) from error


def _url(host: str, port: int) -> str:
    name = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


@contextlib.contextmanager
def _local_ray(bound: str, port: int, cpu_slots: int | None, gpus: int | None) -> Iterator[str]:
    """A fresh Ray cluster that nodes can join at `port`, reachable as the API, which is bound to `bound`; and its folder."""
    _refuse_second_ray()
    # Ray generates this file too, but readable by everybody; whoever reads it can run code as this user.
    if not any(os.environ.get(name) for name in TOKEN_VARIABLES):
        write_secret(Path.home() / ".ray" / "auth_token", lambda: secrets.token_hex(32), shortest=1)
    folder = tempfile.mkdtemp(prefix=RAY_DIR.name, dir=RAY_DIR.parent)
    try:
        with (
            within_loopback() if is_loopback(bound) else contextlib.nullcontext(),
            _gcs_port(port),
            _ray_connection(
                address="local",
                num_gpus=gpus,
                resources={CPU_SLOT: default_slots() if cpu_slots is None else cpu_slots},
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=folder,
                _system_config=dict(RAY_CONFIG),
                _node_ip_address=None if is_loopback(bound) else node_ip(bound),
            ),
        ):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _gcs_port(port: int) -> Iterator[None]:
    """Ray's head that is started within listens at this port; 0: at any. Ray has no argument for it."""
    if port:
        os.environ[ray_constants.GCS_PORT_ENVIRONMENT_VARIABLE] = str(port)
    try:
        yield
    finally:
        if port:
            os.environ.pop(ray_constants.GCS_PORT_ENVIRONMENT_VARIABLE, None)


@contextlib.contextmanager
def _existing_ray(address: str) -> Iterator[None]:
    _refuse_second_ray()
    with _ray_connection(address=address):
        yield


def _clean_up_after(dead: dict[str, Any] | None) -> None:
    """Remove the folder that a killed cluster left behind."""
    if dead is not None and str(dead["ray_dir"]).startswith(str(RAY_DIR)):
        shutil.rmtree(dead["ray_dir"], ignore_errors=True)


def _refuse_second_ray() -> None:
    if ray.is_initialized():
        raise ConflictError("this process already uses Ray", hint="start the cluster in a process of its own")


@contextlib.contextmanager
def _ray_connection(**arguments: Any) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    # Ray prints deaths of workers on our stdout, whatever it is told; the job's cause says it already.
    ray._private.worker._worker_logs_enabled = False
    try:
        try:
            with daemons_in_own_groups():
                ray.init(namespace=NAMESPACE, log_to_driver=False, configure_logging=False, **arguments)
        except (RayError, RuntimeError, ConnectionError, ValueError) as error:
            hint = "a cluster with a token needs RAY_AUTH_MODE=token" if isinstance(error, ConnectionError) else ""
            raise UnavailableError(f"Ray did not start: {error}", hint=hint) from error
        yield
    finally:
        ray.shutdown()


def _await(reference: Any, timeout_s: float, failure: str) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayError as error:
        raise UnavailableError(f"{failure}: {error}") from error


def _end_jobs(scheduler: Any) -> None:
    try:
        if not _await(scheduler.shutdown.remote(), SHUTDOWN_S + 10.0, "jobs could not be ended"):
            logger.warning("event=processes_left detail='some jobs had processes left; they end with Ray'")
    except UnavailableError as error:
        logger.warning("event=shutdown_failed detail=%s", error)


@contextlib.contextmanager
def _serve(scheduler: RemoteScheduler, listener: socket.socket) -> Iterator[None]:
    """The HTTP API on a thread of its own."""
    config = uvicorn.Config(
        create_app(scheduler),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        forwarded_allow_ips=["127.0.0.1", "::1"],  # a proxy on this machine; whatever $FORWARDED_ALLOW_IPS says
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=HTTP_STOP_S,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="scheduler-api", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + HTTP_START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise UnavailableError("the scheduler's HTTP server did not start")
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join(HTTP_STOP_S + 5.0)
