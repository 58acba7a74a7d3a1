"""Right answers in any form earn the reward, hostile ones cost their deadline, and rows that cannot be judged are refused."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from opentinker.env.datasets import load_tasks
from opentinker.env.environment import Action, StepResult
from opentinker.env.tasks import ListTasks
from opentinker.environments.math import EXAMPLES, Math
from opentinker.environments.math import judging as judging_module
from opentinker.environments.math.checker import AnswerChecker, Verdict
from opentinker.environments.math.judging import AnswerIn, gold_of, judge
from opentinker.environments.math.rows import rows
from opentinker.errors import ConfigError

pytest.importorskip("math_verify")

HOSTILE = (r"9^{9^{9^9}}", r"(((((((((9!)!)!)!)!)!)!)!)!)", r"\binom{10^9}{5 \cdot 10^8}")


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    checker = AnswerChecker(size=2)
    yield checker
    checker.close()


def play(text: str, answer: Any = "42", truncated: bool = False, **args: Any) -> StepResult:
    environment = Math(**args)
    environment.reset({"question": "?", "answer": answer})
    return environment.step(Action(text, truncated=truncated))


def total(result: StepResult) -> float:
    reward = result.reward
    return sum(reward.values()) if isinstance(reward, dict) else cast(float, reward)


# The rows that come with the package


def test_the_rows_of_the_splits_differ_and_every_answer_is_judged_right_in_its_own_words() -> None:
    train, held_out = rows("train"), rows("held_out")
    assert (len(train), len(held_out)) == (480, 120)
    assert not {r["question"] for r in train} & {r["question"] for r in held_out}
    assert not {q for q, _ in EXAMPLES} & {r["question"] for r in train + held_out}
    for row in held_out:
        assert total(play(f"So it is \\boxed{{{row['answer']}}}.", row["answer"])) == 1.0


def test_the_solved_examples_are_right() -> None:
    assert [judge(text, gold).right for (_, text), gold in zip(EXAMPLES, ("19", "5/6", "250"), strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("part", "solve"),
    [
        ("Solve for $x$: $", lambda q: Fraction(0)),
        ("remainder when", lambda q: Fraction(0)),
    ],
)
def test_some_answers_by_another_way_of_computing_them(part: str, solve: Any) -> None:
    for row in (r for r in rows("train") if part in r["question"]):
        inside = row["question"].split("$")
        if "Solve" in part:
            left, right = inside[3].split(" = ")
            assert eval(left.replace("x", f" * ({row['answer']})")) == int(right)
        else:
            base, exponent = inside[1].replace("}", "").split("^{")
            modulus = int(row["question"].rstrip("?").rsplit(" ", 1)[1])
            assert pow(int(base), int(exponent), modulus) == int(row["answer"])


def test_training_draws_the_training_rows_and_evaluation_the_held_out_ones() -> None:
    train, held_out = (Math.task_source(split, {}) for split in ("train", "held_out"))
    assert {t["question"] for t in train.draw(1, 0, 480)} == {r["question"] for r in rows("train")}
    assert held_out.first(5) == list(rows("held_out")[:5])


# The reward


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "42.0"),
        ("1,234", "1234"),
        (r"\frac{3}{4}", "0.75"),
        (r"\frac{3}{4}", "3/4"),
        ("x^2 + 1", "1 + x^2"),
        (r"3\sqrt{2}", r"\sqrt{18}"),
        (r"\{1, 2\}", r"\{2, 1\}"),
        ("[1, 2)", "[1,2)"),
        (r"\text{(B)}", "B"),
        ("5", "x = 5"),
        ("12", r"12 \text{ apples}"),
        (r"90^\circ", "90"),
    ],
)
def test_an_answer_is_right_in_every_form_that_means_the_same(gold: str, answer: str) -> None:
    result = play(f"Thus \\boxed{{{answer}}}", gold)
    assert result.reward == {"answer": 0.9, "format": 0.1}
    assert result.metrics["exact"] == 1.0
    assert result.done


@pytest.mark.parametrize("gold", ["7", "8"])
def test_two_answers_are_never_right_for_both(gold: str) -> None:
    other = {"7": "8", "8": "7"}[gold]
    for hedge in ("7 or 8", r"7 \text{ or } 8", "7, 8", r"\{7, 8\}", "[7, 8]", "7;8", r"7 \pm 1", "7 < 8", r"\in [0, 10]", "x"):
        assert not judge(f"\\boxed{{{hedge}}}", gold).right, hedge
    for last in ("7 = 8", r"7 \vee 8", "7. 8"):
        assert not (judge(f"\\boxed{{{last}}}", gold).right and judge(f"\\boxed{{{last}}}", other).right), last


def test_a_wrong_answer_earns_the_form_and_none_earns_nothing() -> None:
    assert play(r"\boxed{41}").reward == {"answer": 0.0, "format": 0.1}
    nothing = play("It is 42.")
    assert nothing.reward == {"answer": 0.0, "format": 0.0}
    assert nothing.metrics["no_answer"] == 1.0
    assert play(r"\boxed{42", truncated=True).metrics["truncated"] == 1.0
    assert total(play(r"\boxed{}")) == 0.0
    assert play("\\boxed{" + "1" * 5000 + "}").reward == {"answer": 0.0, "format": 0.1}
    assert play(r"\boxed{41} no, \boxed{42}", format_reward=0.0).reward == {"answer": 1.0, "format": 0.0}


@pytest.mark.parametrize(
    ("where", "text"),
    [("boxed", r"\boxed{\frac{1}{2}}"), ("tagged", "<answer>1/2</answer>"), ("last_number", r"So it is 0.5.")],
)
def test_the_answer_is_looked_for_where_the_prompt_says(where: AnswerIn, text: str) -> None:
    environment = Math(answer_in=where)
    prompt = environment.reset({"question": "What is half of 1?", "answer": r"\frac{1}{2}"})
    assert prompt[-1]["content"].startswith("What is half of 1?\n\n")
    assert total(environment.step(Action(text))) == 1.0


def test_examples_and_instruction_are_in_the_prompt() -> None:
    prompt = Math(examples=2, instruction="Answer in \\boxed{}.").reset({"question": "q", "answer": "1"})
    assert [m["role"] for m in prompt] == ["user", "assistant", "user", "assistant", "user"]
    assert prompt[-1]["content"] == "q\n\nAnswer in \\boxed{}."


@pytest.mark.parametrize("args", [{"answer_in": "sung"}, {"format_reward": 2}, {"examples": 9}])
def test_arguments_out_of_range_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Math(**args)


# Rows of others


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("She has 3 + 4 = <<3+4=7>>7.\n#### 7", "7"),
        ("#### 1,200", "1,200"),
        (r"We get $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ("  12 ", "12"),
        (12, "12"),
        (0.5, "0.5"),
    ],
)
def test_the_right_answer_is_taken_out_of_gsm8ks_and_maths_solutions(answer: Any, gold: str) -> None:
    assert gold_of(answer) == gold


@pytest.mark.parametrize("answer", ["", None, "#### ", ["7"], "a long solution without an answer " * 30])
def test_a_row_without_an_answer_is_refused(answer: Any) -> None:
    with pytest.raises(ConfigError, match="answer"):
        Math().reset({"question": "?", "answer": answer})


def test_tasks_of_a_file_are_checked_when_they_are_loaded(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"problem": "1+1", "solution": "\\\\boxed{2}"}\n{"problem": "?", "solution": "\\\\boxed{\\\\frac{}"}\n')
    columns = {"question": "problem", "answer": "solution"}
    with pytest.raises(ConfigError, match="no column 'question'"):
        load_tasks(str(file), required=Math.task_columns)
    good = load_tasks(str(file), columns=columns, limit=1, required=Math.task_columns)
    Math.check_tasks(good, {})
    assert total(play(r"\boxed{2}", good.first(1)[0]["answer"])) == 1.0
    bad = ListTasks([{"question": "?", "answer": r"\boxed{1}"}, {"question": "?", "answer": r"\frac{"}])
    with pytest.raises(ConfigError, match=r"cannot be read as mathematics: '\\\\frac\{'"):
        Math.check_tasks(bad, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        play(r"\boxed{1}", r"\frac{")


# The checker


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_answer_costs_its_deadline_and_the_next_is_judged_right(checker: AnswerChecker, answer: str) -> None:
    assert checker.check(r"\frac{1}{2}", "0.50").status == "right"
    start = time.process_time(), time.monotonic()
    assert checker.check("42", answer, 0.5).status == "timeout"
    assert time.process_time() - start[0] < 0.5
    assert time.monotonic() - start[1] < 20.0
    assert checker.check(r"\frac{1}{2}", f"\\frac{{{len(answer)}}}{{{2 * len(answer)}}}").status == "right"


def test_an_answer_that_ran_out_of_time_once_is_judged_again(checker: AnswerChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Busy:
        alive = True

        def check(self, gold: str, answer: str, timeout_s: float) -> Verdict:
            asked.append(answer)
            return Verdict("timeout" if len(asked) == 1 else "right")

    monkeypatch.setattr(checker, "_take", Busy)
    monkeypatch.setattr(checker, "_put", lambda usable, taken: None)
    seen = [checker.check("7/9", "14/18").status for _ in range(3)]
    assert seen == ["timeout", "right", "right"]
    assert len(asked) == 2, "what was judged is remembered"


def test_the_environment_counts_what_could_not_be_judged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    result = play(f"\\boxed{{{HOSTILE[0]}}}", check_timeout_s=0.3)
    assert result.metrics == {"exact": 0.0, "no_answer": 0.0, "checker_timeout": 1.0, "checker_error": 0.0, "truncated": 0.0}
    assert result.reward == {"answer": 0.0, "format": 0.1}

    class Broken:
        def check(self, gold: str, answer: str, timeout_s: float) -> Verdict:
            return Verdict("error", "it died")

    monkeypatch.setattr(judging_module, "shared_checker", Broken)
    assert play(r"\boxed{x}").metrics["checker_error"] == 1.0


def test_a_checker_that_dies_is_replaced(checker: AnswerChecker) -> None:
    assert checker.check("1/3", "2/6").status == "right"
    for process in list(checker._all):
        process._process.kill()
    statuses = [checker.check("1/3", f"{n}/{3 * n}").status for n in range(3, 8)]
    assert set(statuses[:2]) <= {"error", "right"}
    assert statuses[2:] == ["right"] * 3


def test_many_threads_get_each_their_own_verdict() -> None:
    checker = AnswerChecker(size=2)
    questions = [(f"{a}/7", f"{b * 2}/14") for a in range(1, 5) for b in range(1, 5)]
    try:
        with ThreadPoolExecutor(8) as pool:
            verdicts = list(pool.map(lambda q: checker.check(*q, timeout_s=5.0).status, questions))
        assert len(checker._all) == 2
    finally:
        checker.close()
    assert verdicts == ["right" if a == b else "wrong" for a in range(1, 5) for b in range(1, 5)]
    with pytest.raises(ConfigError, match="closed"):
        checker.check("1/2", "1/9")


def test_odd_texts_get_a_verdict(checker: AnswerChecker) -> None:
    for text in ("}{", "\\", "$$", "\x00", "é−×", "\n", "%", "\\left(", "{" * 200, "\\frac" * 60, "__import__('os')", "\ud800"):
        assert checker.check("3", text, 5.0).status in ("wrong", "error", "timeout"), text


def test_an_answer_that_is_python_code_is_not_executed(checker: AnswerChecker, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    for code in (f"open('{touched}', 'w')", f"1 + open('{touched}', 'w')", f"$2 * (lambda: open('{touched}', 'w'))()$"):
        assert checker.check("3", code, 5.0).status in ("wrong", "error")
        assert checker.check("3", f"\\text{{{code}}}", 5.0).status in ("wrong", "error")
    assert not touched.exists()


def test_checkers_end_with_the_process_that_started_them() -> None:
    program = """
import threading, time
from opentinker.environments.math.checker import AnswerChecker
checker = AnswerChecker(2)
assert checker.check("1/2", "0.5").status == "right"
threading.Thread(target=checker.check, args=("42", "9^{9^{9^9}}", 1.0)).start()
time.sleep(0.2)
print("up", flush=True)
time.sleep(100)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    below = psutil.Process(owner.pid).children(recursive=True)
    assert below
    assert all(os.getpgid(child.pid) != os.getpgid(owner.pid) for child in below)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    end = time.monotonic() + 20
    while time.monotonic() < end and any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below):
        time.sleep(0.1)
    assert not [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_checkers_see_no_keys() -> None:
    os.environ["OPENTINKER_API_KEY"] = "ot-secret-key"
    try:
        checker = AnswerChecker(1)
        checker.check("1/2", "0.5")
        found = [psutil.Process(p._process.pid).environ() for p in checker._all]
        assert found
        assert not [environment for environment in found if "OPENTINKER_API_KEY" in environment]
        checker.close()
    finally:
        del os.environ["OPENTINKER_API_KEY"]
