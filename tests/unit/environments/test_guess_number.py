"""Higher and lower are told truthfully, searching well pays, and held-out numbers are never drawn."""

import pytest

from opentinker.env.environment import Action, StepResult
from opentinker.environments.guess_number import HELD_OUT, TRAINING, GuessNumber


def play(guesses: list[str], number: int = 7, low: int = 1) -> list[StepResult]:
    environment = GuessNumber()
    environment.reset({"low": low, "number": number})
    return [environment.step(Action(guess)) for guess in guesses]


def test_held_out_tasks_are_never_drawn_but_every_number_is_found_in_training() -> None:
    held_out = {(t["low"], t["number"]) for t in GuessNumber.held_out_tasks()}
    drawn = {(t["low"], t["number"]) for t in map(GuessNumber.make_task, range(5000))}
    assert held_out == set(HELD_OUT)
    assert drawn == set(TRAINING)
    assert len(held_out) == 20
    assert not held_out & drawn
    assert {number for _, number in held_out} <= {number for _, number in drawn}


def test_the_range_is_told_and_replies_are_true() -> None:
    first = GuessNumber().reset({"low": 3, "number": 7})
    assert first[-1]["content"].endswith("between 3 and 12.")
    assert [r.observation for r in play(["5", "9", "I say 6!", "hm", "7"])] == [
        "Higher.",
        "Lower.",
        "Higher.",
        "Answer with a number.",
        "Correct!",
    ]


def test_a_find_ends_the_episode_and_pays_more_the_sooner_it_is() -> None:
    totals = []
    for guesses in (["7"], ["5", "7"], ["5", "8", "7"]):
        results = play(guesses)
        assert [r.done for r in results] == [False] * (len(guesses) - 1) + [True]
        assert results[-1].metrics == {"exact": 1.0, "guesses": len(guesses)}
        totals.append(sum(r.reward for r in results))
    assert totals[0] == 1.0
    assert totals == sorted(totals, reverse=True)


def test_only_guesses_that_the_replies_allow_earn_a_part() -> None:
    rewards = [r.reward for r in play(["5", "4", "11", "9", "hm"])]
    assert rewards == pytest.approx([0.05, 0, 0, 0.05, 0])


def test_the_last_guess_ends_the_episode() -> None:
    results = play(["1", "2", "3", "4", "5", "6"])
    assert [r.done for r in results] == [False] * 5 + [True]
    assert results[-1].metrics == {"exact": 0.0, "guesses": 6.0}
    assert sum(r.reward for r in results) < 0.5
