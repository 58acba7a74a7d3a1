"""Word problems with exact answers, so that the environment runs without a dataset. The same rows on every machine."""

import functools
from collections.abc import Callable
from fractions import Fraction
from random import Random

from opentinker.env.tasks import Split

SIZES: dict[Split, int] = {"train": 480, "held_out": 120}
_NAMES = ("Ada", "Ben", "Chloe", "David", "Emma", "Felix", "Grace", "Hugo", "Ivy", "Jonas", "Kira", "Leo")
_THINGS = ("apples", "pencils", "stickers", "marbles", "books", "coins", "shells", "cards")


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _gives_away(r: Random) -> tuple[str, Fraction]:
    first, second, thing = *r.sample(_NAMES, 2), r.choice(_THINGS)
    had, given, bought = r.randint(20, 60), r.randint(2, 19), r.randint(2, 30)
    text = f"{first} has {had} {thing}. {first} gives {given} of them to {second} and then buys {bought} more."
    return f"{text} How many {thing} does {first} have now?", Fraction(had - given + bought)


def _shopping(r: Random) -> tuple[str, Fraction]:
    count, price, paid = r.randint(2, 9), r.randint(2, 9), 100
    name, thing = r.choice(_NAMES), r.choice(_THINGS)
    text = f"{name} buys {count} packs of {thing} at ${price} each and pays with a ${paid} bill."
    return f"{text} How many dollars of change does {name} get?", Fraction(paid - count * price)


def _times_as_many(r: Random) -> tuple[str, Fraction]:
    first, second = r.sample(_NAMES, 2)
    few, factor, thing = r.randint(3, 15), r.randint(2, 6), r.choice(_THINGS)
    text = f"{first} has {few} {thing}. {second} has {factor} times as many."
    return f"{text} How many {thing} do they have together?", Fraction(few * (factor + 1))


def _rate(r: Random) -> tuple[str, Fraction]:
    made, hours, more = r.randint(3, 12), r.randint(2, 5), r.randint(6, 15)
    text = f"A machine makes {made * hours} parts in {hours} hours, always at the same rate."
    return f"{text} How many parts does it make in {more} hours?", Fraction(made * more)


def _journey(r: Random) -> tuple[str, Fraction]:
    speed, hours, rest, later = r.randint(4, 9) * 10, r.randint(2, 4), r.randint(3, 8) * 10, r.randint(2, 5)
    text = f"A car drives {hours} hours at {speed} km/h and then {later} hours at {rest} km/h."
    return f"{text} How many kilometres does it drive in all?", Fraction(speed * hours + rest * later)


def _discount(r: Random) -> tuple[str, Fraction]:
    price, percent = r.randint(2, 20) * 20, r.choice((5, 10, 15, 20, 25, 30, 40))
    text = f"A jacket costs ${price}. In a sale its price falls by {percent}%."
    return f"{text} What does it cost in the sale, in dollars?", Fraction(price * (100 - percent), 100)


def _share(r: Random) -> tuple[str, Fraction]:
    parts = r.sample(range(1, 8), 2)
    each, (first, second) = r.randint(3, 12), r.sample(_NAMES, 2)
    text = f"{first} and {second} share {each * sum(parts)} dollars in the ratio {parts[0]}:{parts[1]}."
    return f"{text} How many dollars does {first} get?", Fraction(each * parts[0])


def _fence(r: Random) -> tuple[str, Fraction]:
    width, length = r.randint(4, 20), r.randint(21, 40)
    text = f"A rectangular garden is {length} m long and has a perimeter of {2 * (width + length)} m."
    return f"{text} What is its area, in square metres?", Fraction(width * length)


def _ages(r: Random) -> tuple[str, Fraction]:
    (first, second), young, gap = r.sample(_NAMES, 2), r.randint(5, 15), r.randint(2, 10)
    text = f"{first} is {gap} years older than {second}. Together they are {2 * young + gap} years old."
    return f"{text} How old is {first}?", Fraction(young + gap)


def _equation(r: Random) -> tuple[str, Fraction]:
    a, b, x = r.randint(2, 9), r.randint(-20, 20) or 1, r.randint(-9, 9)
    return f"Solve for $x$: ${a}x {'+' if b > 0 else '-'} {abs(b)} = {a * x + b}$.", Fraction(x)


def _fractions(r: Random) -> tuple[str, Fraction]:
    (a, b), (c, d) = ((r.randint(1, 7), r.randint(2, 9)) for _ in range(2))
    sign = r.choice("+-")
    value = Fraction(a, b) + Fraction(c, d) if sign == "+" else Fraction(a, b) - Fraction(c, d)
    return f"Compute $\\frac{{{a}}}{{{b}}} {sign} \\frac{{{c}}}{{{d}}}$. Give a fraction in lowest terms.", value


def _power(r: Random) -> tuple[str, Fraction]:
    base, exponent, modulus = r.randint(2, 12), r.randint(4, 20), r.randint(5, 13)
    return f"What is the remainder when ${base}^{{{exponent}}}$ is divided by {modulus}?", Fraction(base**exponent % modulus)


def _divisible(r: Random) -> tuple[str, Fraction]:
    last, a, b = r.randint(5, 20) * 10, *r.sample((2, 3, 4, 5, 6, 7), 2)
    count = sum(1 for n in range(1, last + 1) if n % a == 0 or n % b == 0)
    return f"How many whole numbers from 1 to {last} are divisible by {a} or by {b}?", Fraction(count)


def _dice(r: Random) -> tuple[str, Fraction]:
    total = r.randint(3, 11)
    ways = sum(1 for a in range(1, 7) for b in range(1, 7) if a + b == total)
    colours = " and ".join(r.sample(("red", "blue", "green", "white", "black"), 2))
    text = f"You roll a {colours} die, both fair and six-sided."
    return f"{text} What is the probability that the sum is {total}? Give a fraction in lowest terms.", Fraction(ways, 36)


def _sequence(r: Random) -> tuple[str, Fraction]:
    first, step, place = r.randint(-10, 20), r.randint(2, 12), r.randint(10, 40)
    shown = ", ".join(str(first + step * n) for n in range(4))
    return f"What is term number {place} of the arithmetic sequence {shown}, ...?", Fraction(first + step * (place - 1))


def _mixture(r: Random) -> tuple[str, Fraction]:
    (a, p), (b, q) = ((r.randint(2, 9), r.randint(1, 9) * 10) for _ in range(2))
    text = f"{a} litres of a {p}% salt solution are mixed with {b} litres of a {q}% salt solution."
    return f"{text} How many percent salt has the mixture? Give an exact number.", Fraction(a * p + b * q, a + b)


_TEMPLATES: tuple[Callable[[Random], tuple[str, Fraction]], ...] = (
    *(_gives_away, _shopping, _times_as_many, _rate, _journey, _discount, _share, _fence),
    *(_ages, _equation, _fractions, _power, _divisible, _dice, _sequence, _mixture),
)

EXAMPLES = (
    (
        "Mia has 14 pears. She eats 3 and picks 8 more. How many pears does she have now?",
        "After eating 3 she has 14 - 3 = 11 pears. With 8 more she has 11 + 8 = 19. The answer is \\boxed{19}.",
    ),
    (
        "What is $\\frac{1}{2} + \\frac{1}{3}$? Give a fraction in lowest terms.",
        "$\\frac{1}{2} + \\frac{1}{3} = \\frac{3}{6} + \\frac{2}{6} = \\frac{5}{6}$. The answer is \\boxed{\\frac{5}{6}}.",
    ),
    (
        "A train travels 150 km in 3 hours. How many kilometres does it travel in 5 hours at this speed?",
        "Its speed is 150 / 3 = 50 km/h. In 5 hours it travels 50 * 5 = 250 km. The answer is \\boxed{250}.",
    ),
)
"""Solved problems, none of them among the rows."""


@functools.cache
def rows(split: Split) -> tuple[dict[str, str], ...]:
    """The problems of a split, every template equally often. No question is in both."""
    made = _all_rows()
    return made[: SIZES["train"]] if split == "train" else made[SIZES["train"] :]


@functools.cache
def _all_rows() -> tuple[dict[str, str], ...]:
    random, made = Random("opentinker word problems 1"), dict[str, str]()
    for number in range(sum(SIZES.values())):
        question, value = "", Fraction()
        while not question or question in made:
            question, value = _TEMPLATES[number % len(_TEMPLATES)](random)
        made[question] = _latex(value)
    return tuple({"question": question, "answer": answer} for question, answer in made.items())
