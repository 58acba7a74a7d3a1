"""Which past version plays which games: weights, draws, who stays, and results."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.config.opponents import PoolConfig
from opentinker.errors import CheckpointError
from opentinker.multiagent.league import Member, Pool, result_of, results
from opentinker.rollout.types import Termination


def config(**fields: Any) -> PoolConfig:
    return PoolConfig.model_validate({"of": "black"} | fields)


configs = st.builds(
    config,
    strategy=st.sampled_from(["latest", "uniform", "pfsp"]),
    weighting=st.sampled_from(["hard", "variance"]),
    power=st.floats(0.1, 10),
    prior_games=st.floats(0, 20),
    slots=st.integers(1, 4),
    size=st.integers(1, 6),
)
members = st.builds(
    lambda step, games, share: Member(f"pool-{step}", step, games, games * share),
    st.integers(0, 10**6),
    st.integers(0, 1000),
    st.floats(0, 1),
)
pools = st.lists(members, min_size=1, max_size=8, unique_by=lambda m: m.step).map(lambda found: Pool(tuple(found)))


@given(pools, configs)
def test_weights_are_chances(pool: Pool, config: PoolConfig) -> None:
    weights = pool.weights(config)
    assert len(weights) == len(pool.members)
    assert min(weights) >= 0
    assert sum(weights) == pytest.approx(1.0)


@given(pools, configs, st.integers(1, 30), st.integers(0, 2**31))
def test_a_draw_is_its_seeds_alone_and_no_more_members_than_slots(
    pool: Pool, config: PoolConfig, groups: int, seed: int
) -> None:
    drawn = pool.draw(config, groups, seed)
    assert drawn == pool.draw(config, groups, seed) == Pool.from_json(pool.to_json()).draw(config, groups, seed)
    assert len(drawn) == groups
    assert set(drawn) <= set(pool.members)
    assert len(set(drawn)) <= config.slots
    if config.strategy == "latest":
        assert set(drawn) == {pool.members[-1]}


@given(st.integers(1, 6), st.integers(1, 20))
def test_the_first_and_the_newest_stay_as_long_as_there_is_room(size: int, entering: int) -> None:
    pool = Pool()
    for step in range(entering):
        pool = pool.enter(Member(f"m{step}", step), size)
    steps = [member.step for member in pool.members]
    assert len(steps) == min(size, entering)
    assert steps == sorted(steps)
    assert steps[-1] == entering - 1
    if size > 1:
        assert steps[0] == 0
        assert steps[1:] == list(range(entering - len(steps) + 1, entering))


def lost(rate: float, games: int = 10**6) -> Member:
    return Member(f"loses {rate}", int(rate * 100), games, rate * games)


def test_pfsp_weighs_by_how_hard_a_member_is() -> None:
    pool = Pool((lost(0.2), lost(0.5), lost(0.9)))
    hard = pool.weights(config(strategy="pfsp", power=2, prior_games=0))
    assert hard == pytest.approx([x / 0.9 for x in (0.64, 0.25, 0.01)])
    even = pool.weights(config(strategy="pfsp", weighting="variance", prior_games=0))
    assert even == pytest.approx([x / 0.5 for x in (0.16, 0.25, 0.09)])
    assert pool.weights(config(strategy="uniform")) == pytest.approx([1 / 3] * 3)


def test_whoever_always_loses_is_drawn_like_the_others_if_all_do() -> None:
    pool = Pool((lost(1.0), Member("also", 5, 10, 10.0)))
    assert pool.weights(config(strategy="pfsp", prior_games=0)) == [0.5, 0.5]


def test_a_new_member_counts_as_even_and_few_games_say_little() -> None:
    assert Member("new", 3).loss_rate(4) == Member("new", 3).loss_rate(0) == 0.5
    assert Member("once", 3, 1, 1.0).loss_rate(4) == pytest.approx(0.6)
    assert lost(1.0).loss_rate(4) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_every_group_gets_a_member_with_the_chance_of_its_weight_however_few_the_slots(slots: int) -> None:
    pool = Pool((lost(0.2), lost(0.5), lost(0.9)))
    wanted = pool.weights(config(strategy="pfsp", prior_games=0))
    draws = 4000
    for group in (0, 4):
        found = Counter(
            pool.draw(config(strategy="pfsp", prior_games=0, slots=slots), 5, seed)[group].step for seed in range(draws)
        )
        for member, weight in zip(pool.members, wanted, strict=True):
            assert found[member.step] / draws == pytest.approx(weight, abs=4 * (weight * (1 - weight) / draws) ** 0.5)


def test_games_are_counted_for_who_played_them() -> None:
    pool = Pool((Member("a", 0), Member("b", 10))).played("b", [1.0, 0.5, 0.0]).played("b", []).played("a", [1.0])
    assert pool.members == (Member("a", 0, 1, 1.0), Member("b", 10, 3, 1.5))


def episode(reward: float, member: int = 0, termination: Termination = Termination.DONE, **metrics: float) -> Any:
    return SimpleNamespace(reward=reward, member=member, termination=termination, metrics=metrics)


def test_who_won_is_what_the_environment_says_and_otherwise_who_earned_more() -> None:
    assert [result_of(episode(x), episode(0.5)) for x in (1.0, 0.5, 0.0)] == [1.0, 0.5, 0.0]
    assert result_of(episode(-2.0, won=1.0, lost=0.0), episode(5.0)) == 1.0
    assert result_of(episode(2.0, won=0.0, lost=1.0), episode(-5.0)) == 0.0
    assert result_of(episode(2.0, won=0.0, lost=0.0), episode(-5.0)) == 0.5


def test_only_games_that_both_ended_count() -> None:
    broken = episode(1.0, 2, Termination.ERROR_ENV)
    mine = {"black": [episode(1.0, 0), episode(1.0, 1), episode(1.0, 2)], "red": [episode(0.0, 0)]}
    assert results(mine, [episode(0.0, 0), broken]) == [1.0, 0.5]


@pytest.mark.parametrize("state", [None, 3, [{"step": 1}], [{"checkpoint": "a", "step": 1, "elo": 2}]])
def test_a_state_that_is_none_says_so(state: Any) -> None:
    with pytest.raises(CheckpointError, match="state of a pool cannot be read"):
        Pool.from_json(state)
