"""Whether an answer is right. Numbers are compared exactly; what is no number goes to the math checker."""

from dataclasses import dataclass
from fractions import Fraction

from opentinker.env.parsing import boxed
from opentinker.environments.geo3k.exact import Exact, NotExactError
from opentinker.environments.geo3k.reading import LONGEST, parse_exact


@dataclass(frozen=True)
class Verdict:
    """Of an answer's text. `formatted`: it was in a box; `unreadable`: it is no number although the right answer is one."""

    correct: bool
    formatted: bool
    unreadable: bool = False


def judge(text: str, reference: str) -> Verdict:
    """The last box counts; without one, a text that is nothing but a number."""
    answer = boxed(text)
    formatted = answer is not None
    given = (text.strip() if len(text) <= LONGEST else "") if answer is None else answer
    try:
        expected = parse_exact(reference)
    except NotExactError:
        return Verdict(_same_text(given, reference), formatted)
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


def _same_text(given: str, reference: str) -> bool:
    return "".join(given.split()) == "".join(reference.split())
