"""Whether an answer is right. Numbers are compared exactly; what is no number is judged by math-verify."""

from dataclasses import dataclass
from fractions import Fraction

from opentinker.env.parsing import boxed
from opentinker.environments.geo3k.exact import Exact, NotExactError
from opentinker.environments.geo3k.reading import LONGEST, parse_exact
from opentinker.environments.math.checker import shared_checker


@dataclass(frozen=True)
class Verdict:
    """Of an answer's text. `formatted`: it was in a box; `unreadable`: it is no number although the right answer is one;
    `unchecked`: math-verify failed or took too long, which says nothing about the answer."""

    correct: bool
    formatted: bool
    unreadable: bool = False
    unchecked: bool = False


def judge(text: str, reference: str) -> Verdict:
    """The last box counts; without one, a text that is nothing but a number."""
    answer = boxed(text)
    formatted = answer is not None
    given = (text.strip() if len(text) <= LONGEST else "") if answer is None else answer
    try:
        expected = parse_exact(reference)
    except NotExactError:
        return _verified(given, reference, formatted)
    try:
        return Verdict(same_number(parse_exact(given), expected, reference), formatted)
    except NotExactError:
        return Verdict(False, formatted, unreadable=True)


def same_number(given: Exact, expected: Exact, reference: str) -> bool:
    """Equal; or, where the reference is a decimal, a root or a multiple of pi that it is rounded from."""
    if given == expected or "." not in reference or given.rational() is not None:
        return given == expected
    rounded = expected.rational()
    digits = len(reference.rpartition(".")[2].strip())
    return rounded is not None and abs(Fraction(float(given)) - rounded) <= Fraction(1, 2 * 10**digits)


def _verified(given: str, reference: str, formatted: bool) -> Verdict:
    if "".join(given.split()) == "".join(reference.split()):
        return Verdict(True, formatted)
    if not given or len(given) > LONGEST:
        return Verdict(False, formatted)
    verdict = shared_checker().check(reference, given)
    return Verdict(verdict.status == "right", formatted, unchecked=verdict.status in ("timeout", "error"))
