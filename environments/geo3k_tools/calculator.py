"""A calculator that a policy may call: arithmetic and the functions of school geometry, bounded in time and size.

Whole numbers and fractions stay exact; a function's value is a float.
"""

import ast
import math
from collections.abc import Callable
from fractions import Fraction
from typing import NoReturn

LONGEST = 200
"""Characters of an expression."""
_MOST_BITS = 512
_LARGEST_EXPONENT = 64
_MOST_ARGUMENTS = 8
_DEEPEST = 30

Number = int | Fraction | float


class CalculatorError(ValueError):
    """Says to the policy what is wrong with its expression."""


def _exact(value: Number) -> Fraction | None:
    return None if isinstance(value, float) else Fraction(value)


def _sqrt(value: Number) -> Number:
    """Exact for squares of fractions."""
    if value < 0:
        raise CalculatorError("sqrt needs a number of 0 or more")
    if (fraction := _exact(value)) is not None:
        over, under = math.isqrt(fraction.numerator), math.isqrt(fraction.denominator)
        if over**2 == fraction.numerator and under**2 == fraction.denominator:
            return Fraction(over, under)
    return math.sqrt(value)


def _round(value: Number, digits: Number = 0) -> Number:
    """Digits behind the point are few: ten to their power is computed."""
    if digits != int(digits) or not -15 <= digits <= 15:
        raise CalculatorError("round takes a number and at most 15 digits")
    exact = _exact(value)
    return round(float(value), int(digits)) if exact is None else round(exact, int(digits))


FUNCTIONS: dict[str, Callable[..., Number]] = {
    "sqrt": _sqrt,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "atan2": math.atan2,
    "hypot": math.hypot,
    "radians": math.radians,
    "degrees": math.degrees,
    "exp": math.exp,
    "log": math.log,
    "log10": math.log10,
    "abs": abs,
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "min": min,
    "max": max,
    "gcd": math.gcd,
}
CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """The value of an expression such as `sqrt(5^2 + 12^2)` or `sin(radians(30)) * 8`; angles are in radians.

    Raises:
        CalculatorError: it is no such expression, has no finite value, or goes beyond the bounds.
    """
    if len(expression) > LONGEST:
        raise CalculatorError(f"the expression is longer than {LONGEST} characters")
    text = expression.strip()
    for symbol, plain in (("^", "**"), ("×", "*"), ("·", "*"), ("÷", "/"), ("−", "-"), ("π", "pi"), ("√", "sqrt")):
        text = text.replace(symbol, plain)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise CalculatorError(f"{expression!r} is not an expression, such as sqrt(5^2 + 12^2)") from error
    try:
        return _shown(_value(tree.body, 0))
    except ZeroDivisionError as error:
        raise CalculatorError("division by zero") from error
    except OverflowError as error:
        raise CalculatorError("the value is too large") from error


def _value(node: ast.expr, depth: int) -> Number:
    if depth > _DEEPEST:
        raise CalculatorError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            # A decimal is meant as written: 0.1 is a tenth.
            return _bounded(Fraction(repr(value)) if isinstance(value, float) and math.isfinite(value) else value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            inner = _value(operand, depth + 1)
            return -inner if isinstance(sign, ast.USub) else inner
        case ast.BinOp(left=left, op=operator, right=right):
            return _bounded(_binary(operator, _value(left, depth + 1), _value(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            if len(args) > _MOST_ARGUMENTS:
                raise CalculatorError(f"{name} takes at most {_MOST_ARGUMENTS} numbers here")
            return _bounded(_called(name, [_value(arg, depth + 1) for arg in args]))
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            raise CalculatorError(f"{name} takes numbers only, such as {name}(2)")
        case ast.Name(id=name) if name in FUNCTIONS:
            raise CalculatorError(f"write {name} with its numbers, such as {name}(2)")
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
            raise CalculatorError(f"{name!r} is not known; known are {', '.join([*FUNCTIONS, *CONSTANTS])}")
    _refuse(node)


def _refuse(node: ast.expr) -> NoReturn:
    raise CalculatorError(f"{type(node).__name__} is not allowed; numbers, + - * / // % ^ and functions are")


def _binary(operator: ast.operator, a: Number, b: Number) -> Number:
    match operator:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / Fraction(b)
        case ast.FloorDiv():
            return a // b
        case ast.Mod():
            return a % b
        case ast.Pow():
            return _power(a, b)
    raise CalculatorError(f"{type(operator).__name__} is not allowed; + - * / // % ^ are")


def _power(base: Number, exponent: Number) -> Number:
    if not -_LARGEST_EXPONENT <= exponent <= _LARGEST_EXPONENT:
        raise CalculatorError(f"an exponent may be {_LARGEST_EXPONENT} at most")
    if exponent == Fraction(1, 2):
        return _sqrt(base)
    if base < 0 and exponent != int(exponent):
        raise CalculatorError("a negative number has no such power")
    exact = _exact(base)
    if exact is None or isinstance(exponent, float) or exponent != int(exponent):
        return math.pow(base, exponent)
    return _power_of(exact, int(exponent))


def _power_of(base: Fraction, exponent: int) -> Fraction:
    return Fraction(base.numerator**exponent, base.denominator**exponent) if exponent >= 0 else 1 / _power_of(base, -exponent)


def _called(name: str, arguments: list[Number]) -> Number:
    try:
        return FUNCTIONS[name](*arguments)
    except CalculatorError:
        raise
    except (TypeError, ValueError) as error:
        raise CalculatorError(f"{name}: {error}") from error


def _bounded(value: Number) -> Number:
    exact = _exact(value)
    if exact is None:
        if not math.isfinite(value):
            raise CalculatorError("the value is not finite")
        return value
    if max(exact.numerator.bit_length(), exact.denominator.bit_length()) > _MOST_BITS:
        raise CalculatorError("the numbers become too large")
    return exact.numerator if exact.denominator == 1 else exact


def _shown(value: Number) -> str:
    """Whole numbers and short decimals as they are, a fraction beside its decimal, a float with 10 digits."""
    if isinstance(value, float):
        return f"{value:.10g}"
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    decimal = f"{float(value):.10g}"
    return decimal if Fraction(decimal) == value else f"{value} = {decimal}"
