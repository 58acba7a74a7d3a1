"""Code that a policy writes is run in the sandbox and its result comes back; the boxed answer that follows is judged."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from opentinker.env.environment import Action, Message, StepResult
from opentinker.env.execution import checked_step
from opentinker.environments.math.rows import rows
from opentinker.environments.math_code import CALLS_PER_ACTION, EXAMPLES, LAST_CALL, MathCode
from opentinker.environments.sandbox import sandbox as sandbox_module
from opentinker.environments.sandbox import usable_walls
from opentinker.errors import ConfigError

pytest.importorskip("math_verify")


@pytest.fixture(autouse=True)
def _walls() -> None:
    try:
        usable_walls()
    except ConfigError as error:
        pytest.skip(f"no sandbox can be had here: {error.detail}")


def call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


class Play:
    def __init__(self, answer: str = "42", **args: Any) -> None:
        self.environment = MathCode(**args)
        self.prompt = self.environment.reset({"question": "What is 6 times 7?", "answer": answer})

    def say(self, text: str) -> StepResult:
        return checked_step(self.environment.step(Action(text)), "MathCode.step")

    def shown(self, text: str) -> str:
        result = self.say(text)
        assert not result.done
        return "\n".join(str(m["content"]) for m in cast(Sequence[Message], result.observation))


@pytest.fixture
def play() -> Iterator[Play]:
    play = Play()
    yield play
    play.environment.close()


def test_code_runs_its_variables_stay_and_the_answer_is_judged(play: Play) -> None:
    first = play.say("Let me compute. " + call("x = 6\nx * 7"))
    assert first.observation == ({"role": "tool", "content": "42"},)
    assert (first.reward, first.done) == (0.0, False)
    assert play.shown(call("print(x + 1)")) == "7"
    last = play.say(r"It is \boxed{42}.")
    assert (last.reward, last.components, last.done) == (1.0, {"answer": 0.9, "format": 0.1}, True)
    assert last.metrics["calls"] == 2.0
    assert last.metrics["exact"] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=python>\n<parameter=code>\nprint(6 * 7)\n</parameter>\n</function>\n</tool_call>",
        "Let me see:\n```python\nprint(6 * 7)\n```",
        '```json\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n```',
    ],
)
def test_every_way_of_calling_is_understood(play: Play, text: str) -> None:
    assert play.shown(text) == "42"


def test_the_tool_is_declared_or_code_is_asked_for_in_blocks() -> None:
    declared, fenced = Play(), Play(calls="fenced")
    assert [t["function"]["name"] for t in declared.environment.tools] == ["python"]
    assert fenced.environment.tools == ()
    assert "```python" in str(fenced.prompt)
    result = fenced.say("```python\nprint(1)\n```\nthen\n```python\nprint(2)\n```")
    assert result.observation == ({"role": "user", "content": "Output:\n1\n\nOutput:\n2"},)
    for play in (declared, fenced):
        play.environment.close()


@pytest.mark.parametrize(
    ("code", "shown", "metric"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero", "code_errors"),
        ("x = 1", "[no output]", "calls"),
        ("print('a')\nwhile True: pass", "a\n[stopped after 0.5 s; variables are kept]", "code_timeouts"),
        ("import os; os._exit(1)", "[the interpreter ended; all variables are gone]", "sandbox_lost"),
        ("print('x' * 100_000)", "[... output cut ...]", "calls"),
        ("import sympy; sympy.factor(12 * sympy.Symbol('y'))", "12*y", "calls"),
        ("import socket; socket.socket()", "PermissionError", "code_errors"),
        ("open('/etc/passwd')", "FileNotFoundError", "code_errors"),
    ],
)
def test_what_went_wrong_is_told_and_counted_and_the_episode_goes_on(code: str, shown: str, metric: str) -> None:
    play = Play(call_timeout_s=5.0 if "sympy" in code else 0.5)
    result = play.say(call(code))
    content = str(cast(Sequence[Message], result.observation)[0]["content"])
    assert shown in content
    assert len(content) < 2200
    assert result.metrics[metric] == 1.0
    assert play.shown(call("print(7)")) == "7"
    play.environment.close()


def test_malformed_calls_are_explained_to_the_policy(play: Play) -> None:
    assert "not JSON" in play.shown("<tool_call>print(1)</tool_call>")
    assert "there is no tool 'pyhton'" in play.shown('<tool_call>{"name": "pyhton", "arguments": {}}</tool_call>')
    result = play.say('<tool_call>{"name": "python", "arguments": {"cod": "1"}}</tool_call>')
    assert "needs the argument 'code'" in str(result.observation)
    assert result.metrics["malformed_calls"] == 3.0


def test_calls_are_limited_and_the_last_one_says_so() -> None:
    play = Play(max_calls=3)
    assert play.shown(call("1") + call("2")) == "1\n2"
    assert play.shown(call("3") + call("4")) == f"3\n[No calls are left.]\n{LAST_CALL}"
    ended = play.say(call("5"))
    assert (ended.done, ended.reward, ended.metrics["calls"], ended.metrics["no_answer"]) == (True, 0.0, 3.0, 1.0)
    play.environment.close()
    many = Play(max_calls=100)
    assert many.shown(call("1") * 9).splitlines()[-1] == f"[Only the first {CALLS_PER_ACTION} calls of a message are run.]"
    many.environment.close()


def test_malformed_calls_cannot_make_an_episode_endless() -> None:
    play = Play(max_calls=2)
    play.shown("<tool_call>x</tool_call>")
    assert LAST_CALL in play.shown("<tool_call>x</tool_call>")
    assert play.say("<tool_call>x</tool_call>").done
    play.environment.close()


def test_a_message_with_neither_code_nor_box_is_an_episode_without_an_answer(play: Play) -> None:
    result = play.say("I do not know.")
    assert (result.done, result.reward, result.metrics["no_answer"]) == (True, 0.0, 1.0)


def test_an_answer_that_shows_code_beside_it_is_an_answer(play: Play) -> None:
    assert play.shown("```python\nprint('\\\\boxed{%d}' % 42)\n```") == r"\boxed{42}"
    assert play.say("```python\nprint('\\\\boxed{1}')\n```\nso \\boxed{42}").reward == 1.0


def test_it_is_scored_by_what_a_policy_computes() -> None:
    """What the tool printed, put into a box, earns the full reward on the rows that come with it."""
    for row in rows("held_out")[:8]:
        play = Play(row["answer"])
        text = play.shown(call(f"print({row['answer']!r})"))
        assert play.say(f"\\boxed{{{text.splitlines()[-1]}}}").reward == 1.0
        play.environment.close()


def test_the_solved_examples_are_true() -> None:
    for question, code, printed, answer in EXAMPLES:
        play = Play(printed, calls="fenced")
        result = play.say(code)
        assert result.observation == ({"role": "user", "content": f"Output:\n{printed}"},)
        assert play.say(answer).reward == 1.0
        assert question not in {row["question"] for row in rows("train") + rows("held_out")}
        play.environment.close()
    prompt = Play(calls="fenced", examples=2, instruction="").prompt
    assert [m["role"] for m in prompt] == ["user", "assistant"] * 4 + ["user"]
    assert prompt[-1]["content"] == "What is 6 times 7?"


def test_no_process_is_started_by_an_episode_without_code() -> None:
    play = Play()
    assert play.environment._sandbox._guest is None
    play.say(r"\boxed{1}")
    assert play.environment._sandbox._guest is None
    play.environment.close()


def test_a_job_without_a_sandbox_is_refused_when_its_tasks_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "_tried", lambda walls: f"no sandbox by {walls}: not allowed")
    for make in (
        lambda: MathCode.task_source("train", {}),
        lambda: MathCode.check_tasks(MathCode.task_source("train", {"sandbox": "unsafe_none"}), {}),
        MathCode,
    ):
        with pytest.raises(ConfigError, match="no sandbox by namespaces: not allowed; no sandbox by bubblewrap"):
            make()


@pytest.mark.parametrize(
    "args", [{"calls": "shouted"}, {"format_reward": -1}, {"sandbox": "none"}, {"packages": ["nosuch"]}, {"examples": 1}]
)
def test_arguments_out_of_range_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MathCode(**args)
