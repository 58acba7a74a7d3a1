"""What the autoscaler is asked for."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.errors import ConfigError
from opentinker.scheduler.autoscale import Growth, wanted
from opentinker.scheduler.placement import Allocation, Demand, Node
from opentinker.scheduler.plan import JobView, ServerView, Snapshot, plan
from opentinker.scheduler.queueing import Policy
from opentinker.scheduler.settings import NodeType, Quota, Settings
from opentinker.scheduler.states import JobState, ServerState

SMALL = Node("small", "small", gpus=2, cpu_slots=0)
EIGHT = NodeType(gpus=8, max=16)


def queued(name: str, *gpus: float, owner: str = "ann") -> JobView:
    return JobView(name, JobState.QUEUED, tuple(Demand(one) for one in gpus), owner=owner)


def running(name: str, gpus: float, owner: str = "ann") -> tuple[JobView, ServerView]:
    job = JobView(name, JobState.RUNNING, (Demand(gpus),), owner=owner, holds_since=0.0)
    return job, ServerView(f"of-{name}", ServerState.READY, (Allocation("small", Demand(gpus)),), (name,))


def asked(jobs: list[JobView], *, servers: Any = (), quota: Quota | None = None, most: int = 1000) -> list[float]:
    policy = Policy(quota=quota or Quota(), node_types=(EIGHT,))
    snapshot = Snapshot(100.0, [SMALL], jobs, servers, policy=policy)
    return [demand.gpus for demand in wanted(snapshot, plan(snapshot), most)]


def test_what_runs_and_what_waits_is_asked_for_together() -> None:
    job, server = running("r", 2)
    assert asked([job, queued("a", 4), queued("b", 1)], servers=[server]) == [4, 2, 1]


def test_with_nobody_waiting_nothing_is_asked_for_so_that_nodes_can_go() -> None:
    job, server = running("r", 2)
    assert asked([job], servers=[server]) == []
    assert asked([queued("starts-at-once", 2)]) == []


def test_a_job_that_no_node_could_ever_hold_asks_for_nothing() -> None:
    assert asked([queued("huge", 16)]) == []
    assert asked([queued("huge", 16), queued("fits", 8)]) == [8]


def test_a_job_over_its_owners_quota_asks_for_nothing_and_others_do() -> None:
    job, server = running("r", 2)
    waiting = [queued("mine", 2), queued("theirs", 3, owner="bob"), queued("theirs-too", 2, owner="bob")]
    assert asked([job, *waiting], servers=[server], quota=Quota(gpus=3)) == [3, 2]


def test_a_gang_is_asked_for_whole_or_not_at_all_and_nobody_overtakes_it() -> None:
    gang = queued("gang", 8, 8, 8)
    assert asked([gang]) == [8, 8, 8]
    assert asked([gang, queued("later", 8)], most=3) == [8, 8, 8]
    assert asked([gang, queued("later", 8)], most=2) == []
    assert asked([queued("first", 8), gang, queued("later", 8)], most=2) == [8]


@given(
    st.lists(st.lists(st.sampled_from([0.5, 1, 2, 4, 8, 16]), min_size=1, max_size=4), max_size=12),
    st.integers(min_value=0, max_value=20),
)
def test_requests_are_bounded_and_hold_whole_jobs_only(gangs: list[list[float]], most: int) -> None:
    jobs = [queued(f"job-{number}", *gpus) for number, gpus in enumerate(gangs)]
    policy = Policy(node_types=(EIGHT,))
    snapshot = Snapshot(0.0, [], jobs, policy=policy)
    bundles = wanted(snapshot, plan(snapshot), most)
    assert len(bundles) <= most
    assert max(bundles, default=Demand()) <= Demand(8)
    assert bundles == wanted(snapshot, plan(snapshot), most)
    feasible = [gpus for gpus in gangs if max(gpus) <= 8]
    if sum(map(len, feasible)) <= most:
        assert Counter(demand.gpus for demand in bundles) == Counter(one for gpus in feasible for one in gpus)


async def test_the_autoscaler_hears_of_changes_only_and_again_after_a_failure() -> None:
    heard: list[tuple[Demand, ...]] = []
    failing = False

    async def request(bundles: Any) -> None:
        heard.append(tuple(bundles))
        if failing:
            raise TimeoutError

    growth = Growth(request)
    await growth.ask()
    assert heard == [()]  # whatever an earlier scheduler asked for is withdrawn
    for bundles in [(Demand(8),), (Demand(8),), ()]:
        growth.want(bundles)
        await growth.ask()
    assert heard == [(), (Demand(8),), ()]
    failing = True
    growth.want((Demand(4),))
    with pytest.raises(TimeoutError):
        await growth.ask()
    failing = False
    growth.want(())
    await growth.ask()
    assert heard[-2:] == [(Demand(4),), ()]  # that may have been heard, so it is taken back


@pytest.fixture
def growing(world: Any) -> Any:
    """The scheduler of a cluster to which nodes with 8 GPUs can be added."""
    fields = {**world.settings.model_dump(), "autoscale": True, "node_types": [{"gpus": 8, "max": 2}]}
    world.settings = Settings(**fields)
    return world


async def test_a_job_for_a_node_that_is_not_there_yet_is_accepted_waits_in_words_and_runs_on_it(growing: Any) -> None:
    await growing.crash()
    growing.boot()
    with pytest.raises(ConfigError, match="largest node of this cluster has 8 GPUs"):
        await growing.interactive(resources={"gpus": 9})
    job = await growing.interactive(resources={"gpus": 4})
    await growing.until(lambda: growing.launcher.requested[-1:] == [(Demand(4),)])
    job = await growing.service.job("admin", job["id"])
    assert (job["state"], job["waiting_for"]) == ("QUEUED", "needs 4 GPUs on one node; waits for a node to be added")
    growing.launcher.cluster.append(Node("n2", "added", gpus=8, cpu_slots=0))
    await growing.reach(job, "RUNNING")
    await growing.until(lambda: growing.launcher.requested[-1] == ())
    assert len(growing.launcher.requested) == 3  # nothing, the node, nothing


async def test_a_job_that_waits_for_another_one_is_told_that_a_node_may_come_first(growing: Any) -> None:
    await growing.crash()
    growing.boot()
    growing.launcher.cluster.append(Node("n2", "there", gpus=8, cpu_slots=0))
    first = await growing.reach(await growing.interactive(resources={"gpus": 8}), "RUNNING")
    second = await growing.interactive(resources={"gpus": 8})
    await growing.until(lambda: growing.launcher.requested[-1:] == [(Demand(8), Demand(8))])
    waits = (await growing.service.job("admin", second["id"]))["waiting_for"]
    assert waits.endswith(f"after {first['id']}, which has no time limit, unless a node is added before")
    growing.launcher.cluster.append(Node("n3", "the second and last of its kind", gpus=8, cpu_slots=0))
    await growing.reach(second, "RUNNING")
    third = await growing.interactive(resources={"gpus": 8})
    await growing.settle()
    assert "node is added" not in (await growing.service.job("admin", third["id"]))["waiting_for"]


async def test_without_the_setting_nobody_is_asked_for_nodes(world: Any) -> None:
    with pytest.raises(ConfigError, match="the largest node of this cluster has 0 GPUs"):
        await world.interactive(resources={"gpus": 4})
    await world.interactive()
    await world.interactive()
    await world.settle()
    assert world.launcher.requested == []


async def test_looking_at_the_cluster_keeps_no_idle_node_from_going(growing: Any) -> None:
    """A node on which Ray runs anything, be it a question about its GPUs, is no idle one."""
    await growing.crash()
    growing.boot()
    growing.launcher.cluster += [Node("n2", "idle", gpus=8, cpu_slots=0), Node("n3", "busy", gpus=8, cpu_slots=0)]
    await growing.service.cluster("admin")
    assert growing.launcher.asked_for_use == [set()]
    job = await growing.reach(await growing.interactive(resources={"gpus": 8}), "RUNNING")
    growing.service._gpu_use._until = 0.0
    await growing.service.cluster("admin")
    (server,) = growing.launcher.servers.values()
    assert (server.job_id, growing.launcher.asked_for_use[-1]) == (job["id"], {server.node_id})
