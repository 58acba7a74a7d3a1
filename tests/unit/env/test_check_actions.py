"""What the checks say: the same each time, and tool calls as their schemas ask for them."""

from itertools import islice
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opentinker.env.checks.actions import ActionScripts, tool_call
from opentinker.env.environment import Environment
from opentinker.env.parsing import tool_calls
from opentinker.environments.arithmetic import Arithmetic

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
LEAVES = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean", "array", "object")]),
    st.builds(lambda values: {"type": "string", "enum": values}, st.lists(NAMES, min_size=1, max_size=3)),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(-5, 5), st.integers(0, 9)
    ),
    st.just({"type": "array", "items": {"type": "number"}, "minItems": 2}),
)


@st.composite
def tools(draw: st.DrawFn) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, LEAVES, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": draw(NAMES), "description": "x", "parameters": parameters}}


@given(tools(), st.integers(0, 1000))
def test_a_tool_call_is_one_that_the_schema_allows(tool: dict[str, Any], seed: int) -> None:
    said = tool_calls(tool_call(tool, Random(seed)), [tool])
    assert said.errors == []
    (call,) = said.calls
    assert call.name == tool["function"]["name"]
    assert set(tool["function"]["parameters"]["required"]) <= set(call.arguments)


@given(st.integers(0, 1000), st.lists(tools(), max_size=2))
def test_the_same_seed_says_the_same_and_good_episodes_begin_as_suggested(seed: int, given_tools: list[Any]) -> None:
    scripts = ActionScripts(Arithmetic)
    for say in (scripts.plausible, scripts.hostile):
        one, other = (list(islice(say(seed, given_tools), 60)) for _ in range(2))
        assert one == other
    assert next(scripts.good(scripts.suggested({"a": 3, "b": 4}), seed, given_tools)).text == "7"


def test_senseless_actions_are_empty_huge_and_broken() -> None:
    texts = [action.text for action in islice(ActionScripts(Environment).hostile(0, ()), 60)]
    assert "" in texts
    assert max(map(len, texts)) >= 1_000_000
    assert any(tool_calls(text).errors for text in texts)
