"""What is free: never more than there is, whatever Ray chose."""

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from opentinker.scheduler.capacity import Capacity
from opentinker.scheduler.placement import Allocation, Demand, Node

EIGHT = Node("a", "a", 8, 0)
TWO_GROUPS = Node("a", "a", 8, 0, gpu_groups=((0, 1, 2, 3), (4, 5, 6, 7)))


@dataclass
class RayNode:
    """Ray's own choice: whole GPUs from the lowest index; a fraction on the GPU that it leaves fullest."""

    free: list[float]
    held: dict[str, tuple[Demand, tuple[int, ...]]] = field(default_factory=dict)

    def grant(self, name: str, demand: Demand) -> bool:
        if demand.shares_gpu:
            fitting = [i for i, free in enumerate(self.free) if free >= demand.gpus - 1e-6]
            chosen = sorted(fitting, key=lambda i: self.free[i])[:1]
        else:
            chosen = [i for i, free in enumerate(self.free) if free > 1 - 1e-6][: int(demand.gpus)]
        if len(chosen) < max(1, int(demand.gpus)):
            return False
        for index in chosen:
            self.free[index] -= min(1.0, demand.gpus)
        self.held[name] = (demand, tuple(chosen))
        return True

    def release(self, name: str) -> None:
        demand, chosen = self.held.pop(name)
        for index in chosen:
            self.free[index] += min(1.0, demand.gpus)


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.75, 1, 2]), st.integers(0, 9), st.booleans()), max_size=40))
def test_what_counts_as_free_is_granted_by_ray(steps: list[tuple[float, int, bool]]) -> None:
    """Starts and ends in any order; some servers have told their GPU, others not yet."""
    node, ray, told = Node("a", "a", 3, 0), RayNode([1.0] * 3), set()
    for step, (gpus, victim, tells) in enumerate(steps):
        demand = Demand(gpus)
        held = [Allocation("a", d, gpus if name in told else ()) for name, (d, gpus) in ray.held.items()]
        if Capacity([node], held).place((demand,)) is not None:
            assert ray.grant(f"j{step}", demand)
            if tells:
                told.add(f"j{step}")
        elif victim < len(ray.held):
            ray.release(list(ray.held)[victim])


def test_fractions_share_a_gpu_only_with_fractions() -> None:
    held = [Allocation("a", Demand(0.5), (0,))]
    capacity = Capacity([Node("a", "a", 2, 0)], held)
    assert capacity.place((Demand(2),)) is None
    assert capacity.place((Demand(0.5),)) is not None
    assert capacity.place((Demand(1),)) is None  # where the last fraction went is not known: it may have opened this one
    told = [*held, Allocation("a", Demand(0.5), (0,))]
    assert Capacity([Node("a", "a", 2, 0)], told).place((Demand(1),)) is not None


def test_a_fraction_goes_where_the_least_is_left_and_keeps_other_nodes_whole() -> None:
    nodes = [EIGHT, Node("b", "b", 8, 0)]
    held = [Allocation("b", Demand(0.25), (0,)), Allocation("a", Demand(4), (0, 1, 2, 3))]
    capacity = Capacity(nodes, held)
    assert capacity.place((Demand(0.75),)) == [1]


def test_a_small_job_fills_the_fuller_node() -> None:
    capacity = Capacity([EIGHT, Node("b", "b", 8, 0)], [Allocation("b", Demand(7))])
    assert capacity.place((Demand(1),)) == [1]


def test_a_gang_is_all_or_nothing_and_keeps_together() -> None:
    nodes = [Node(name, name, 8, 0) for name in "abc"]
    capacity = Capacity(nodes, [Allocation("a", Demand(1)), Allocation("b", Demand(4))])
    before = [capacity.blocks(n, Demand(1)) for n in range(3)]
    assert capacity.place((Demand(8), Demand(8))) is None
    assert [capacity.blocks(n, Demand(1)) for n in range(3)] == before
    assert capacity.place((Demand(2), Demand(2), Demand(8))) == [1, 1, 2]


def test_neighbours_are_kept_together_where_they_are_known() -> None:
    straddles = Allocation("a", Demand(2), (0, 1))
    plain = Node("b", "b", 8, 0, gpu_groups=TWO_GROUPS.gpu_groups)
    # Ray would give GPUs 2 to 5 of node a, over both groups; node b has a group whole, though it is emptier.
    assert Capacity([TWO_GROUPS, plain], [straddles]).place((Demand(4),)) == [1]
    assert Capacity([TWO_GROUPS, plain], [straddles]).place((Demand(2),)) == [0]


def test_what_shrank_or_is_gone_has_nothing_free_and_recovers() -> None:
    capacity = Capacity([Node("a", "a", 2, 0)], [Allocation("a", Demand(4)), Allocation("gone", Demand(1))])
    assert capacity.place((Demand(1),)) is None
    capacity.release(0, Demand(4))
    assert capacity.blocks(0, Demand(1)) == 2


allocations = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.5, 1, 2, 3, 8]), st.booleans()), max_size=12)


@given(allocations, st.permutations(range(4)))
def test_taking_and_releasing_gives_the_same_as_building(asked: list[tuple[int, float, bool]], order: list[int]) -> None:
    nodes = [Node(f"n{i}", f"n{i}", size, 1) for i, size in enumerate((2, 4, 8, 8))]
    built = Capacity(nodes, [Allocation(f"n{i}", Demand(gpus), (0,) if known else ()) for i, gpus, known in asked])
    moved = Capacity([nodes[i] for i in order])
    for i, gpus, known in asked:
        moved.take(i, Demand(gpus), (0,) if known else ())
    probe = (Demand(0.25), Demand(1), Demand(2), Demand(8))
    assert [built.fits(i, d) for i in range(4) for d in probe] == [moved.fits(i, d) for i in range(4) for d in probe]
    copy = moved.copy()
    for i, gpus, known in reversed(asked):
        copy.release(i, Demand(gpus), (0,) if known else ())
    assert copy.place((Demand(2), Demand(4), Demand(8), Demand(8))) is not None
    assert [built.fits(i, d) for i in range(4) for d in probe] == [moved.fits(i, d) for i in range(4) for d in probe]


def fits_somehow(free: list[int], sizes: list[int]) -> bool:
    """Whether there is any way at all, by trying every one."""
    if not sizes:
        return True
    first, *rest = sizes
    return any(
        room >= first and fits_somehow([r - first if n == number else r for n, r in enumerate(free)], rest)
        for number, room in enumerate(free)
    )


@given(st.lists(st.integers(1, 10), min_size=1, max_size=3), st.lists(st.integers(1, 6), min_size=1, max_size=5))
@example([10, 10], [4, 4, 3, 3, 3, 3])
def test_bundles_that_fit_in_any_way_are_placed(gpus: list[int], sizes: list[int]) -> None:
    capacity = Capacity([Node(str(n), str(n), size, 0) for n, size in enumerate(gpus)])
    request = tuple(Demand(size) for size in sizes)
    placed = capacity.place(request)
    assert (placed is not None) == fits_somehow(gpus, sizes)
    left = [size - sum(s for s, n in zip(sizes, placed or (), strict=False) if n == number) for number, size in enumerate(gpus)]
    assert min(left) >= 0
    assert [capacity.largest_free(Demand(1))] == [max(left)]
