"""Run them with `python -m pytest`, in this folder."""

import opentinker as ot
from opentinker.env.checks import CheckOptions, check_environment
from opentinker.env.templates.tools import NewEnvironment

ARGUMENTS = '{"article": "apple"}'
CALL = f'<tool_call>{{"name": "price", "arguments": {ARGUMENTS}}}</tool_call>'


def test_the_contract_is_kept() -> None:
    report = check_environment(NewEnvironment, options=CheckOptions(episodes=100))
    assert report.ok, str(report)


def test_a_price_is_looked_up_and_the_sum_earns_one() -> None:
    environment = NewEnvironment()
    environment.reset({"basket": {"apple": 2, "eggs": 1}})
    looked_up = environment.step(ot.Action(CALL))
    assert looked_up.observation == [{"role": "tool", "content": "3"}]
    assert not looked_up.done
    answered = environment.step(ot.Action("11"))
    assert answered.done
    assert answered.reward == {"correct": 1.0}


def test_a_malformed_call_is_answered_by_what_is_wrong() -> None:
    environment = NewEnvironment()
    environment.reset({"basket": {"apple": 2, "eggs": 1}})
    result = environment.step(ot.Action(CALL.replace("price", "prize")))
    assert result.reward == {"malformed": -0.05}
    assert "there is no tool 'prize'" in str(result.observation)
