"""Where a job's server listens, and what of it is told to others. Pure."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from opentinker.scheduler.placement import Node

AUTO = "auto"
_WILDCARDS = frozenset({"0.0.0.0", "::"})
_LOOPBACK = "127.0.0.1"


def front_host(setting: str, node: Node, nodes: Sequence[Node]) -> str:
    """The address that the front of a server on `node` binds.

    With `auto`, a cluster on one machine keeps its fronts on loopback: everyone who has to reach them (the API's proxy,
    drivers, clients on this machine) is there. Otherwise it is the node's own address, as Ray's nodes use among each other.
    """
    if setting != AUTO:
        return setting
    if not node.address or {other.address for other in nodes} <= {node.address}:
        return _LOOPBACK
    return node.address


def advertised(endpoint: str, node: Node) -> str:
    """The endpoint as others can use it: a front that listens on all addresses is reached at its node's."""
    parts = urlsplit(endpoint)
    if parts.hostname not in _WILDCARDS or not node.address:
        return endpoint
    host = f"[{node.address}]" if ":" in node.address else node.address
    return f"{parts.scheme}://{host}:{parts.port}"
