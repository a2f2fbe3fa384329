"""JSON values read exactly: numbers of any size, and equality as JSON Schema means it.

Numbers are `int` where they are written without fraction and exponent, and `Decimal` otherwise.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from pydantic import BaseModel

_MOST_DIGITS = 4000
"""Of an `int`; Python refuses to read longer ones, which so become `Decimal`."""


def exact_number(text: str) -> int | Decimal:
    """A number of any size.

    Raises:
        ValueError: The exponent is beyond what Decimal holds.
    """
    if len(text) <= _MOST_DIGITS and not set(text) & set(".eE"):
        return int(text)
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text} is too large") from error


def is_whole(number: int | Decimal) -> bool:
    """Whether a number has no fraction."""
    if isinstance(number, int):
        return True
    digits, exponent = _short(number)
    return exponent >= 0 or not digits


def is_multiple(number: int | Decimal, of: int | Decimal) -> bool:
    """Whether `number / of` is whole, computed without rounding."""
    (a, a_exponent), (b, b_exponent) = _short(Decimal(number)), _short(Decimal(of))
    if not a:
        return True
    shift = a_exponent - b_exponent
    n, d = int(a), int(b)
    if shift >= 0:
        return n * pow(10, shift, d) % d == 0
    return -shift <= len(a) and n % (d * 10**-shift) == 0


def key_of(value: Any) -> str:
    """Equal for values that JSON Schema calls equal (1 and 1.0; not 1 and true)."""
    return json.dumps(_canonical(value), sort_keys=True)


def key_of_object(value: Any) -> Hashable:
    """Equal for equal objects that were read from JSON: models, dataclasses, sets, plain data."""
    kind = type(value)
    if isinstance(value, dict):
        return kind, frozenset((key_of_object(k), key_of_object(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(key_of_object, value))
    if isinstance(value, list | tuple | deque):
        return kind, tuple(map(key_of_object, value))
    if isinstance(value, BaseModel):
        return kind, key_of_object(dict(value))
    if is_dataclass(value):
        return kind, key_of_object({f.name: getattr(value, f.name) for f in fields(value)})
    return kind, value


def _canonical(value: Any) -> Any:
    """JSON data with numbers as texts that are the same for equal ones, and strings marked."""
    if isinstance(value, dict):
        return {key: _canonical(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    if isinstance(value, str):
        return f"'{value}"
    if isinstance(value, float):
        value = Decimal(repr(value))
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        number = Decimal(value)
        digits, exponent = _short(number)
        return f"{'-' * number.is_signed()}{digits}e{exponent}" if digits else "0"
    return value


def _short(number: Decimal) -> tuple[str, int]:
    """Significant digits without zeros around them, and the exponent of the last one."""
    _, digits, exponent = number.as_tuple()
    significand = "".join(map(str, digits)).lstrip("0")
    short = significand.rstrip("0")
    return short, int(exponent) + len(significand) - len(short)
