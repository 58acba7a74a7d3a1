"""Tool calls and answers are read in every form that models write; hostile text costs linear time and never raises."""

import json
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.env.parsing import MAX_CALLS, ToolCall, boxed, fenced_code, last_number, outside_code, tagged, tool_calls

PYTHON_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["code"],
        },
    },
}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ToolCall("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', [ToolCall("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("add", {"a": 1})]),
        ('<tool_call>{"type": "function", "function": {"name": "add", "arguments": {}}}</tool_call>', [ToolCall("add", {})]),
        ('I stop before the end <tool_call>{"name": "add", "arguments": {}}', [ToolCall("add", {})]),
        (
            '<tool_call>{"name": "say", "arguments": {"x": "</tool_call>"}}</tool_call>',
            [ToolCall("say", {"x": "</tool_call>"})],
        ),
        ('<tool_call>{"name": "run", "arguments": {"code": "a\nb"}}</tool_call>', [ToolCall("run", {"code": "a\nb"})]),
        ('<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>', [ToolCall("a", {}), ToolCall("b", {})]),
        (
            '<tool_call>{"name": "a"}</tool_call> and <tool_call>{"name": "b"}</tool_call>',
            [ToolCall("a", {}), ToolCall("b", {})],
        ),
        (
            "<tool_call>\n<function=run>\n<parameter=code>\nif x < 2:\n    print(x)\n</parameter>\n"
            "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
            [ToolCall("run", {"code": "if x < 2:\n    print(x)", "n": 3})],
        ),
        ("<function=run><parameter=n>3</parameter></function>", [ToolCall("run", {"n": 3})]),
        ('```json\n{"name": "add", "arguments": {"a": 1}}\n```', [ToolCall("add", {"a": 1})]),
        ('```xml\n<tool_call>{"name": "add"}</tool_call>\n```', [ToolCall("add", {})]),
        ('```json\n{"weather": "fine"}\n```', []),
        ("```python\nprint('<tool_call>')\n```", []),
        ("nothing here", []),
        ("", []),
    ],
)
def test_every_form_of_a_call_is_read(text: str, calls: list[ToolCall]) -> None:
    found = tool_calls(text)
    assert found.calls == calls
    assert found.errors == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<tool_call>{"name": "add", }</tool_call>', "not JSON"),
        ("<tool_call>add(1, 2)</tool_call>", "not JSON"),
        ("<tool_call></tool_call>", "not JSON"),
        ('<tool_call>{"name": "add"', "not closed by </tool_call>"),
        ("<tool_call><function=add><parameter=a>1", "not closed by </function>"),
        ("<tool_call><function=add><parameter=a>1</function></tool_call>", "not closed by </parameter>"),
        ("<function=><parameter=a>1</parameter></function>", "has no name"),
        ('<tool_call>{"arguments": {}}</tool_call>', "has no 'name'"),
        ('<tool_call>{"name": 3}</tool_call>', "has no 'name'"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ('<tool_call>"add"</tool_call>', "must be a JSON object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
        ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "too large"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", "not JSON"),
        ('<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogate"),
        ('```json\n{"name": "a", "arguments": {}\n```', "not JSON"),
    ],
)
def test_a_malformed_call_is_a_short_error_text_for_the_policy(text: str, says: str) -> None:
    found = tool_calls(text + "\nlater")
    assert found.calls == []
    assert len(found.errors) == 1
    assert says in found.errors[0]
    assert len(found.errors[0]) < 500


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    found = tool_calls('<tool_call>{"name": }</tool_call><tool_call>{"name": "b"}</tool_call>')
    assert found.calls == [ToolCall("b", {})]
    assert [e.startswith("Tool call 1 is malformed") for e in found.errors] == [True]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"name": "pyhton", "arguments": {}}, "there is python"),
        ({"name": "python", "arguments": {}}, "needs the argument 'code'"),
        ({"name": "python", "arguments": {"code": 3}}, "must be of type string, not int"),
        ({"name": "python", "arguments": {"code": "", "times": True}}, "must be of type integer, not bool"),
        ({"name": "python", "arguments": {"code": "", "cod": ""}}, "its arguments: code, times"),
    ],
)
def test_with_schemas_names_and_arguments_are_checked(call: dict[str, Any], says: str) -> None:
    found = tool_calls(f"<tool_call>{json.dumps(call)}</tool_call>", tools=[PYTHON_TOOL])
    assert found.calls == []
    assert says in found.errors[0]


def test_with_schemas_the_xml_form_keeps_text_as_text() -> None:
    text = "<tool_call><function=python><parameter=code>1</parameter><parameter=times>2</parameter></function></tool_call>"
    assert tool_calls(text, tools=[PYTHON_TOOL]).calls == [ToolCall("python", {"code": "1", "times": 2})]
    assert tool_calls(text).calls == [ToolCall("python", {"code": 1, "times": 2})]


@given(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1),
    st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), st.integers() | st.text(alphabet='ab\n<>`{}"\\/')),
)
def test_what_a_template_would_write_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    text = "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
    assert tool_calls("thinking\n" + text + "\n").calls == [ToolCall(name, arguments)]


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=a>",
        "</function>",
        "<parameter=b>",
        "</parameter>",
        "```json\n",
        "```\n",
        "```python\n",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "\\boxed{",
        "\\frac{1}{",
        "<answer>",
        "</answer>",
        "1,234",
        "1/",
        "-",
        ".",
        "9",
        " ",
        "\n",
        "e5",
    ),
    *('{"name": "a", "arguments": {}}', '"name" "arguments"', "\\boxed ", "\\fbox{", "```", "x", "é", "−"),
]
READERS = (tool_calls, boxed, last_number, tagged, fenced_code, outside_code)


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text())
def test_no_text_raises(text: str) -> None:
    for read in READERS:
        read(text)
    assert len(tool_calls(text).errors) <= MAX_CALLS + 1


@pytest.mark.parametrize(
    "piece", [*PIECES, '<tool_call>["</tool_call>', "\\boxed{}", "```json\n```\n", "<tool_call></tool_call>", "1,2345,"]
)
def test_a_megabyte_of_anything_costs_linear_time(piece: str) -> None:
    """Ten times the text may cost no more than forty times the time, and never seconds: quadratic would be a hundred."""

    def seconds(size: int) -> float:
        text = piece * (size // len(piece))
        start = time.process_time()
        for read in READERS:
            read(text)
        return time.process_time() - start

    short = min(seconds(100_000) for _ in range(2))
    assert seconds(1_000_000) < max(1.0, 40 * short)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed { 7 }", "7"),
        (r"\fbox{8}", "8"),
        (r"{ \boxed{3} and \boxed{4", "3"),
        (r"\boxed{4", None),
        ("42", None),
    ],
)
def test_boxed_finds_the_last_complete_box(text: str, content: str | None) -> None:
    assert boxed(text) == content


@given(st.text(alphabet="ab \\frac").map(lambda s: s.replace("\\", "")), st.integers(0, 8))
def test_boxed_gives_back_what_was_put_into_a_box(inner: str, depth: int) -> None:
    content = "{" * depth + inner + "}" * depth
    assert boxed("text \\boxed{" + content + "} text }") == content.strip()


def test_tagged_finds_the_last_complete_pair() -> None:
    assert tagged("<answer>1</answer> or <answer> 2 </answer> <answer>3") == "2"
    assert tagged("<answer>a</answer> </answer>") == "a"
    assert tagged("<result>4</result>", "result") == "4"
    assert tagged("<answer>1") is None
    assert tagged("</answer><answer>") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", Fraction(42)),
        ("$1,234,567.50 in all", Fraction("1234567.5")),
        ("it is -3", Fraction(-3)),
        ("x = −7", Fraction(-7)),
        ("5-3", Fraction(3)),
        ("(2)-3", Fraction(3)),
        ("3/4", Fraction(3, 4)),
        ("it is -10 / 4 .", Fraction(-5, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\dfrac{-3}{4}$", Fraction(-3, 4)),
        (r"\frac{1}{0}", None),
        (".5", Fraction(1, 2)),
        ("1e3", Fraction(1000)),
        ("3, 4", Fraction(4)),
        ("1,2", Fraction(2)),
        ("version 1.2.3", Fraction(3)),
        ("none", None),
        ("9" * 2000, None),
    ],
)
def test_last_number_reads_signs_commas_decimals_and_fractions(text: str, number: Fraction | None) -> None:
    assert last_number(text) == number


@given(st.integers(-(10**12), 10**12), st.integers(0, 999))
def test_last_number_reads_back_grouped_decimals(whole: int, thousandths: int) -> None:
    text = f"in all: {whole:,}.{thousandths:03d} apples"
    magnitude = abs(whole) + Fraction(thousandths, 1000)
    assert last_number(text) == (-magnitude if whole < 0 else magnitude)


def test_fenced_code_gives_the_blocks_of_a_language() -> None:
    text = "a\n```py\nprint(1)\n```\nb\n```json\n{}\n```\n```Python\n```\n```python\nopen"
    assert fenced_code(text, "python") == ["print(1)\n", ""]
    assert fenced_code(text, "json") == ["{}\n"]
    assert len(fenced_code(text)) == 3
    assert outside_code(text, "python") == "a\n\nb\n```json\n{}\n```\n\n```python\nopen"
    assert outside_code("a\n```\nb\n```", "python") == "a\n```\nb\n```"
    assert outside_code("a\n```\nb\n```") == "a\n"
