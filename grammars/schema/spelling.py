r"""One spelling of JSON for each value: how texts stand for it, piece by piece.

JSON lets the same value be written in many ways: `"n\u0061me"` for `"name"`, `\/` for `/`, `1.0`,
`10e-1` or `1` for one. The usual spelling is that of `json.dumps` with `ensure_ascii=False`, with
numbers written out as short as possible. What a string spells is known as it is read; what a number
does, at its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

MOST_DIGITS = 330
"""Of a number that is written out; those of float64 have no more in front of the point."""

DELETE = b"\x7f"
"""A character that llguidance spells as itself in names, and elsewhere as an escape."""

Kind = Literal["outside", "string", "escape", "number"]

_SHORT = {
    '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
}  # fmt: skip
_USUAL = {c: f"\\{e}".encode() for e, c in _SHORT.items() if c != "/"}
_PLAIN = re.compile(rb'[^"\\]*')
_NUMBER_HERE = re.compile(rb"-?[0-9][0-9.eE+\-]*|-")
NUMBER = re.compile(r"(-?)(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{0,4}|[0-9a-fA-F]{4}\\(u[0-9a-fA-F]{0,4})?)")
BEGUN = re.compile(r"(-?)(0|[1-9][0-9]*|(?!.))(\.(?:[0-9]+|(?!.)))?([eE][+-]?[0-9]*)?")
"""A number, and one that may go on: sign, whole part, fraction, exponent."""


class Way(NamedTuple):
    """What bytes do in a text.

    Attributes:
        head: What they spell, in the usual spelling, but for a number or escape at the end.
        kind: Where they lead: `outside` of strings, into a `string`, into an `escape` or a
            `number`.
        text: Of the escape or the number so far.
        literal: Whether they are in the usual spelling themselves, and without a DEL.
    """

    head: bytes
    kind: Kind
    text: str
    literal: bool


def read(kind: Kind, text: str, data: bytes) -> Way | None:
    """What bytes do outside of strings, in one, or behind the beginning of an escape.

    Args:
        kind: Where they come; not in a number.
        text: Of the escape so far.
        data: The bytes.

    Returns:
        None if no JSON goes on like this.
    """
    head, at = bytearray(), 0
    while at < len(data):
        if kind == "escape":
            text += chr(data[at])
            at += 1
            character = spelt_by(text)
            if character is not None:
                head += usual(character)
                kind, text = "string", ""
            elif not spans(text):
                return None
        elif kind == "string":
            match = _PLAIN.match(data, at)
            assert match is not None
            head += match[0]
            at = match.end()
            if at < len(data):
                if data[at] == ord('"'):
                    head.append(data[at])
                    kind = "outside"
                else:
                    kind, text = "escape", "\\"
                at += 1
        elif (match := _NUMBER_HERE.match(data, at)) is not None:
            at, number = match.end(), match[0].decode()
            if at == len(data):
                return Way(bytes(head), "number", number, head + match[0] == data)
            written = written_out(number)
            if written is None:
                return None
            head += written.encode()
        else:
            kind = "string" if data[at] == ord('"') else kind
            head.append(data[at])
            at += 1
    return Way(bytes(head), kind, text, head == data and DELETE not in data)


def usual(character: str) -> bytes:
    """How a character of a string is written in the usual spelling."""
    if character in _USUAL:
        return _USUAL[character]
    if character < " ":
        return b"\\u%04x" % ord(character)
    return character.encode()


def spelt_by(escape: str) -> str | None:
    """The character of an escape, or None if more has to come (or nothing can)."""
    if len(escape) == 2:
        return _SHORT.get(escape[1])
    if len(escape) == 6 or len(escape) == 12:
        found = spans(escape)
        return chr(found[0][0]) if found and found[0][0] == found[0][1] else None
    return None


@lru_cache(4096)
def spans(escape: str) -> tuple[tuple[int, int], ...]:
    r"""The characters that a beginning of an escape may become, as ranges of code points.

    Behind `\` that is any, since any may be written as `\u`. Half of a surrogate pair is none.
    """
    if escape == "\\":
        return ((0, 0xFFFF), (0x10000, 0x10FFFF))
    if not _ESCAPE.fullmatch(escape):
        return ()
    low, high = _units(escape[2:6])
    highs = (max(low, 0xD800), min(high, 0xDBFF))
    if len(escape) > 6:
        if low != high or highs != (low, low):
            return ()
        first, last = _units(escape[8:12])
        first, last = max(first, 0xDC00), min(last, 0xDFFF)
        begin = 0x10000 + ((low - 0xD800) << 10) - 0xDC00
        return ((begin + first, begin + last),) if first <= last else ()
    found = [(low, min(high, 0xD7FF)), (max(low, 0xE000), high)]
    found.append((0x10000 + ((highs[0] - 0xD800) << 10), 0x103FF + ((highs[1] - 0xD800) << 10)))
    return tuple((a, b) for a, b in found if a <= b)


def _units(digits: str) -> tuple[int, int]:
    return int(digits.ljust(4, "0"), 16), int(digits.ljust(4, "f"), 16)


@lru_cache(4096)
def beginnings(low: int, high: int) -> tuple[bytes, ...]:
    """Bytes of which one begins each character in a range of code points, in its usual spelling.

    What else may begin like one of them is in the range, too.
    """
    ascii_ = range(low, min(high, 0x7F) + 1)
    return (
        *(usual(chr(c)) for c in sorted(ascii_, key=lambda c: not chr(c).isalnum())),
        *_blocks(max(low, 0x80), high),
    )


def _blocks(low: int, high: int) -> Iterator[bytes]:
    """The same outside ASCII: as few beginnings as possible."""
    while low <= high:
        if 0xD800 <= low <= 0xDFFF:
            low = 0xE000
            continue
        data, size = chr(low).encode(), 1
        while len(data) > 1 and low % (64 * size) == 0 and low + 64 * size - 1 <= high:
            data, size = data[:-1], 64 * size
        yield data
        low += size


@lru_cache(4096)
def written_out(number: str) -> str | None:
    """A number without exponent and as short as possible; None for none, or one too long."""
    match = NUMBER.fullmatch(number)
    if match is None:
        return None
    sign, whole, fraction, exponent = match.groups()
    if fraction is None and exponent is None and len(whole) <= MOST_DIGITS:
        return number if number != "-0" else "0"
    digits = (whole + (fraction or ".")[1:]).lstrip("0")
    if not digits:
        return "0"
    power = (exponent or "e0")[1:]
    if len(power) > 9:
        return None
    shift = int(power) - len((fraction or ".")[1:])
    short = digits.rstrip("0")
    shift += len(digits) - len(short)
    if max(len(short) + max(shift, 0), -shift) > MOST_DIGITS:
        return None
    if shift >= 0:
        return sign + short + "0" * shift
    short = short.rjust(1 - shift, "0")
    return f"{sign}{short[:shift]}.{short[shift:]}"
