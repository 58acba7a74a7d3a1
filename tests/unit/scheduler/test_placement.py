from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.config.base import parse_config
from opentinker.config.resources import Resources, RoleResources
from opentinker.config.server import ServerConfig
from opentinker.errors import ConfigError
from opentinker.scheduler.placement import (
    Allocation,
    Demand,
    Node,
    demand_of,
    free_on,
    parse_groups,
    roles_of,
    server_config,
    threads_for,
)
from opentinker.scheduler.plan import JobView
from opentinker.scheduler.queueing import schedule
from opentinker.scheduler.quotas import check_quota, policy_of
from opentinker.scheduler.settings import Quota, Settings
from opentinker.scheduler.states import JobState

clusters = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=5).map(
    lambda sizes: [Node(f"n{i}", f"n{i}", gpus, slots) for i, (gpus, slots) in enumerate(sizes)]
)


@given(clusters, st.one_of(st.none(), st.sampled_from([0.25, 0.5]), st.integers(0, 9)))
def test_an_accepted_demand_fits_an_empty_cluster(nodes: list[Node], gpus: float | None) -> None:
    try:
        demand = demand_of(Resources(gpus=gpus), nodes)
    except ConfigError:
        return
    assert schedule(nodes, [], [JobView("j", JobState.QUEUED, (demand,))]).starts


def test_without_a_wish_a_job_takes_a_gpu_where_there_is_one() -> None:
    assert demand_of(Resources(), [Node("a", "a", 0, 2), Node("b", "b", 4, 0)]) == Demand(gpus=1)
    assert demand_of(Resources(), [Node("a", "a", 0, 2)]) == Demand(cpu_slots=1)
    assert demand_of(Resources(gpus=0), [Node("b", "b", 4, 1)]) == Demand(cpu_slots=1)
    assert demand_of(Resources(gpus=0.25), [Node("b", "b", 4, 1)]) == Demand(gpus=0.25)


def test_each_rank_of_a_trainer_has_a_gpu_or_a_cpu_slot() -> None:
    assert demand_of(Resources(), [Node("b", "b", 4, 0)], ranks=2) == Demand(gpus=2)
    assert demand_of(Resources(gpus=4), [Node("b", "b", 4, 0)], ranks=2) == Demand(gpus=4)
    assert demand_of(Resources(), [Node("a", "a", 0, 2)], ranks=2) == Demand(cpu_slots=2)
    assert demand_of(Resources(gpus=0), [Node("b", "b", 4, 2)], ranks=2) == Demand(cpu_slots=2)
    for nodes in ([Node("a", "a", 0, 2)], [Node("b", "b", 2, 4)]):
        with pytest.raises(ConfigError, match=r"3 (GPUs|CPU slots) on one node") as caught:
            demand_of(Resources(), nodes, ranks=3)
        assert "lower trainer.ranks" in caught.value.hint


def test_parts_of_an_engine_take_the_gpus_of_the_ranks_and_share_the_threads_of_their_cpu_slots() -> None:
    gpus, slots = [Node("b", "b", 4, 0)], [Node("a", "a", 0, 2)]
    for ranks, parts in ((2, 2), (4, 2), (2, 4), (1, 4)):
        assert demand_of(Resources(), gpus, ranks=ranks, parts=parts) == Demand(gpus=max(ranks, parts))
    assert demand_of(Resources(), slots, ranks=2, parts=2) == Demand(cpu_slots=2)
    assert demand_of(Resources(gpus=0), slots, ranks=1, parts=4) == Demand(cpu_slots=1)
    for ranks, parts, keys in (
        (1, 8, "lower engine.tensor_parallel"),
        (8, 1, "lower trainer.ranks"),
        (8, 2, "lower trainer.ranks and engine.tensor_parallel"),
    ):
        with pytest.raises(ConfigError, match="8 GPUs on one node") as caught:
            demand_of(Resources(), gpus, ranks=ranks, parts=parts)
        assert caught.value.hint == keys
    with pytest.raises(ConfigError, match="8 GPUs on one node") as caught:
        demand_of(Resources(gpus=8), gpus, ranks=2, parts=2)
    assert "lower resources.gpus" in caught.value.hint


def test_a_job_that_can_never_fit_is_refused_with_the_largest_node() -> None:
    with pytest.raises(ConfigError, match="3 GPUs on one node; the largest node of this cluster has 2 GPUs"):
        demand_of(Resources(gpus=3), [Node("a", "a", 2, 0), Node("b", "b", 2, 0)])


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"gpus": 1.5}, "more than one GPU must be a whole number"),
        ({"gpus": -1}, "greater than or equal to 0"),
        ({"gpus": 0.001}, "less than the smallest share"),
        ({"gpus": float("inf")}, "finite"),
        ({"gpus": 1e9}, "less than or equal to 100000"),
        ({"trainer": {"gpus": 1}}, "trainer can only be sized with layout 'split'"),
        ({"layout": "split", "gpus": 2, "trainer": {}, "rollout": {}}, "not gpus"),
        ({"layout": "split", "trainer": {"gpus": -1}, "rollout": {}}, "greater than or equal to 0"),
    ],
)
def test_absurd_resources_are_refused_in_words(resources: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(Resources, resources)


def test_roles_of_the_split_layout_are_bundles_of_their_own() -> None:
    split = Resources(layout="split", trainer=RoleResources(gpus=8, replicas=2), rollout=RoleResources(gpus=4))
    assert roles_of(split, []) == (("trainer", Demand(8)), ("trainer", Demand(8)), ("rollout", Demand(4)))
    ((_, colocated),) = roles_of(Resources(gpus=8), [])
    assert colocated == Demand(8)


@dataclass
class User:
    name: str
    share: float = 1.0
    max_gpus: float | None = None
    max_jobs: int | None = None


def test_what_is_kept_of_a_user_comes_before_the_settings(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=tmp_path,
        runs_dir=tmp_path,
        quota=Quota(gpus=4, jobs=2),
        quotas={"ann": Quota(gpus=8), "bob": Quota(gpus=1)},
        shares={"ann": 3.0, "bob": 2.0},
    )
    policy = policy_of(settings, [User("ann"), User("bob", share=5.0, max_gpus=16.0), User("cy", max_jobs=7)])
    assert [policy.quota_of(name) for name in ("ann", "bob", "cy", "dan")] == [
        Quota(gpus=8),
        Quota(gpus=16),
        Quota(gpus=4, jobs=7),
        Quota(gpus=4, jobs=2),
    ]
    assert policy.shares == {"ann": 3.0, "bob": 5.0}


def test_what_no_waiting_could_change_is_refused_at_once() -> None:
    check_quota(Quota(gpus=4, jobs=1, max_priority=0), Demand(4), 0)
    with pytest.raises(ConfigError, match="asks for 8 GPUs; your quota is 4 GPUs"):
        check_quota(Quota(gpus=4), Demand(8), 0)
    with pytest.raises(ConfigError, match="lets no job run"):
        check_quota(Quota(jobs=0), Demand(1), 0)
    with pytest.raises(ConfigError, match="priority: 3 is above your highest, 0"):
        check_quota(Quota(max_priority=0), Demand(1), 3)


def test_the_engine_of_a_shared_gpu_takes_its_part_of_the_share() -> None:
    config = ServerConfig(base_model="m")
    assert server_config(config, Demand(0.5)).engine.memory_fraction == config.engine.memory_fraction / 2
    assert server_config(config, Demand(2)) is config


def test_a_label_names_the_groups_of_gpus_or_nothing() -> None:
    assert parse_groups("0-3.4-7") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert parse_groups("0-1") == ((0, 1),)
    for nonsense in ("", "0", "a-b", "0-3,4-7", "0-3.", "-1-3"):
        assert parse_groups(nonsense) == ()


def test_free_room_is_counted_with_fractions() -> None:
    held = [
        Allocation("a", Demand(0.25)),
        Allocation("a", Demand(2)),
        Allocation("b", Demand(9)),
        Allocation("gone", Demand(1)),
    ]
    assert free_on([Node("a", "a", 4, 1), Node("b", "b", 8, 0)], held) == {"a": Demand(1.75, 1), "b": Demand(0, 0)}


def test_cores_are_shared_out_among_slots() -> None:
    assert threads_for(Node("a", "a", 0, 1, cpus=2), Demand(cpu_slots=1)) == 2
    assert threads_for(Node("a", "a", 0, 4, cpus=2), Demand(cpu_slots=1)) == 1
    assert threads_for(Node("a", "a", 8, 0, cpus=64), Demand(gpus=2)) == 16
    assert threads_for(Node("a", "a", 2, 0, cpus=64), Demand(gpus=0.25)) == 8
