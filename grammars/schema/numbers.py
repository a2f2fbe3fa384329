"""Bounds and `multipleOf` of decimal numbers, in words in which llguidance loses none of them.

Next to a bound of 0.25, llguidance knows numbers with no decimal place and those with two or more,
but not 0.2; of the multiples of 0.25 it knows 2.50 and not 2.5. And it forgets that a bound is
exclusive beside `multipleOf`. Numbers with fewer places lie within rounder bounds, and are
multiples of something rounder, which can be said of them apart.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMERIC = (*BOUNDS, "multipleOf")

_MOST_PLACES = 15
"""More than these a float64 does not hold."""


def alternatives(said: dict[str, int | float]) -> list[dict[str, int | float]]:
    """What to say in the place of numeric keywords: any of these, all within what was said.

    Args:
        said: Numeric keywords of a schema, with the exclusive bounds as numbers.
    """
    exact = {keyword: Fraction(repr(value)) for keyword, value in said.items()}
    step = exact.get("multipleOf")
    places = max(map(_places, said.values()), default=0)
    exclusive = "exclusiveMinimum" in said or "exclusiveMaximum" in said
    if places > _MOST_PLACES or (places < 2 and not (step and exclusive)):
        return [said]
    found = [said if step is None else _rounded(exact, step)]
    for fewer in range(1, places):
        unit = Fraction(1, 10**fewer)
        rounder = _rounded(exact, unit if step is None else _common_multiple(step, unit))
        if step is None:
            del rounder["multipleOf"]
        if rounder.get("minimum", -math.inf) <= rounder.get("maximum", math.inf):
            found.append(rounder)
    return [each for i, each in enumerate(found) if each not in found[:i]]


def _rounded(exact: dict[str, Fraction], step: Fraction) -> dict[str, int | float]:
    """The bounds as the outermost multiples of a step that are within them."""
    lows = [step * math.ceil(exact["minimum"] / step)] if "minimum" in exact else []
    if "exclusiveMinimum" in exact:
        lows.append(step * (math.floor(exact["exclusiveMinimum"] / step) + 1))
    highs = [step * math.floor(exact["maximum"] / step)] if "maximum" in exact else []
    if "exclusiveMaximum" in exact:
        highs.append(step * (math.ceil(exact["exclusiveMaximum"] / step) - 1))
    rounded = {"multipleOf": _number(step)}
    if lows:
        rounded["minimum"] = _number(max(lows))
    if highs:
        rounded["maximum"] = _number(min(highs))
    return rounded


def _common_multiple(a: Fraction, b: Fraction) -> Fraction:
    """The least one."""
    scale = math.lcm(a.denominator, b.denominator)
    return Fraction(math.lcm(int(a * scale), int(b * scale)), scale)


def _places(number: int | float) -> int:
    """Decimal places."""
    exponent: Any = Decimal(repr(number)).normalize().as_tuple().exponent
    return max(0, -exponent)


def _number(exact: Fraction) -> int | float:
    return int(exact) if exact.denominator == 1 else float(exact)
