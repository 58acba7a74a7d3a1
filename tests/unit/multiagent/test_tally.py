"""What results say: intervals that cover, ratings on one scale; and who meets whom."""

import json
import math
import random
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.config.arena import ArenaConfig
from opentinker.multiagent.arena import ELO_PER_NAT
from opentinker.multiagent.matches import matches, spread
from opentinker.multiagent.tally import Met, Tally, met, results_to_json
from opentinker.server.keeping import MAX_DRIVER_BYTES, driver_json


def both(name: str, other: str, scores: list[float]) -> dict[tuple[str, str], Met]:
    return {(name, other): met(scores), (other, name): met([1 - score for score in scores])}


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=60))
def test_an_interval_of_scores_holds_the_mean_and_is_never_empty(scores: list[float]) -> None:
    tally = Tally(both("a", "b", scores), won=True)
    mine, theirs = tally.estimate("a", "b"), tally.estimate("b", "a")
    assert mine is not None
    assert theirs is not None
    assert 0 <= mine.low <= mine.mean <= mine.high <= 1
    assert mine.high - mine.low > 0, "also where every game was won"
    assert (theirs.mean, theirs.low, theirs.high) == pytest.approx((1 - mine.mean, 1 - mine.high, 1 - mine.low))
    assert tally.estimate("a", "c") is None


def test_intervals_cover_what_is_true_in_about_95_of_100_cases() -> None:
    numbers, held = np.random.default_rng(0), {True: 0, False: 0}
    for _ in range(1000):
        scores = (numbers.random(40) < 0.7).astype(float).tolist()
        for won in held:
            estimate = Tally({("a", "b"): met(scores)}, won=won).estimate("a", "b")
            assert estimate is not None
            held[won] += estimate.low <= 0.7 <= estimate.high
    assert all(920 <= count <= 980 for count in held.values()), held


def test_ratings_are_on_one_scale_and_their_intervals_cover_the_truth() -> None:
    """A chain: who never met is compared by those between them."""
    truth = {"random": 0.0, "a@0": 50.0, "a@10": 150.0, "a@20": 300.0}
    numbers, held = np.random.default_rng(1), 0
    for _ in range(200):
        tally = Tally(won=True)
        for name, other in pairwise(truth):
            chance = 1 / (1 + math.exp((truth[other] - truth[name]) / ELO_PER_NAT))
            tally.add(both(name, other, (numbers.random(200) < chance).astype(float).tolist()))
        rating = tally.ratings("random")
        assert rating["random"].mean == rating["random"].low == rating["random"].high == 0.0
        held += rating["a@20"].low <= 300.0 <= rating["a@20"].high
    assert 180 <= held <= 199, held


def test_who_is_not_linked_to_the_anchor_has_a_rating_without_an_interval() -> None:
    tally = Tally({**both("a", "b", [1.0, 0.0]), **both("c", "d", [1.0, 1.0])}, won=True)
    rating = tally.ratings("a")
    assert math.isinf(rating["c"].high)
    assert math.isfinite(rating["b"].high)
    assert tally.ratings("nobody") == {}
    assert Tally(tally.results, won=False).ratings("a") == {}, "rewards are no scores"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.floats(-5, 5)), max_size=30))
def test_games_that_are_counted_piece_by_piece_count_as_those_that_are_counted_at_once(rows) -> None:
    whole, parts = Tally(won=False), Tally(won=False)
    for name, other, value in rows:
        parts.add({(name, other): met([value])})
        parts = Tally.from_json(json.loads(json.dumps(parts.to_json())))
    for pair in {(name, other) for name, other, _ in rows}:
        whole.add({pair: met([value for name, other, value in rows if (name, other) == pair])})
    for pair, found in whole.results.items():
        assert parts.results[pair].games == found.games
        assert parts.results[pair].mean == pytest.approx(found.mean)
        one, other = whole.estimate(*pair), parts.estimate(*pair)
        assert one is not None
        assert other is not None
        assert other.high == pytest.approx(one.high, abs=1e-6)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"), st.lists(st.floats(-5, 5), min_size=1)), max_size=12),
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"), st.lists(st.sampled_from([0, 0.25, 0.5, 1])))),
)
def test_what_a_checkpoint_holds_of_results_gives_them_back_exactly(rewards, scores) -> None:
    tally = Tally(won=True)
    for name, other, values in rewards:
        tally.add({(name, other): met(values)})
    for name, other, values in scores:
        tally.add(both(name, other, values))
    again = Tally.from_json(json.loads(json.dumps(tally.to_json())))
    assert again.results == tally.results
    assert again.names == tally.names, "in the order in which they came, as the first has the rating 0"
    older = {"won": True, "results": results_to_json(tally.results)}
    assert Tally.from_json(json.loads(json.dumps(older))).results == tally.results


@pytest.mark.parametrize(("agents", "every"), [(("black", "white"), 10), (("a", "b", "c", "d", "e", "f"), 40)])
def test_what_a_long_run_has_played_fits_into_a_checkpoint(agents: tuple[str, ...], every: int) -> None:
    """4000 steps, with two reference players and what `arena.past` is by default."""
    tally, numbers, steps = Tally(won=True), random.Random(0), list[int]()
    for step in range(0, 4000, every):
        now = [f"{name}@{step}" for name in agents]
        others = ["random", "careful", *(f"{name}@{when}" for when in spread(steps, ArenaConfig().past) for name in agents)]
        for name, other in [*combinations(now, 2), *product(now, others)]:
            score = float(numbers.randint(20, 44))
            tally.add({(name, other): Met(score, score, 64), (other, name): Met(64 - score, 64 - score, 64)})
        steps.append(step)
    text = driver_json({"agents": {"arena": {**tally.to_json(), "steps": steps}}})
    assert text is not None
    assert len(text) < MAX_DRIVER_BYTES / 8
    assert Tally.from_json(json.loads(text)["agents"]["arena"]).results == tally.results


def test_the_worst_is_the_lowest_mean() -> None:
    tally = Tally({**both("a", "random", [1.0, 1.0]), **both("a", "careful", [0.0, 1.0])}, won=True)
    worst = tally.worst("a", ["random", "careful", "never met"])
    assert worst is not None
    assert (worst[0], worst[1].mean) == ("careful", 0.5)
    assert tally.worst("a", ["never met"]) is None


def everywhere(name: str, seats: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    return name, dict.fromkeys(seats, name)


@given(
    st.integers(2, 4),
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from("abcdefgh"), max_size=5, unique=True),
)
def test_everybody_meets_every_other_once_in_each_seat(count: int, players: list[str], others: list[str]) -> None:
    seats = tuple(f"seat{i}" for i in range(count))
    found = matches(seats, dict.fromkeys(players, seats), [everywhere(name, seats) for name in others])
    arrangements = [tuple(match.seating.values()) for match in found]
    assert len(arrangements) == len(set(arrangements))
    for player in players:
        for other in others:
            seated = [m for m in found if {player, other} == set(m.seating.values())]
            counted = [s for m in seated for s, name, against in m.scored if (name, against) == (player, other)]
            assert sorted(counted) == (sorted(seats) if player != other else []), "each seat once"
    for match in found:
        for seat, name, _ in match.scored:
            assert match.seating[seat] == name


def test_in_own_seats_a_policy_meets_the_versions_of_the_other_seats() -> None:
    seats = ("black", "white")
    homes = {"black@9": ["black"], "white@9": ["white"]}
    now = {"black": "black@9", "white": "white@9"}
    first = {"black": "black@0", "white": "white@0"}
    found = matches(seats, homes, [("now", now), ("step 0", first), everywhere("random", seats)])
    assert [tuple(m.seating.values()) for m in found] == [
        ("black@9", "white@9"),
        ("black@9", "white@0"),
        ("black@9", "random"),
        ("black@0", "white@9"),
        ("random", "white@9"),
    ]
    assert found[1].scored == (("black", "black@9", "white@0"), ("white", "white@0", "black@9"))
    three = ("ann", "bob", "eve")
    cast = {name: f"{name}@0" for name in three}
    [match] = matches(three, {"bob@9": ["bob"]}, [("step 0", cast)])
    assert match.scored == (("bob", "bob@9", "step 0"),), "several opponents have their cast's name"


@given(st.lists(st.integers(0, 1000), unique=True, max_size=30).map(sorted), st.integers(0, 6))
def test_earlier_meetings_are_spread_from_the_first_to_the_last(steps: list[int], count: int) -> None:
    chosen = spread(steps, count)
    assert len(chosen) == min(len(steps), count)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(steps)
    if count and steps:
        assert chosen[0] == steps[0]
    if count > 1 and steps:
        assert chosen[-1] == steps[-1]


def test_a_rating_does_not_depend_on_the_order_of_the_games() -> None:
    games = [("a", "b", 1.0), ("b", "c", 0.5), ("a", "c", 1.0), ("a", "b", 0.0)]
    ratings = []
    for seed in range(3):
        random.Random(seed).shuffle(games)
        tally = Tally(won=True)
        for name, other, score in games:
            tally.add(both(name, other, [score]))
        ratings.append(tally.ratings("a"))
    for name in "abc":
        assert {round(rating[name].mean, 6) for rating in ratings} == {round(ratings[0][name].mean, 6)}
