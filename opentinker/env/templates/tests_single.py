"""Run them with `python -m pytest`, in this folder."""

import opentinker as ot
from opentinker.env.checks import CheckOptions, check_environment
from opentinker.env.templates.single import NewEnvironment


def test_the_contract_is_kept() -> None:
    report = check_environment(NewEnvironment, options=CheckOptions(episodes=100))
    assert report.ok, str(report)


def test_the_right_product_earns_one_and_another_nothing() -> None:
    for text, reward in (("42", 1.0), ("It is 42.", 1.0), ("41", 0.0), ("", 0.0)):
        environment = NewEnvironment()
        environment.reset({"a": 6, "b": 7})
        result = environment.step(ot.Action(text))
        assert result.done
        assert result.reward == reward
