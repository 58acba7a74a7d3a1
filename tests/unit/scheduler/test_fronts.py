"""Where a job's server listens."""

import pytest

from opentinker.scheduler.fronts import advertised, front_host
from opentinker.scheduler.placement import Node


def node(address: str) -> Node:
    return Node(f"node-{address}", "host", gpus=1, cpu_slots=0, address=address)


def test_on_one_machine_servers_listen_on_loopback_only() -> None:
    here = node("10.0.0.5")
    assert front_host("auto", here, [here]) == "127.0.0.1"
    assert front_host("auto", here, [here, node("10.0.0.5")]) == "127.0.0.1"  # two nodes on it


def test_with_several_machines_each_server_listens_at_its_own_nodes_address() -> None:
    nodes = [node("10.0.0.5"), node("10.0.0.6"), node("fd00::7")]
    assert [front_host("auto", one, nodes) for one in nodes] == ["10.0.0.5", "10.0.0.6", "fd00::7"]


def test_an_address_that_the_operator_chose_is_taken_as_it_is() -> None:
    assert front_host("192.0.2.9", node("10.0.0.5"), [node("10.0.0.5"), node("10.0.0.6")]) == "192.0.2.9"


def test_a_node_of_unknown_address_keeps_its_servers_to_itself() -> None:
    assert front_host("auto", node(""), [node(""), node("10.0.0.6")]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("endpoint", "address", "told"),
    [
        ("http://0.0.0.0:4711", "10.0.0.5", "http://10.0.0.5:4711"),
        ("http://[::]:4711", "fd00::7", "http://[fd00::7]:4711"),
        ("http://127.0.0.1:4711", "10.0.0.5", "http://127.0.0.1:4711"),
        ("http://0.0.0.0:4711", "", "http://0.0.0.0:4711"),
    ],
)
def test_a_server_that_listens_on_all_addresses_is_told_of_by_one_that_others_can_use(
    endpoint: str, address: str, told: str
) -> None:
    assert advertised(endpoint, node(address)) == told
