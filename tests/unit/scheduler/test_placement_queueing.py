"""A pass over the queue: promises that hold for every cluster, queue and history."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from opentinker.scheduler.backfill import Holder
from opentinker.scheduler.capacity import Capacity
from opentinker.scheduler.placement import Allocation, Demand, Node, Request
from opentinker.scheduler.plan import JobView
from opentinker.scheduler.queueing import Held, Policy, schedule
from opentinker.scheduler.settings import Quota
from opentinker.scheduler.states import JobState

clusters = st.lists(st.tuples(st.sampled_from([0, 2, 4, 8, 8]), st.integers(0, 3)), min_size=1, max_size=5).map(
    lambda sizes: [Node(f"n{i}", f"n{i}", gpus, slots) for i, (gpus, slots) in enumerate(sizes)]
)
bundles = st.one_of(
    st.sampled_from([0.25, 0.5, 1, 1, 2, 3, 4, 8]).map(Demand), st.just(Demand(cpu_slots=1)), st.just(Demand(2, 1))
)
requests = st.lists(bundles, min_size=1, max_size=3).map(tuple) | bundles.map(lambda bundle: (bundle,))
limits = st.one_of(st.none(), st.sampled_from([1.0, 5.0, 10.0, 100.0]))


def asked(name: str, *request: Demand, owner: str = "a", limit: float | None = None, at: float = 0.0) -> JobView:
    return JobView(name, JobState.QUEUED, request, owner=owner, time_limit_s=limit, submitted_at=at)


@st.composite
def queues(draw: st.DrawFn) -> list[JobView]:
    return [
        replace(
            asked(f"j{i}", *draw(requests), owner=draw(st.sampled_from("abc")), limit=draw(limits), at=float(i)),
            priority=draw(st.integers(-1, 1)),
        )
        for i in range(draw(st.integers(0, 12)))
    ]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Node], list[Holder], list[JobView]]:
    """A cluster on which an earlier pass has started jobs, some of which have ended, and a queue."""
    nodes = draw(clusters)
    earlier = [job for job in draw(queues()) if draw(st.booleans())]
    starts = schedule(nodes, [], earlier).starts
    limit_of = {job.id: job.time_limit_s or math.inf for job in earlier}
    holders = [Holder(f"r-{name}", where, limit_of[name], 0.0) for name, where in starts.items() if draw(st.booleans())]
    return nodes, holders, draw(queues())


def used(allocations: Sequence[Allocation], node: Node) -> tuple[float, int]:
    here = [a.demand for a in allocations if a.node_id == node.id]
    return sum(d.gpus for d in here), sum(d.cpu_slots for d in here)


@given(worlds())
def test_nothing_is_given_twice_and_a_gang_is_all_or_nothing(world: tuple[list[Node], list[Holder], list[JobView]]) -> None:
    nodes, holders, queue = world
    placement = schedule(nodes, holders, queue)
    for job in queue:
        if job.id in placement.starts:
            assert tuple(a.demand for a in placement.starts[job.id]) == job.request
    everything = [a for h in holders for a in h.where] + [a for where in placement.starts.values() for a in where]
    for node in nodes:
        gpus, slots = used(everything, node)
        assert gpus <= node.gpus + 1e-6
        assert slots <= node.cpu_slots


@given(worlds())
def test_every_job_starts_or_is_told_why_not(world: tuple[list[Node], list[Holder], list[JobView]]) -> None:
    placement = schedule(*world)
    assert placement.starts.keys() | placement.waits.keys() == {job.id for job in world[2]}
    assert not placement.starts.keys() & placement.waits.keys()
    assert all(placement.waits.values())


@given(worlds(), st.randoms(use_true_random=False))
def test_placement_is_a_function_of_what_it_is_given(
    world: tuple[list[Node], list[Holder], list[JobView]], shuffler: random.Random
) -> None:
    nodes, holders, queue = world
    shuffled_nodes, shuffled_holders = nodes[:], holders[:]
    shuffler.shuffle(shuffled_nodes)
    shuffler.shuffle(shuffled_holders)
    assert schedule(nodes, holders, queue) == schedule(shuffled_nodes, shuffled_holders, queue)


@given(worlds())
def test_only_jobs_with_a_limit_overtake_and_the_first_in_line_never_waits_for_nothing(
    world: tuple[list[Node], list[Holder], list[JobView]],
) -> None:
    """One kind of resource: GPUs. Order: priority, then submission (one owner)."""
    nodes, holders, queue = world
    queue = [replace(job, owner="a") for job in queue if all(d.gpus and not d.cpu_slots for d in job.request)]
    placement = schedule(nodes, holders, queue)
    order = sorted(queue, key=lambda job: (-job.priority, job.submitted_at))
    possible = [job for job in order if Capacity(nodes).place(job.request) is not None]
    waiting = [job for job in possible if job.id in placement.waits]
    if not waiting:
        return
    head = waiting[0]
    behind = possible[possible.index(head) + 1 :]
    assert all(job.time_limit_s is not None for job in behind if job.id in placement.starts)
    started_before = [a for job in possible[: possible.index(head)] for a in placement.starts[job.id]]
    free = Capacity(nodes, [a for h in holders for a in h.where] + started_before)
    assert free.place(head.request) is None


@given(worlds(), st.integers(0, 8), st.integers(0, 3))
def test_no_owner_gets_more_than_their_quota_and_nobody_else_waits_for_it(
    world: tuple[list[Node], list[Holder], list[JobView]], gpus: int, jobs: int
) -> None:
    nodes, holders, queue = world
    policy = Policy(quotas={"a": Quota(gpus=gpus, jobs=jobs)})
    held = {"a": Held(gpus=1.0, jobs=1)}
    placement = schedule(nodes, holders, queue, policy=policy, held=held)
    mine = [job for job in queue if job.owner == "a" and job.id in placement.starts]
    assert not mine or len(mine) + 1 <= jobs
    wanted = [sum(d.gpus for d in job.request) for job in mine]
    assert not sum(wanted) or sum(wanted) + 1.0 <= gpus + 1e-6
    if gpus == 0 and jobs == 0:
        others = schedule(nodes, holders, [job for job in queue if job.owner != "a"], policy=policy)
        assert others.starts == {name: where for name, where in placement.starts.items() if name not in {j.id for j in mine}}


class Simulation:
    """Jobs that run exactly as long as their limit, in virtual time; order of submission, one owner."""

    def __init__(self, nodes: list[Node], queue: list[JobView]) -> None:
        self.nodes, self.waiting, self.now = nodes, queue, 0.0
        self.running: dict[str, Holder] = {}
        self.started: dict[str, float] = {}

    def tick(self) -> None:
        self.running = {name: holder for name, holder in self.running.items() if holder.ends_at > self.now}
        placement = schedule(self.nodes, list(self.running.values()), self.waiting, self.now)
        for job in self.waiting:
            if job.id in placement.starts:
                assert job.time_limit_s is not None
                ends_at = self.now + job.time_limit_s
                self.running[job.id] = Holder(job.id, placement.starts[job.id], ends_at, self.now)
                self.started[job.id] = self.now
        self.waiting = [job for job in self.waiting if job.id not in placement.starts]
        self.words = placement.waits
        self.now = min([h.ends_at for h in self.running.values()], default=math.inf)


sizes = st.one_of(
    st.builds(lambda g: (Demand(g),), st.sampled_from([1, 2, 3, 4, 6, 8])),
    st.builds(lambda n: (Demand(4),) * n, st.integers(2, 4)),
)
limited_jobs = st.lists(st.tuples(sizes, st.integers(1, 9)), min_size=1, max_size=14)


@given(st.integers(1, 3), limited_jobs)
def test_whoever_overtakes_never_delays_the_first_in_line(count: int, jobs: list[tuple[Request, int]]) -> None:
    """The first in line starts no later than it would if nobody overtook it."""
    nodes = [Node(f"n{i}", f"n{i}", 8, 0) for i in range(count)]
    queue = [asked(f"j{i}", *request, limit=float(limit), at=float(i)) for i, (request, limit) in enumerate(jobs)]
    queue = [job for job in queue if Capacity(nodes).place(job.request) is not None]
    assume(queue)
    world = Simulation(nodes, queue)
    promised: dict[str, float] = {}
    while world.waiting:
        world.tick()
        if world.waiting:
            head = world.waiting[0]
            alone = Simulation(nodes, [head])
            alone.running, alone.now = dict(world.running), world.now
            while alone.waiting:
                alone.tick()
            promise = alone.started[head.id]
            assert promise <= promised.get(head.id, math.inf)
            promised[head.id] = promise
    for name, promise in promised.items():
        assert world.started[name] <= promise


ONE = [Node("a", "a", 4, 0)]
RUNS = Holder("job-17", (Allocation("a", Demand(2)),), ends_at=720.0)


def test_waiting_is_explained_in_words() -> None:
    queue = [
        asked("head", Demand(4)),
        asked("endless", Demand(1)),
        asked("long", Demand(1), limit=7200.0),
        asked("big", Demand(3), limit=60.0),
        asked("huge", Demand(16)),
        asked("gang", Demand(4), Demand(4), limit=60.0),
        asked("short", Demand(1), limit=600.0),
    ]
    placement = schedule(ONE, [RUNS], queue)
    assert set(placement.starts) == {"short"}
    assert placement.waits == {
        "head": "needs 4 GPUs on one node; largest free block is 2; estimated after job-17 (in 12 min)",
        "endless": "its turn: 1 job ahead in the queue (next: head); with a time limit it could fill a gap before that",
        "long": "its turn: it would delay head, due in 12 min, with its time limit of 2 h; 2 jobs ahead in the queue "
        "(next: head)",
        "big": "needs 3 GPUs on one node; largest free block is 2; 3 jobs ahead in the queue (next: head)",
        "huge": "needs 16 GPUs on one node; the nodes that are up now are too small for that, also when nothing runs",
        "gang": "needs 2 x 4 GPUs, each on one node; the nodes that are up now are too small for that, also when nothing runs",
    }


def test_without_a_limit_on_what_runs_only_other_nodes_are_filled() -> None:
    nodes = [*ONE, Node("b", "b", 2, 0)]
    endless = replace(RUNS, ends_at=math.inf)
    queue = [asked("head", Demand(4)), *(asked(f"j{i}", Demand(1), limit=1.0) for i in range(3))]
    placement = schedule(nodes, [endless], queue)
    assert {name: where[0].node_id for name, where in placement.starts.items()} == {"j0": "b", "j1": "b"}
    assert placement.waits["head"] == (
        "needs 4 GPUs on one node; largest free block is 2; after job-17, which has no time limit"
    )
    assert "it would delay head, whose time is not known" in placement.waits["j2"]


def test_a_long_job_may_use_what_the_first_in_line_leaves() -> None:
    """The head needs 3 of 4 GPUs in 12 min; one stays over, for one long job."""
    queue = [asked("head", Demand(3)), asked("one", Demand(1), limit=1e6), asked("two", Demand(1), limit=1e6)]
    assert set(schedule(ONE, [RUNS], queue).starts) == {"one"}


def test_who_needs_no_gpu_does_not_wait_for_one() -> None:
    nodes = [Node("a", "a", 4, 2)]
    queue = [asked("head", Demand(4)), asked("cpu", Demand(cpu_slots=1)), asked("gpu", Demand(1))]
    placement = schedule(nodes, [RUNS], queue)
    assert set(placement.starts) == {"cpu"}


def test_over_quota_is_said_in_words_and_blocks_nobody() -> None:
    policy = Policy(quota=Quota(gpus=2))
    queue = [asked("mine", Demand(1)), asked("theirs", Demand(1), owner="b")]
    placement = schedule(ONE, [RUNS], queue, policy=policy, held={"a": Held(2.0, 1)})
    assert set(placement.starts) == {"theirs"}
    assert placement.waits == {"mine": "its owner's quota: needs 1 GPU, and 2 of 2 GPUs are in use"}


def test_who_used_less_goes_first() -> None:
    queue = [asked("mine", Demand(4), at=0.0), asked("theirs", Demand(4), owner="b", at=60.0)]
    assert set(schedule(ONE, [], queue, usage={"a": 5000.0}).starts) == {"theirs"}
    assert set(schedule(ONE, [], queue).starts) == {"mine"}


@pytest.mark.parametrize("nodes", [[], [Node("a", "a", 0, 1)]])
def test_a_node_that_is_away_leaves_words_and_no_start(nodes: list[Node]) -> None:
    placement = schedule(nodes, [RUNS], [asked("j", Demand(1)), asked("k", Demand(1))])
    assert not placement.starts
    assert all("too small" in why for why in placement.waits.values())
