"""The bundles of split jobs: what they ask for, what they hold, and that a record stands for the same."""

from dataclasses import replace
from typing import Any

import pytest

from opentinker.config.job import parse_job
from opentinker.errors import ConfigError
from opentinker.scheduler.layouts import bundles, held_by, request_of, total
from opentinker.scheduler.placement import Allocation, Demand, Node
from opentinker.scheduler.records import Server
from opentinker.scheduler.states import ServerState

GPUS = [Node("a", "a", 4, 0), Node("b", "b", 2, 1)]
SLOTS = [Node("a", "a", 0, 1), Node("b", "b", 0, 1)]


def asked(nodes: list[Node], resources: dict[str, Any], **engine: Any) -> tuple[Demand, ...]:
    job = {"kind": "interactive", "base_model": "m", "engine": engine, "resources": resources}
    return request_of(parse_job(job), nodes)


def test_each_role_takes_what_it_is_given_or_a_gpu_where_there_is_one() -> None:
    assert asked(GPUS, {}) == (Demand(1),)
    assert asked(GPUS, {"layout": "split"}) == (Demand(1), Demand(1))
    assert asked(SLOTS, {"layout": "split"}) == (Demand(cpu_slots=1), Demand(cpu_slots=1))
    assert asked(GPUS, {"layout": "split", "trainer": {"gpus": 4}, "rollout": {"gpus": 0.5}}) == (Demand(4), Demand(0.5))
    assert asked(GPUS, {"layout": "split", "rollout": {"gpus": 0}}) == (Demand(1), Demand(cpu_slots=1))


def test_a_tensor_parallel_engine_takes_a_gpu_for_each_part() -> None:
    assert asked(GPUS, {"layout": "split"}, tensor_parallel=2) == (Demand(1), Demand(2))
    inference = parse_job({"kind": "inference", "base_model": "m", "engine": {"tensor_parallel": 4}})
    assert request_of(inference, GPUS) == (Demand(4),)
    assert asked(GPUS, {}, tensor_parallel=2) == (Demand(2),)
    assert asked(GPUS, {"gpus": 4}, tensor_parallel=2) == (Demand(4),)
    assert asked(SLOTS, {}, tensor_parallel=2) == (Demand(cpu_slots=1),)


@pytest.mark.parametrize(
    ("nodes", "resources", "words"),
    [
        (SLOTS[:1], {"layout": "split"}, "1 CPU slot for the trainer and 1 CPU slot for the rollout, each on one node"),
        (GPUS, {"layout": "split", "trainer": {"gpus": 4}, "rollout": {"gpus": 4}}, "has 6 GPUs and 1 CPU slot on 2 nodes"),
        ([], {"layout": "split"}, "has 0 GPUs and 0 CPU slots on 0 nodes"),
        (GPUS, {"layout": "split", "trainer": {"replicas": 2}}, "resources.trainer.replicas: 2 replicas are not served yet"),
    ],
)
def test_what_the_cluster_cannot_hold_is_refused_with_what_it_has(
    nodes: list[Node], resources: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        asked(nodes, resources, tensor_parallel=max(1, resources.get("rollout", {}).get("gpus", 1)))


def test_a_record_stands_for_the_bundles_that_it_was_made_from() -> None:
    server = Server("s", ServerState.READY, "m", "a", 4.5, 0, gpu_indexes=(0, 1, 2, 3))
    assert bundles(server) == (Demand(4.5),)
    split = replace(server, rollout_gpus=0.5, rollout_node_id="b", rollout_gpu_indexes=(1,))
    assert held_by(split) == (Allocation("a", Demand(4), (0, 1, 2, 3)), Allocation("b", Demand(0.5), (1,)))
    assert total(bundles(split)) == Demand(4.5)
