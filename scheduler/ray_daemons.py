"""How Ray's processes are started on this machine, be it for a cluster of its own or for a node of another one."""

import contextlib
import functools
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from ray._private import ray_constants, services

OBJECT_STORE_BYTES = 200 * 2**20
"""Only uploads of user code and messages between actors pass through it."""
RAY_DIR = Path("/tmp/ot-")
"""Prefix of Ray's folders. Short: the paths of the sockets in it have to fit into 107 bytes."""
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def default_slots() -> int:
    """CPU slots of a node that is not told otherwise: half its cores."""
    return max(1, (os.cpu_count() or 1) // 2)


def is_loopback(host: str) -> bool:
    """Whether an IP address is one that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def node_ip(bound: str) -> str | None:
    """The address that Ray's node gets if the API is bound to this one; None: the one that Ray finds for this machine."""
    return None if ipaddress.ip_address(bound).is_unspecified else bound


@contextlib.contextmanager
def within_loopback() -> Iterator[None]:
    """Ray's processes that are started within listen on 127.0.0.1 only, and so does this one's part of Ray."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def daemons_in_own_groups() -> Iterator[None]:
    """Ray's processes that are started within get process groups of their own.

    A terminal, `timeout` and service managers signal whole groups; Ray must outlive that, for the jobs to be ended with it.
    """
    start = services.ConsolePopen
    services.ConsolePopen = functools.partial(start, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = start
