"""Run them with `python -m pytest`, in this folder."""

import opentinker as ot
from opentinker.env.checks import CheckOptions, check_environment
from opentinker.env.templates.multi import NewEnvironment


def test_the_contract_is_kept() -> None:
    report = check_environment(NewEnvironment, options=CheckOptions(episodes=100))
    assert report.ok, str(report)


def test_replies_are_true_and_a_find_ends_the_episode() -> None:
    environment = NewEnvironment()
    environment.reset({"number": 20})
    texts = ["10", "30", "what?", "20"]
    results = [environment.step(ot.Action(text)) for text in texts]
    replies = [result.observation for result in results]
    assert replies == ["Higher.", "Lower.", "That is no number.", ""]
    assert [result.done for result in results] == [False, False, False, True]
    assert results[-1].reward == {"found": 1.0, "speed": 0.25}


def test_the_last_guess_ends_the_episode() -> None:
    environment = NewEnvironment(max_guesses=2)
    environment.reset({"number": 20})
    assert [environment.step(ot.Action("1")).done for _ in range(2)] == [False, True]
