"""Where an answer is in a text, and whether it is right."""

import importlib.util
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from opentinker.env.parsing import boxed, last_number, tagged
from opentinker.environments.math.checker import Verdict, shared_checker
from opentinker.errors import ConfigError

AnswerIn = Literal["boxed", "tagged", "last_number"]
ANSWER_IN: tuple[AnswerIn, ...] = ("boxed", "tagged", "last_number")
MAX_ANSWER = 500
"""Characters of an answer that are judged; a longer one is wrong."""
_WHOLE = re.compile(r"-?(?:[0-9]{1,18}|[0-9]{1,3}(?:,[0-9]{3}){1,5})\Z")


@dataclass(frozen=True)
class Judgement:
    """`found`: an answer was there, in the form asked for."""

    found: bool
    right: bool
    metrics: dict[str, float]


UNANSWERED = {"exact": 0.0, "no_answer": 1.0, "checker_timeout": 0.0, "checker_error": 0.0}
"""Metrics of an episode without an answer."""


def require_checker() -> None:
    """
    Raises:
        ConfigError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("judging answers needs math-verify", hint="pip install 'opentinker[environments]'")


def gold_of(answer: object) -> str:
    r"""The right answer in a row's column: after GSM8K's `####`, in MATH's last `\boxed{}`, or the whole text or number.

    Raises:
        ConfigError: there is none.
    """
    text = str(answer) if isinstance(answer, str | int | float) else ""
    inner = text.rpartition("####")[2] if "####" in text else boxed(text)
    gold = (text if inner is None else inner).strip()
    if not gold:
        raise ConfigError(f"a task has no answer: {str(answer)[:100]!r}", hint="the column 'answer' holds it")
    if len(gold) > MAX_ANSWER:
        raise ConfigError(
            f"a task's answer is longer than {MAX_ANSWER} characters: {gold[:60]!r}...",
            hint="a worked solution needs its answer in \\boxed{} or after ####",
        )
    return gold


def check_gold(gold: str) -> None:
    """
    Raises:
        ConfigError: math-verify cannot read it, so that no answer could be right.
    """
    if not _WHOLE.match(gold) and shared_checker().check(gold, gold, 5.0).status == "bad_gold":
        raise ConfigError(f"a task's right answer cannot be read as mathematics: {gold[:100]!r}")


def answer_in(text: str, where: AnswerIn) -> str | None:
    """The answer that a text gives; None where there is none in that form."""
    if where == "last_number":
        number = last_number(text)
        return None if number is None else str(number)
    return (boxed(text) if where == "boxed" else tagged(text, "answer")) or None


def judge(text: str, gold: str, where: AnswerIn = "boxed", timeout_s: float = 1.0) -> Judgement:
    """Whether the answer in `text` is `gold`.

    Raises:
        ConfigError: the checker cannot be started, or cannot read `gold`.
    """
    answer = answer_in(text, where)
    verdict = Verdict("wrong") if answer is None else _verdict(answer, gold, timeout_s)
    if verdict.status == "bad_gold":
        raise ConfigError(f"a task's right answer cannot be read as mathematics: {gold[:100]!r}")
    metrics = {
        "exact": float(verdict.status == "right"),
        "no_answer": float(answer is None),
        "checker_timeout": float(verdict.status == "timeout"),
        "checker_error": float(verdict.status == "error"),
    }
    return Judgement(answer is not None, verdict.status == "right", metrics)


def _verdict(answer: str, gold: str, timeout_s: float) -> Verdict:
    if len(answer) > MAX_ANSWER:
        return Verdict("wrong")
    if _WHOLE.match(gold) and _WHOLE.match(answer):  # most of them: no process needed
        same = Fraction(answer.replace(",", "")) == Fraction(gold.replace(",", ""))
        return Verdict("right" if same else "wrong")
    if answer == gold:
        return Verdict("right")
    return shared_checker().check(gold, answer, timeout_s)
