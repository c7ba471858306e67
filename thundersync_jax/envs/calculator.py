"""A calculator for untrusted text: + - * / ( ), unary minus and gcd(a, b, ...).

A recursive-descent parser over exact fractions. Nothing of Python is ever evaluated,
and the four bounds below bound the time as well, to about a millisecond.

    sum      = product (("+" | "-") product)*
    product  = factor (("*" | "/") factor)*
    factor   = "-"* (number | "(" sum ")" | "gcd" "(" sum ("," sum)* ")")
    number   = digits ["." digits]
"""

import math
import re
import string
from fractions import Fraction

MAX_CHARACTERS = 256
MAX_DEPTH = 16  # nested parentheses
MAX_OPERATIONS = 64  # signs, operators and gcd arguments
MAX_DIGITS = 128  # of any numerator or denominator on the way
DECIMALS = 6  # of a result that is not an integer

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\*\*|[-+*/(),]|[a-z]+|\S)", re.ASCII)
_SIGNS = str.maketrans({"−": "-", "×": "*", "÷": "/"})
_LIMIT = 10**MAX_DIGITS


class CalculatorError(ValueError):
    """The text is no expression that the calculator takes; one short line says why."""


def evaluate(text: str) -> str:
    """Returns the value: an integer, or a decimal rounded to six places (half to even).

    There are no trailing zeros and no exponents: 7/2 is 3.5, 1/3 is 0.333333.

    Raises:
      CalculatorError: Anything but an expression within the bounds.
    """
    if len(text) > MAX_CHARACTERS:
        raise CalculatorError(f"more than {MAX_CHARACTERS} characters")
    parser = _Parser(_TOKEN.findall(text.translate(_SIGNS)))
    return _show(parser.expression())


class _Parser:
    """One pass over the tokens; counts operations and depth as it goes."""

    def __init__(self, tokens: list[str]):
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        self._operations = 0

    def expression(self) -> Fraction:
        value = self._sum()
        if self._peek() is not None:
            raise self._unexpected()
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while self._peek() in ("+", "-"):
            sign = 1 if self._operator() == "+" else -1
            value = _bounded(value + sign * self._product())
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._peek() in ("*", "/"):
            if self._operator() == "*":
                value = _bounded(value * self._factor())
            else:
                divisor = self._factor()
                if not divisor:
                    raise CalculatorError("division by zero")
                value = _bounded(value / divisor)
        return value

    def _factor(self) -> Fraction:
        sign = 1
        while self._peek() == "-":
            self._operator()
            sign = -sign
        token = self._peek()
        if token == "(":
            return sign * self._arguments()[0]
        if token == "gcd":
            self._place += 1
            return sign * _gcd(self._arguments(several=True))
        if token is None or token[0] not in string.digits:
            raise self._unexpected()
        self._place += 1
        if len(token) > MAX_DIGITS:
            raise CalculatorError(f"more than {MAX_DIGITS} digits")
        return sign * Fraction(token)

    def _arguments(self, several: bool = False) -> list[Fraction]:
        """Reads "(" sum ")", or with `several` a list of sums."""
        self._expect("(")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CalculatorError(f"more than {MAX_DEPTH} nested parentheses")
        values = [self._sum()]
        while several and self._peek() == ",":
            self._operator()
            values.append(self._sum())
        self._expect(")")
        self._depth -= 1
        return values

    def _peek(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _operator(self) -> str:
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise CalculatorError(f"more than {MAX_OPERATIONS} operations")
        self._place += 1
        return self._tokens[self._place - 1]

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise self._unexpected()
        self._place += 1

    def _unexpected(self) -> CalculatorError:
        token = self._peek()
        if token is None:
            return CalculatorError("expression is incomplete")
        if token == "**":
            return CalculatorError("no powers")
        if token.isalpha():
            return CalculatorError("only gcd is known by name")
        return CalculatorError(f"unexpected {token[:8]!r}")


def _gcd(values: list[Fraction]) -> Fraction:
    if any(value.denominator != 1 for value in values):
        raise CalculatorError("gcd needs integers")
    return Fraction(math.gcd(*(value.numerator for value in values)))


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) >= _LIMIT or value.denominator >= _LIMIT:
        raise CalculatorError(f"more than {MAX_DIGITS} digits")
    return value


def _show(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    # round() of a Fraction is exact; a float would lose digits of large values.
    scaled = round(value * 10**DECIMALS)
    whole, rest = divmod(abs(scaled), 10**DECIMALS)
    digits = f"{whole}.{rest:0{DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{digits}" if scaled < 0 else digits
