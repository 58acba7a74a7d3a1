"""Reads exact numbers from LaTeX or plain text, as a policy or a dataset writes them."""

import re
from fractions import Fraction

from opentinker.environments.geo3k.exact import MOST_POWERS, Exact, NotExactError

LONGEST = 200
"""Characters of an answer that is read."""
_DEEPEST = 20
_UNITS = re.compile(
    r"(?:\\(?:text|mathrm|textrm)\s*\{[^{}]*\}|\\degree|\\circ"
    r"|(?<![a-z])(?:square |sq\.? )?(?:degrees?|units?|cm|mm|km|m|inches|in|ft|feet|meters?)(?![a-z]))"
    r"(?:\s*\^\s*\{?2\}?|²)?"
)
_TOKEN = re.compile(r"\s*(?:(\d+\.\d+|\.\d+|\d+)|(\\?[dt]?frac|\\?sqrt|√|\\?pi|π|\\cdot|\\times|[-+*/^(){}×·÷−]))")
_SAME = {"×": "*", "·": "*", "\\cdot": "*", "\\times": "*", "÷": "/", "−": "-", "√": "sqrt", "π": "pi"}


def parse_exact(text: str) -> Exact:
    """Reads `7`, `2.5`, `15/7`, `\\frac{15}{7}`, `2\\sqrt{13}`, `2√13`, `9π`, `3 sqrt(2)/2`, `x = 35^\\circ`, `12 cm`.

    Raises:
        NotExactError: it is no such number.
    """
    if len(text) > LONGEST:
        raise NotExactError("the answer is too long")
    text = re.sub(r"\\left|\\right|\\!|\$", "", text).replace("\\,", " ").strip().rstrip(". ")
    text = re.sub(r"^\s*(?:m\s*)?(?:\\angle\s*|∠\s*)?[A-Za-z]{1,3}\s*(?:=|\\approx|≈)\s*", "", text).lower()
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°", " ", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = _UNITS.sub(" ", text)
    tokens, place = [], 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            raise NotExactError(f"{text[place:].strip()[:20]!r} is no part of a number")
        number, symbol = match.groups()
        tokens.append(number or _SAME.get(symbol, symbol.lstrip("\\").replace("dfrac", "frac").replace("tfrac", "frac")))
        place = match.end()
    reader = _Reader(tokens)
    value = reader.sum()
    if reader.left:
        raise NotExactError(f"{reader.left[0]!r} has no place in the number")
    return value


class _Reader:
    """Recursive descent, to a bounded depth."""

    def __init__(self, tokens: list[str]) -> None:
        self.left = tokens[::-1]
        self._depth = 0

    @property
    def next(self) -> str:
        return self.left[-1] if self.left else ""

    def take(self, *expected: str) -> str:
        if not self.left or (expected and self.next not in expected):
            raise NotExactError(f"{' or '.join(expected) or 'a number'} is missing")
        return self.left.pop()

    def sum(self) -> Exact:
        value = self.product()
        while self.next in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> Exact:
        value = self.signed()
        while True:
            if self.next in ("*", "/"):
                value = value * self.signed() if self.take() == "*" else value / self.signed()
            elif self.next in ("(", "{", "sqrt", "pi", "frac"):
                value = self.mixed(value) if self.next == "frac" else value * self.power()
            else:
                return value

    def mixed(self, whole: Exact) -> Exact:
        """`2\\frac{1}{2}` is two and a half, as in school; a root or pi before a fraction is a factor."""
        fraction = self.power()
        a, b = whole.rational(), fraction.rational()
        return (
            whole + fraction if a is not None and b is not None and a.denominator == 1 and 0 < b < 1 <= a else whole * fraction
        )

    def signed(self) -> Exact:
        sign = 1
        while self.next in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        value = self.power()
        return value if sign > 0 else -value

    def power(self) -> Exact:
        value = self.atom()
        if self.next == "^":
            self.take()
            exponent = self.atom().rational()
            if exponent == Fraction(1, 2) and (inside := value.rational()) is not None:
                return Exact.root(inside)
            if exponent is None or exponent.denominator != 1 or not 0 <= exponent <= MOST_POWERS:
                raise NotExactError("no such power")
            result = Exact.number(1)
            for _ in range(int(exponent)):
                result *= value
            return result
        return value

    def atom(self) -> Exact:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NotExactError("the brackets are too deep for an answer")
        value = self._atom()
        self._depth -= 1
        return value

    def _atom(self) -> Exact:
        token = self.take()
        if token == "(":
            value = self.sum()
            self.take(")")
            return value
        if token == "{":
            value = self.sum()
            self.take("}")
            return value
        if token == "pi":
            return Exact.pi()
        if token == "frac":
            return self.argument(digit=True) / self.argument(digit=True)
        if token == "sqrt":
            inside = self.argument().rational()
            if inside is None:
                raise NotExactError("a root of a root")
            return Exact.root(inside)
        if token[0].isdigit() or token[0] == ".":
            if len(token) > 15:
                raise NotExactError("the number is too large for an answer")
            return Exact.number(Fraction(token))
        raise NotExactError(f"{token!r} has no place in the number")

    def argument(self, *, digit: bool = False) -> Exact:
        """Of a root or a fraction: in brackets, or what stands next; a fraction takes one digit of a bare number."""
        if digit and len(self.next) > 1 and self.next.isdigit():
            digits = self.take()
            self.left += [digits[1:], digits[0]]
        return self.atom()
