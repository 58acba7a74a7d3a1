"""Geometry with tools: what calls answer, what is wrong with bad ones, and how many there may be."""

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.env.environment import Action, StepResult
from opentinker.environments.geo3k.problems import make_problem
from opentinker.environments.geo3k_tools import Geo3kTools
from opentinker.environments.geo3k_tools.calculator import CalculatorError, calculate
from opentinker.environments.geo3k_tools.pictures import CropError, Pictures
from opentinker.errors import ConfigError, InvalidRequestError
from opentinker.images import Image

TASK = {"family": "pythagoras", "seed": 0}
ANSWER = f"\\boxed{{{make_problem(**TASK).answer}}}"
BOX = {"left": 10, "top": 20, "right": 110, "bottom": 70}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def begun(**args: Any) -> Geo3kTools:
    environment = Geo3kTools(**args)
    environment.reset(TASK)
    return environment


def said(result: StepResult) -> list[str]:
    """The texts of a result's messages."""
    found = []
    for message in result.observation:
        assert isinstance(message, dict)
        body = message["content"]
        found.append(body if isinstance(body, str) else " ".join(p["text"] for p in body if p["type"] == "text"))
    return found


def test_the_tools_are_declared_and_their_number_is_said() -> None:
    environment = Geo3kTools(max_calls=3)
    (message,) = environment.reset(TASK)
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator", "crop"]
    assert "at most 3 times" in message["content"][-1]["text"]
    assert [t["function"]["name"] for t in Geo3kTools(tools=["crop"]).tools] == ["crop"]


def test_a_calculation_is_answered_and_then_the_problem() -> None:
    environment = begun()
    result = environment.step(Action("Let me see. " + call("calculator", expression="sqrt(8^2 + 15^2)")))
    assert not result.done
    assert result.observation == [{"role": "tool", "content": "17"}]
    assert result.reward == {"answer": 0.0, "format": 0.0, "call_errors": 0.0}
    last = environment.step(Action(ANSWER))
    assert last.done
    assert last.reward == pytest.approx({"answer": 0.9, "format": 0.1, "call_errors": 0.0})
    assert {n: last.metrics[n] for n in ("exact", "boxed", "calls", "crops", "call_errors")} == {
        "exact": 1,
        "boxed": 1,
        "calls": 1,
        "crops": 0,
        "call_errors": 0,
    }


def test_a_part_of_the_picture_comes_back_enlarged_in_a_later_turn_and_can_be_cut_again() -> None:
    environment = begun()
    result = environment.step(Action(call("crop", **BOX)))
    (message,) = result.observation
    text, picture = message["content"]
    assert message["role"] == "tool"
    assert text["text"] == "Image 1: columns 10 to 110 and rows 20 to 70 of image 0, now 336 pixels wide and 168 high.\n"
    assert picture["image"].pil().size == (336, 168)
    again = environment.step(Action(call("crop", left=0, top=0, right=84, bottom=168, image=1)))
    (message,) = again.observation
    assert message["content"][1]["image"].pil().size == (168, 336)
    assert again.metrics["crops"] == 2


def test_the_part_is_that_of_the_picture() -> None:
    import PIL.Image

    picture = PIL.Image.new("RGB", (100, 60), "white")
    picture.paste("red", (50, 0, 100, 30))
    image, _ = Pictures((Image.of(picture),), 200).crop(50, 0, 100, 30)
    assert image.pil().getcolors() == [(200 * 120, (255, 0, 0))]


def test_where_tool_messages_hold_no_images_the_part_follows_in_a_user_message() -> None:
    result = begun(image_role="user").step(Action(call("crop", **BOX)))
    assert [m["role"] for m in result.observation] == ["tool", "user"]
    assert result.observation[1]["content"][1]["type"] == "image"


@pytest.mark.parametrize(
    ("box", "problem"),
    [
        ({**BOX, "right": 337}, "image 0 is 336 pixels wide and 336 high: it needs 0 <= left < right <= 336"),
        ({**BOX, "left": -5}, "336 pixels wide and 336 high"),
        ({**BOX, "left": 110}, "336 pixels wide and 336 high"),
        ({**BOX, "bottom": 10}, "336 pixels wide and 336 high"),
        ({**BOX, "bottom": 10**400}, "336 pixels wide and 336 high"),
        ({**BOX, "right": 12}, "at least 8 x 8 pixels; image 0 is 336"),
        ({**BOX, "image": 1}, "there is no image 1; there are 1"),
        ({**BOX, "image": -1}, "there is no image -1"),
        ({"left": 1}, "'top'"),
        ({**BOX, "left": "ten"}, "left"),
        ({**BOX, "zoom": 2}, "zoom"),
    ],
)
def test_bad_coordinates_are_told_with_the_size_and_cost_a_call(box: dict[str, Any], problem: str) -> None:
    result = begun(error_penalty=0.05).step(Action(call("crop", **box)))
    assert not result.done
    (text,) = said(result)
    assert text.startswith("Error: ")
    assert problem in text
    assert result.reward["call_errors"] == -0.05
    assert (result.metrics["calls"], result.metrics["call_errors"], result.metrics["crops"]) == (1, 1, 0)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "calculator", "arguments": </tool_call>',
        "<tool_call>calculator(5)</tool_call>",
        '<tool_call>{"name": "calculator", "argu',
        call("google", query="geometry"),
        call("calculator"),
        call("calculator", expression=5),
        call("calculator", expression="1/0"),
        call("calculator", expression="9**9**9"),
    ],
)
def test_a_malformed_call_is_answered_by_an_error_and_the_problem_stays_open(text: str) -> None:
    environment = begun()
    result = environment.step(Action(text, truncated=True))
    assert not result.done
    assert [m["role"] for m in result.observation] == ["tool"]
    assert said(result)[0].startswith("Error: ")
    assert len(said(result)[0]) < 600
    assert environment.step(Action(ANSWER)).metrics["exact"] == 1


@pytest.mark.parametrize("mark", ["<image>", "<|im_end|>", "<|image_pad|>"])
def test_an_error_does_not_repeat_marks_that_a_template_may_have(mark: str) -> None:
    texts = [call("calculator", expression=mark), call(mark), f"<tool_call>{mark}</tool_call>", call("crop", **{mark: 1})]
    for result in (begun().step(Action(text)) for text in texts):
        assert mark not in said(result)[0]
        assert said(result)[0].startswith("Error: ")


def test_several_calls_of_one_message_are_answered_in_order() -> None:
    text = "\n".join([call("calculator", expression="1+1"), call("crop", **BOX), call("calculator", expression="2+2")])
    result = begun().step(Action(text))
    assert [t[:5] for t in said(result)] == ["2", "Image", "4"]
    assert result.metrics["calls"] == 3


def test_calls_beyond_the_limit_are_refused_once_and_then_end_the_episode() -> None:
    environment = begun(max_calls=2)
    one = call("calculator", expression="1")
    assert said(environment.step(Action(one * 3))) == [
        "1",
        "1",
        "Error: 2 calls are allowed, and they are used up. Give your answer.",
    ]
    end = environment.step(Action(one + ANSWER))
    assert end.done
    assert sum(end.reward.values()) == 0
    assert end.metrics["calls"] == 2
    answered = begun(max_calls=1)
    answered.step(Action(one))
    assert answered.step(Action(one)).done is False
    assert answered.step(Action(ANSWER)).metrics["exact"] == 1


def test_malformed_calls_use_up_the_limit_too() -> None:
    environment = begun(max_calls=2)
    results = [environment.step(Action("<tool_call>?</tool_call>")) for _ in range(4)]
    assert [r.done for r in results] == [False, False, False, True]


def test_the_sample_actions_call_both_tools_and_answer() -> None:
    environment = begun()
    results = [environment.step(Action(text)) for text in Geo3kTools.sample_actions(TASK)]
    assert [r.done for r in results] == [False, False, True]
    assert (results[-1].metrics["exact"], results[-1].metrics["crops"], results[-1].metrics["call_errors"]) == (1, 1, 0)


def test_an_answered_problem_takes_no_more_steps() -> None:
    environment = begun()
    environment.step(Action(ANSWER))
    with pytest.raises(InvalidRequestError, match="no problem is posed"):
        environment.step(Action(call("crop", **BOX)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tools": ["calculator", "search"]}, "no tool 'search'.*calculator, crop"),
        ({"tools": []}, "use geo3k"),
        ({"max_calls": 0}, "use geo3k"),
        ({"image_role": "system"}, "tool or user"),
        ({"image_size": 1}, "160 to 2048"),
    ],
)
def test_arguments_that_make_no_sense_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Geo3kTools(**args)


def test_a_picture_with_too_many_pixels_is_not_opened() -> None:
    import PIL.Image

    # 65 million pixels of one colour are a small file.
    huge = Image.of(PIL.Image.new("1", (8_100, 8_000)))
    assert len(huge.data) < 100_000
    with pytest.raises(CropError, match="too many pixels"):
        Pictures((huge,), 336).crop(0, 0, 100, 100)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("sqrt(5^2 + 12^2)", "13"),
        ("√(49) × 2", "14"),
        ("7/2", "3.5"),
        ("15/7", "15/7 = 2.142857143"),
        ("0.1 + 0.2", "0.3"),
        ("2**10", "1024"),
        ("2^0.5", "1.414213562"),
        ("4^(1/2)", "2"),
        ("2^-2", "0.25"),
        ("-3 + +2", "-1"),
        ("7 // 2 + 7 % 2", "4"),
        ("sin(radians(30)) * 8", "4"),
        ("degrees(atan2(1, 1))", "45"),
        ("π", "3.141592654"),
        ("round(2.567, 2)", "2.57"),
        ("gcd(12, 8) + max(1, 5/2) + abs(-1)", "7.5"),
        ("floor(7/2) + ceil(7/2)", "7"),
    ],
)
def test_expressions_have_their_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "not an expression"),
        ("1 +", "not an expression"),
        ("2(3)", "not allowed"),
        ("1; 2", "not an expression"),
        ("x + 1", "'x' is not known"),
        ("__import__('os').system('true')", "not allowed"),
        ("eval('1')", "'eval' is not known"),
        ("().__class__", "not allowed"),
        ("[1 for _ in (1,)]", "not allowed"),
        ("lambda: 1", "not allowed"),
        ("'a' * 9", "not allowed"),
        ("True", "not allowed"),
        ("1 < 2", "not allowed"),
        ("1 << 9", "not allowed"),
        ("1j", "not allowed"),
        ("max(*(1, 2))", "not allowed"),
        ("round(1, ndigits=2)", "round takes numbers only"),
        ("sqrt + 1", "write sqrt with its numbers"),
        ("9^9^9^9", "exponent"),
        ("2^65", "exponent"),
        ("(2^60)^60", "too large"),
        ("1e400", "not finite"),
        ("1e300 * 1e300", "too large"),
        ("exp(1000)", "too large"),
        ("round(1/3, 100000000)", "at most 15 digits"),
        ("1/0", "division by zero"),
        ("0^-1", "division by zero"),
        ("sqrt(-1)", "0 or more"),
        ("(-8)^(1/3)", "no such power"),
        ("asin(2)", "asin"),
        ("log(0)", "log"),
        ("max()", "max"),
        ("gcd(1.5, 2)", "gcd: "),
        ("min(1,2,3,4,5,6,7,8,9)", "at most 8"),
        ("-" * 150 + "1", "nested too deeply"),
        ("(" * 100 + "1" + ")" * 100, "longer than"),
        ("1" * 201, "longer than 200"),
        ("1" * 199, "too large"),
        ("\x00", "not an expression"),
    ],
)
def test_what_is_not_allowed_is_said(expression: str, problem: str) -> None:
    with pytest.raises(CalculatorError, match=problem):
        calculate(expression)


@given(st.text(alphabet="0123456789+-*/%^(). ,episqrtmaxround", max_size=200))
def test_every_expression_has_a_short_value_or_is_refused(expression: str) -> None:
    with suppress(CalculatorError):
        assert len(calculate(expression)) < 500


@given(st.integers(-99, 99), st.integers(-99, 99), st.integers(1, 99))
def test_arithmetic_of_whole_numbers_is_exact(a: int, b: int, c: int) -> None:
    shown = calculate(f"({a} + {b}) * {c} - {a} / {c}")
    exact, _, decimal = shown.partition(" = ")
    assert math.isclose(float(decimal or exact), (a + b) * c - a / c, rel_tol=1e-9, abs_tol=1e-9)
