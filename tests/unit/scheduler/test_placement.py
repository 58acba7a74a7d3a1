import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.config.job import Resources
from opentinker.errors import ConfigError
from opentinker.scheduler.placement import Allocation, Demand, Node, demand_of, free_on, place, threads_for

demands = st.one_of(st.builds(Demand, gpus=st.integers(1, 8)), st.just(Demand(cpu_slots=1)))
clusters = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=5).map(
    lambda sizes: [Node(f"n{i}", f"n{i}", gpus, slots) for i, (gpus, slots) in enumerate(sizes)]
)
queues = st.lists(demands, max_size=12).map(lambda asked: [(f"j{i}", demand) for i, demand in enumerate(asked)])


def holds(nodes: list[Node], queue: list[tuple[str, Demand]]) -> list[Allocation]:
    """What an earlier placement of `queue` holds."""
    return list(place(nodes, [], queue).starts.values())


@given(clusters, queues, queues)
def test_nothing_is_given_twice(nodes: list[Node], earlier: list[tuple[str, Demand]], queue: list[tuple[str, Demand]]) -> None:
    held = holds(nodes, earlier)
    after = held + list(place(nodes, held, queue).starts.values())
    for node in nodes:
        here = [a.demand for a in after if a.node_id == node.id]
        assert sum(d.gpus for d in here) <= node.gpus
        assert sum(d.cpu_slots for d in here) <= node.cpu_slots


@given(clusters, queues, queues)
def test_every_job_starts_or_is_told_why_not(
    nodes: list[Node], earlier: list[tuple[str, Demand]], queue: list[tuple[str, Demand]]
) -> None:
    placement = place(nodes, holds(nodes, earlier), queue)
    assert placement.starts.keys() | placement.waits.keys() == {job for job, _ in queue}
    assert not placement.starts.keys() & placement.waits.keys()
    assert all(placement.waits.values())


@given(clusters, queues, queues)
def test_nobody_overtakes_and_the_head_never_waits_for_nothing(
    nodes: list[Node], earlier: list[tuple[str, Demand]], queue: list[tuple[str, Demand]]
) -> None:
    held = holds(nodes, earlier)
    placement = place(nodes, held, queue)
    order = [job for job, _ in queue]
    assert list(placement.starts) == order[: len(placement.starts)]
    if placement.waits:
        head = queue[len(placement.starts)][1]
        free = free_on(nodes, held + list(placement.starts.values())).values()
        assert not any(f.gpus >= head.gpus and f.cpu_slots >= head.cpu_slots for f in free)


@given(clusters, queues)
def test_placement_is_a_function(nodes: list[Node], queue: list[tuple[str, Demand]]) -> None:
    assert place(nodes, [], queue) == place(list(reversed(nodes)), [], queue)


@given(clusters, st.one_of(st.none(), st.integers(0, 9)))
def test_an_accepted_demand_fits_an_empty_cluster(nodes: list[Node], gpus: int | None) -> None:
    try:
        demand = demand_of(Resources(gpus=gpus), nodes)
    except ConfigError:
        return
    assert place(nodes, [], [("j", demand)]).starts


def test_without_a_wish_a_job_takes_a_gpu_where_there_is_one() -> None:
    assert demand_of(Resources(), [Node("a", "a", 0, 2), Node("b", "b", 4, 0)]) == Demand(gpus=1)
    assert demand_of(Resources(), [Node("a", "a", 0, 2)]) == Demand(cpu_slots=1)
    assert demand_of(Resources(gpus=0), [Node("b", "b", 4, 1)]) == Demand(cpu_slots=1)


def test_a_job_that_can_never_fit_is_refused_with_the_largest_node() -> None:
    with pytest.raises(ConfigError, match="3 GPUs on one node; the largest node of this cluster has 2 GPUs"):
        demand_of(Resources(gpus=3), [Node("a", "a", 2, 0), Node("b", "b", 2, 0)])


def test_waiting_is_explained_in_words() -> None:
    nodes = [Node("a", "a", 2, 0)]
    held = [Allocation("a", Demand(gpus=1))]
    waits = place(nodes, held, [("j1", Demand(gpus=2)), ("j2", Demand(gpus=1)), ("j3", Demand(gpus=1))]).waits
    assert waits == {
        "j1": "2 GPUs: 1 GPU free",
        "j2": "its turn: 1 job ahead in the queue",
        "j3": "its turn: 2 jobs ahead in the queue",
    }


def test_a_small_job_fills_the_fuller_node() -> None:
    nodes = [Node("a", "a", 8, 0), Node("b", "b", 8, 0)]
    assert place(nodes, [Allocation("b", Demand(gpus=7))], [("j", Demand(gpus=1))]).starts["j"].node_id == "b"


def test_cores_are_shared_out_among_slots() -> None:
    assert threads_for(Node("a", "a", 0, 1, cpus=2), Demand(cpu_slots=1)) == 2
    assert threads_for(Node("a", "a", 0, 4, cpus=2), Demand(cpu_slots=1)) == 1
    assert threads_for(Node("a", "a", 8, 0, cpus=64), Demand(gpus=2)) == 16
