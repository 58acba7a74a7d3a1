"""Exact numbers of school geometry: sums of fractions times square roots times powers of pi.

Equality is decided by arithmetic on whole numbers: nothing is rounded, and no answer can make it slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isqrt, lcm, pi, sqrt

_LARGEST = 10**12
"""Of numerators, denominators and numbers under a root."""
_MOST_TERMS = 16
MOST_POWERS = 8


class NotExactError(ValueError):
    """The text is no number of this kind, or one too large for an answer."""


Term = tuple[int, int]
"""A square-free number under the root, and the power of pi."""


@dataclass(frozen=True)
class Exact:
    """sum of coefficient * sqrt(root) * pi**power. No coefficient is zero and every root is square-free, so equal numbers are
    equal objects."""

    terms: tuple[tuple[Term, Fraction], ...] = ()

    @classmethod
    def of(cls, terms: Mapping[Term, Fraction]) -> "Exact":
        kept = tuple(sorted((term, value) for term, value in terms.items() if value))
        if len(kept) > _MOST_TERMS or any(max(abs(v.numerator), v.denominator, r) > _LARGEST for (r, _), v in kept):
            raise NotExactError("the number is too large for an answer")
        if any(abs(power) > MOST_POWERS for (_, power), _ in kept):
            raise NotExactError("the power of pi is too large for an answer")
        return cls(kept)

    @classmethod
    def number(cls, value: int | Fraction) -> "Exact":
        return cls.of({(1, 0): Fraction(value)})

    @classmethod
    def root(cls, value: int | Fraction) -> "Exact":
        """The square root of a number of 0 or more."""
        value = Fraction(value)
        if value < 0 or value.numerator * value.denominator > _LARGEST:
            raise NotExactError("no such root")
        outside, inside = _square_part(value.numerator * value.denominator)
        return cls.of({(inside, 0): Fraction(outside, value.denominator)})

    @classmethod
    def pi(cls) -> "Exact":
        return cls.of({(1, 1): Fraction(1)})

    def __add__(self, other: "Exact") -> "Exact":
        terms = dict(self.terms)
        for term, value in other.terms:
            terms[term] = terms.get(term, Fraction(0)) + value
        return Exact.of(terms)

    def __neg__(self) -> "Exact":
        return Exact(tuple((term, -value) for term, value in self.terms))

    def __sub__(self, other: "Exact") -> "Exact":
        return self + -other

    def __mul__(self, other: "Exact") -> "Exact":
        total = Exact()
        for (root, power), value in self.terms:
            for (other_root, other_power), other_value in other.terms:
                outside = gcd(root, other_root)
                inside = root * other_root // outside**2
                total += Exact.of({(inside, power + other_power): value * other_value * outside})
        return total

    def __truediv__(self, other: "Exact") -> "Exact":
        if len(other.terms) != 1:
            raise NotExactError("only one term can be divided by")
        ((root, power), value) = other.terms[0]
        return self * Exact.of({(root, -power): 1 / (value * root)})

    def __float__(self) -> float:
        return sum((float(value) * sqrt(root) * pi**power for (root, power), value in self.terms), 0.0)

    def rational(self) -> Fraction | None:
        """As a fraction, if it is one."""
        if not self.terms:
            return Fraction(0)
        return self.terms[0][1] if len(self.terms) == 1 and self.terms[0][0] == (1, 0) else None

    def __str__(self) -> str:
        """As LaTeX, such as `\\frac{3\\sqrt{2}}{2}`."""
        if not self.terms:
            return "0"
        denominator = lcm(*(value.denominator for _, value in self.terms))
        parts = [_latex(int(value * denominator), root, power) for (root, power), value in self.terms]
        numerator = parts[0] + "".join(part if part.startswith("-") else f"+{part}" for part in parts[1:])
        if denominator == 1:
            return numerator
        negative = len(parts) == 1 and numerator.startswith("-")
        return f"{'-' if negative else ''}\\frac{{{numerator.removeprefix('-') if negative else numerator}}}{{{denominator}}}"


def _latex(coefficient: int, root: int, power: int) -> str:
    factors = (
        (f"\\sqrt{{{root}}}" if root > 1 else "") + ("\\pi" if power else "") + (f"^{{{power}}}" if power not in (0, 1) else "")
    )
    if not factors:
        return str(coefficient)
    return f"{'-' if coefficient < 0 else ''}{abs(coefficient) if abs(coefficient) != 1 else ''}{factors}"


def _square_part(number: int) -> tuple[int, int]:
    """(a, b) with number = a * a * b and b square-free, for numbers up to 10**12."""
    if number == 0:
        return 0, 1
    if number > _LARGEST:
        raise NotExactError("the number under a root is too large for an answer")
    outside, inside, factor = 1, 1, 2
    # Up to the cube root: what is left then has at most two prime factors, so it is a square or square-free.
    while factor**3 <= number:
        while number % factor**2 == 0:
            number //= factor**2
            outside *= factor
        if number % factor == 0:
            number //= factor
            inside *= factor
        factor += 1
    side = isqrt(number)
    return (outside * side, inside) if side * side == number else (outside, inside * number)
