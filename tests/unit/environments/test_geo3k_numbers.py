"""Exact numbers, and how answers are read and judged."""

from contextlib import suppress
from fractions import Fraction
from math import isclose, pi, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.environments.geo3k.exact import Exact, NotExactError
from opentinker.environments.geo3k.judging import Verdict, judge
from opentinker.environments.geo3k.reading import parse_exact

fractions = st.builds(Fraction, st.integers(-30, 30), st.integers(1, 12))
terms = st.builds(
    lambda value, root, power: Exact.number(value) * Exact.root(root) * (Exact.pi() if power else Exact.number(1)),
    fractions,
    st.integers(0, 200),
    st.booleans(),
)
numbers = st.lists(terms, max_size=2).map(lambda some: sum(some, Exact()))


@given(numbers, numbers)
def test_arithmetic_agrees_with_floats(a: Exact, b: Exact) -> None:
    for exact, approximate in ((a + b, float(a) + float(b)), (a - b, float(a) - float(b)), (a * b, float(a) * float(b))):
        assert isclose(float(exact), approximate, rel_tol=1e-9, abs_tol=1e-6)


@given(numbers, numbers, numbers)
def test_equal_numbers_are_equal_however_they_came_about(a: Exact, b: Exact, c: Exact) -> None:
    assert a + b == b + a
    assert (a + b) * c == a * c + b * c
    assert a - a == Exact()


@given(numbers, terms)
def test_a_quotient_times_its_divisor_is_the_number(a: Exact, b: Exact) -> None:
    if b != Exact():
        assert a / b * b == a


@given(st.integers(0, 10**12))
def test_a_root_squared_is_the_number_and_its_inside_has_no_square(value: int) -> None:
    root = Exact.root(value)
    assert root * root == Exact.number(value)
    for (inside, _), _ in root.terms:
        assert all(inside % (factor * factor) for factor in range(2, 100))


@given(numbers)
def test_a_number_is_read_back_from_its_latex(number: Exact) -> None:
    assert parse_exact(str(number)) == number


ROOT2, ROOT13 = Exact.root(2), Exact.root(13)


def whole(value: int | Fraction) -> Exact:
    return Exact.number(value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", whole(7)),
        ("-7", whole(-7)),
        ("2.50", whole(Fraction(5, 2))),
        ("1,250", whole(1250)),
        ("15/7", whole(Fraction(15, 7))),
        ("\\frac{15}{7}", whole(Fraction(15, 7))),
        ("\\dfrac { 15 } { 7 }", whole(Fraction(15, 7))),
        ("\\frac12", whole(Fraction(1, 2))),
        ("2\\frac{1}{2}", whole(Fraction(5, 2))),
        ("2\\sqrt{13}", whole(2) * ROOT13),
        ("2 \\sqrt { 13 }", whole(2) * ROOT13),
        ("2√13", whole(2) * ROOT13),
        ("2*sqrt(13)", whole(2) * ROOT13),
        ("\\sqrt{52}", whole(2) * ROOT13),
        ("52^{1/2}", whole(2) * ROOT13),
        ("\\frac{3\\sqrt{2}}{2}", whole(Fraction(3, 2)) * ROOT2),
        ("3/\\sqrt{2}", whole(Fraction(3, 2)) * ROOT2),
        ("9\\pi", whole(9) * Exact.pi()),
        ("9 π", whole(9) * Exact.pi()),
        ("\\frac{9}{4}\\pi", whole(Fraction(9, 4)) * Exact.pi()),
        ("3^2 pi", whole(9) * Exact.pi()),
        ("4 + 2\\sqrt{2}", whole(4) + whole(2) * ROOT2),
        ("x = 35", whole(35)),
        ("x=35^\\circ", whole(35)),
        ("35°", whole(35)),
        ("35 degrees", whole(35)),
        ("m\\angle ABC = 35^{\\circ}", whole(35)),
        ("$12$ cm", whole(12)),
        ("12\\text{ cm}^2", whole(12)),
        ("12\\,\\mathrm{cm}", whole(12)),
        ("12 square units", whole(12)),
        ("12 units^2.", whole(12)),
        ("(1 + 2) \\cdot 4", whole(12)),
        ("0", Exact()),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, number: Exact) -> None:
    assert parse_exact(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "35 or 36",
        "2 3",
        "1/0",
        "\\frac{1}{0}",
        "\\sqrt{-4}",
        "\\sqrt{\\sqrt{2}}",
        "1/(1+\\sqrt{2})",
        "9^{9^{9^9}}",
        "9^9^9^9",
        "99999999^8",
        "(" * 50 + "1" + ")" * 50,
        "sqrt " * 30 + "2",
        "1" * 150,
        "1" * 100_000,
        "\\frac{1",
        "5}",
        "__import__('os')",
    ],
)
def test_what_is_no_such_number_is_refused_at_once(text: str) -> None:
    with pytest.raises(NotExactError):
        parse_exact(text)


@given(st.text(alphabet="0123456789.+-*/^(){}\\ sqrtpifacx°√π", max_size=60))
def test_no_text_does_anything_but_read_or_refuse(text: str) -> None:
    with suppress(NotExactError):
        float(parse_exact(text))


@pytest.mark.parametrize(
    ("text", "reference", "verdict"),
    [
        ("So \\boxed{2\\sqrt{13}}", "2\\sqrt{13}", Verdict(True, True)),
        ("\\boxed{\\sqrt{52}}", "2\\sqrt{13}", Verdict(True, True)),
        ("\\boxed{7.211}", "2\\sqrt{13}", Verdict(False, True)),
        ("\\boxed{1} no, \\boxed{35}", "35", Verdict(True, True)),
        ("35", "35", Verdict(True, False)),
        (" x = 35° ", "35", Verdict(True, False)),
        ("I think that it is 35", "35", Verdict(False, False, True)),
        ("\\boxed{the red one}", "35", Verdict(False, True, True)),
        ("\\boxed{35", "35", Verdict(False, False, True)),
        ("", "35", Verdict(False, False, True)),
        ("3" * 5000, "35", Verdict(False, False, True)),
        ("\\boxed{0.5}", "\\frac{1}{2}", Verdict(True, True)),
        # A decimal in the dataset stands for the root or multiple of pi that it is rounded from, but not for another decimal.
        ("\\boxed{2\\sqrt{13}}", "7.2", Verdict(True, True)),
        ("\\boxed{2\\sqrt{13}}", "7.3", Verdict(False, True)),
        ("\\boxed{7.21}", "7.2", Verdict(False, True)),
        ("\\boxed{7.20}", "7.2", Verdict(True, True)),
    ],
)
def test_the_last_box_counts_or_a_text_that_is_only_a_number(text: str, reference: str, verdict: Verdict) -> None:
    assert judge(text, reference) == verdict


@given(numbers)
def test_the_right_answer_is_right_in_every_spelling(number: Exact) -> None:
    assert judge(f"\\boxed{{{number}}}", str(number)) == Verdict(True, True)
    other = number + Exact.number(Fraction(1, 1000))
    assert not judge(f"\\boxed{{{other}}}", str(number)).correct


def test_floats_are_close() -> None:
    assert float(Exact.number(Fraction(3, 2)) * Exact.root(2) * Exact.pi()) == pytest.approx(1.5 * sqrt(2) * pi)
