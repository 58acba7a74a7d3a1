"""Run them with `python -m pytest`, in this folder."""

import opentinker as ot
from opentinker.env.checks import CheckOptions, check_environment
from opentinker.env.templates.dataset import NewEnvironment


def test_the_contract_is_kept() -> None:
    report = check_environment(NewEnvironment, options=CheckOptions(episodes=100))
    assert report.ok, str(report)


def test_the_answer_counts_and_its_form_a_little() -> None:
    for text, reward in (
        ("<answer>Paris</answer>", 1.0),
        ("<answer>Rome</answer>", 0.1),
        ("Paris", 0.0),
    ):
        environment = NewEnvironment()
        environment.reset({"question": "The capital of France?", "answer": "Paris"})
        result = environment.step(ot.Action(text))
        assert result.done
        assert isinstance(result.reward, dict)
        assert sum(result.reward.values()) == reward
