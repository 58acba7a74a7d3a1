"""Finding a cluster's head, and noticing its end. What needs Ray is in tests/integration/scheduler/test_joining_on_ray.py."""

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from opentinker.errors import ConfigError, UnavailableError
from opentinker.scheduler import joining, shared_runs
from opentinker.scheduler.joining import Address, JoinedNode, Offer
from opentinker.scheduler.ray_daemons import is_loopback, node_ip
from opentinker.scheduler.settings import Settings


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("head:6379", "head", 6379), ("10.0.0.5:1", "10.0.0.5", 1), ("[fd00::7]:65535", "fd00::7", 65535)],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "head", "head:", ":6379", "head:zero", "head:0", "head:65536", "http://head:8780", "a:-1"]
)
def test_what_is_no_address_is_refused_with_what_one_looks_like(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Address.parse(text)


def test_an_address_that_nothing_answers_at_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(UnavailableError, match=f"nothing accepts nodes at 127.0.0.1:{port}: Connection refused"):
        JoinedNode.start(f"127.0.0.1:{port}")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "head", "203.0.113.9", ""])
def test_a_nodes_own_address_has_to_be_one_of_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match="not an IP address of this machine"):
        JoinedNode.start("127.0.0.1:1", host=host)


def test_what_killed_nodes_left_on_disk_goes_with_the_next_start(tmp_path: Path) -> None:
    alive, dead, other = (tmp_path / name for name in (f"ot-n{os.getpid()}-x", f"ot-n{2**30}-x", "ot-another"))
    for folder in (alive, dead, other):
        folder.mkdir()
    joining.clean_up_after_killed(tmp_path)
    assert (alive.exists(), dead.exists(), other.exists()) == (True, False, True)


class NodeProcesses:
    def __init__(self) -> None:
        self.dead: list[Any] = []

    def dead_processes(self) -> list[Any]:
        return self.dead


def joined(port: int) -> tuple[JoinedNode, NodeProcesses]:
    processes = NodeProcesses()
    node = JoinedNode(Address("127.0.0.1", port), processes, Offer("id", "127.0.0.1", 0, 1, 2), contextlib.ExitStack())
    return node, processes


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LOOK_S", 0.01)
    monkeypatch.setattr(joining, "HEAD_GONE_S", 0.2)


def test_a_node_stays_until_it_is_told_to_leave() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as head:
        node, _ = joined(head.getsockname()[1])
        stop = threading.Event()
        threading.Timer(0.4, stop.set).start()
        assert node.wait(stop) == ""


def test_a_node_whose_head_is_gone_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        node, _ = joined(head.getsockname()[1])
    assert node.wait() == f"the cluster at {node.address} is gone: Connection refused"


def test_a_node_whose_processes_die_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as head:
        node, processes = joined(head.getsockname()[1])
        processes.dead = [("raylet", None)]
        assert "let this node go" in node.wait()


def test_a_node_says_what_it_offers() -> None:
    assert str(Offer("id", "10.0.0.5", 8, 1, 2)) == "8 GPUs, 1 CPU slot on 2 cores"


def test_ray_listens_where_the_api_does() -> None:
    assert [is_loopback(bound) for bound in ("127.0.0.1", "::1", "0.0.0.0", "10.0.0.5", "head")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert [node_ip(bound) for bound in ("0.0.0.0", "::", "10.0.0.5")] == [None, None, "10.0.0.5"]


def test_the_runs_folder_has_to_be_the_clusters_own(tmp_path: Path) -> None:
    record = shared_runs.mark(tmp_path / "runs")
    shared_runs.check(record)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not the cluster's folder"):
        shared_runs.check(record)
    shared_runs.mark(tmp_path / "runs")  # a folder of that name, of another cluster
    with pytest.raises(ConfigError, match="share that folder"):
        shared_runs.check(record)


def test_nodes_look_for_the_folder_where_the_jobs_write_if_they_share_one(tmp_path: Path) -> None:
    fields = {"state_dir": tmp_path, "runs_dir": tmp_path / "runs"}
    for settings in (Settings(**fields), Settings(**fields, storage_url=str(tmp_path / "shared"))):
        record = shared_runs.record_of(settings)
        assert record is not None
        assert (settings.run_root / shared_runs.MARKER).exists()
        shared_runs.check(record)
    apart = Settings(state_dir=tmp_path, runs_dir=tmp_path / "own", storage_url="s3://bucket/ot")
    assert shared_runs.record_of(apart) is None
    assert list((tmp_path / "own").iterdir()) == []


def test_a_runs_folder_that_cannot_be_made_is_a_mistake_of_the_operators(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the runs folder"):
        shared_runs.mark(tmp_path / "file" / "runs")
