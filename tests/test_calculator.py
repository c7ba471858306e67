"""The calculator is exact where it answers and refuses everything else at once."""

import contextlib
import math
import random
import time
from fractions import Fraction

import pytest

from thundersync_jax.envs import calculator
from thundersync_jax.envs.calculator import CalculatorError, evaluate

# An error must come back long before any tool deadline; typical is 0.1 ms.
QUICK_SECS = 0.5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12+7-3", "16"),
        ("4*3", "12"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("10-4-3", "3"),
        ("24/4/2", "3"),
        ("-5+2", "-3"),
        ("2*-3", "-6"),
        ("--5", "5"),
        ("-(2+3)", "-5"),
        ("7 × 6 − 84 ÷ 2", "0"),
        ("gcd(26,760)", "2"),
        ("gcd( 12, 18, 27 )", "3"),
        ("gcd(-4,6)+1", "3"),
        ("gcd(2*6,gcd(18,27))", "3"),
        ("1.5*2", "3"),
        ("7/2", "3.5"),
        ("1/3", "0.333333"),
        ("-2/3", "-0.666667"),
        ("1/3*3", "1"),
        ("100000000000000000001/2", "50000000000000000000.5"),
        ("-1/10000000", "0"),
    ],
)
def test_value_is_exact_and_printed_one_way(text, value):
    assert evaluate(text) == value


def test_random_expressions_equal_an_independent_evaluation():
    rng = random.Random(5)
    for _ in range(300):
        text, value = _expression(rng, depth=3)
        shown = evaluate(text)
        assert abs(Fraction(shown) - value) <= Fraction(1, 2 * 10**6), text
        assert value.denominator > 1 or shown == str(value.numerator), text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9**9**9**9", "power"),
        ("2**3", "power"),
        ("2^3", "unexpected"),
        ("__import__('os').system('touch X')", "unexpected"),
        ("import os", "only gcd"),
        ("lambda:1", "only gcd"),
        ("[1]*9", "unexpected"),
        ("1e9", "only gcd"),
        ("1_000", "unexpected"),
        ("1,000", "unexpected"),
        ("٤+1", "unexpected"),
        ("²", "unexpected"),
        ("1\x00", "unexpected"),
        ("1 2", "unexpected"),
        ("1+2=", "unexpected"),
        ("7//2", "unexpected"),
        (".5", "unexpected"),
        ("", "incomplete"),
        ("   ", "incomplete"),
        ("(1", "incomplete"),
        ("1+", "incomplete"),
        ("gcd", "incomplete"),
        ("gcd()", "unexpected"),
        ("(1,2)", "unexpected"),
        ("gcd(1/2,3)", "integers"),
        ("1/0", "zero"),
        ("1/(2-2)", "zero"),
        ("(" * 17 + "1" + ")" * 17, "nested"),
        ("(" * 256, "nested"),
        ("gcd(" * 60 + "1" + ")", "nested"),
        ("-" * 255 + "1", "operations"),
        ("1" + "+1" * 100, "operations"),
        ("gcd(1" + ",1" * 100 + ")", "operations"),
        ("9" * 129, "digits"),
        ("9" * 100 + "*" + "9" * 100, "digits"),
        ("1/" + "9" * 100 + "/" + "9" * 100, "digits"),
        ("1+" * 100_000 + "1", "characters"),
        ("9" * 5_000_000, "characters"),
    ],
)
def test_refused_text_is_one_short_line_and_quick(text, message, tmp_path, monkeypatch):
    """google/tunix c80286a9: reward code evaluated model text as Python."""
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    with pytest.raises(CalculatorError, match=message) as caught:
        evaluate(text)
    assert time.monotonic() - began < QUICK_SECS
    assert len(str(caught.value)) < 64
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_no_text_raises_anything_but_a_calculator_error():
    rng = random.Random(7)
    pieces = [*list("0123456789+-*/(),. gcd\x00²٤\n"), "gcd(", "**", "−", "×", "÷"]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        with contextlib.suppress(CalculatorError):
            evaluate(text)


def test_largest_allowed_expressions_are_quick():
    nines = "9" * 60
    limit = calculator.MAX_CHARACTERS
    for text in (
        f"{nines}*{nines}",
        f"gcd({nines},{nines[1:]}8)",
        f"1/{nines}+1/{nines}",
    ):
        assert len(text) <= limit
        began = time.monotonic()
        evaluate(text)
        assert time.monotonic() - began < QUICK_SECS


def _expression(rng: random.Random, depth: int) -> tuple[str, Fraction]:
    if not depth or rng.random() < 0.2:
        number = rng.randrange(100)
        return str(number), Fraction(number)
    left, a = _expression(rng, depth - 1)
    right, b = _expression(rng, depth - 1)
    kind = rng.choice(["+", "-", "*", "/", "neg", "gcd"])
    if kind == "neg":
        return f"-({left})", -a
    if kind == "gcd" and a.denominator == b.denominator == 1:
        return f"gcd({left},{right})", Fraction(math.gcd(int(a), int(b)))
    if kind == "/" and b:
        return f"({left})/({right})", a / b
    if kind == "*":
        return f"({left})*({right})", a * b
    if kind == "-":
        return f"{left}-({right})", a - b
    return f"{left}+{right}", a + b
