r"""Regular expressions as JSON Schema means them, in words that other engines share.

JSON Schema takes them from JavaScript (ECMA-262, by code points). Engines agree on most of the
syntax and not on what `\d`, `\w`, `\s`, `\b`, `.` and `$` mean, so these are spelt out, as are the
escapes that others do not know.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import regex

from guided_smc.errors import ConstraintError

_SECONDS = 1.0
"""What one search may take: patterns of an untrusted schema can be made to backtrack for years."""

_DIGIT = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
# fmt: off
_SPACE = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)
# fmt: on
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "v": 11, "f": 12}
_LAST = 0x10FFFF
_IN_WORD = "[0-9A-Z_a-z]"
_BOUNDARIES = {
    "b": f"(?:(?<={_IN_WORD})(?!{_IN_WORD})|(?<!{_IN_WORD})(?={_IN_WORD}))",
    "B": f"(?:(?<={_IN_WORD})(?={_IN_WORD})|(?<!{_IN_WORD})(?!{_IN_WORD}))",
}


class PatternError(ValueError):
    """Not a regular expression."""


@lru_cache(maxsize=1024)
def portable(pattern: str, *, end: str = "$", strict: bool = False) -> str:
    r"""The same regular expression in words that Rust and Python understand alike.

    Args:
        pattern: In the dialect of JavaScript. The anchors `\A`, `\Z` and `\z` of others pass too.
        end: What `$` becomes: the end of the text, and not in front of a last newline.
        strict: Refuse those anchors.

    Raises:
        PatternError: An escape means nothing.
    """
    out: list[str] = []
    at, inside, opened = 0, False, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            piece, at = _escape(pattern, at + 1, inside, end, strict)
            out.append(piece)
            continue
        if inside:
            if char == "]":
                inside = False
            elif char == "-" and (at == opened or pattern[at + 1 : at + 2] == "]"):
                char = r"\-"
            elif char in "[&~|":
                char = f"\\{char}"
        elif char == "[":
            if pattern.startswith("[^]", at):
                char, at = "(?s:.)", at + 2
            elif pattern.startswith("[]", at):
                char, at = f"[^\\x00-{chr(_LAST)}]", at + 1
            else:
                inside = True
                char = "[^" if pattern.startswith("[^", at) else "["
                at += len(char) - 1
                opened = at + 1
        elif char == "$":
            char = end
        elif char == ".":
            char = r"[^\n\r\u2028\u2029]"
        elif char == "{" and not regex.match(r"\{[0-9]+(,[0-9]*)?\}", pattern[at:]):
            char = r"\{"
        elif char == "}" and not regex.search(r"\{[0-9]+(,[0-9]*)?$", pattern[:at]):
            char = r"\}"
        out.append(char)
        at += 1
    return "".join(out)


@lru_cache(maxsize=1024)
def compiled(pattern: str, strict: bool = False) -> Any:
    """A pattern ready to search with.

    Raises:
        PatternError: It is no regular expression.
    """
    try:
        return regex.compile(portable(pattern, end=r"\Z", strict=strict))
    except (regex.error, OverflowError, RecursionError) as error:
        raise PatternError(str(error)) from error


def found(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text.

    Raises:
        PatternError: It is no regular expression.
        ConstraintError: It takes too long.
    """
    try:
        return compiled(pattern).search(text, timeout=_SECONDS) is not None
    except TimeoutError as error:
        raise ConstraintError(
            f"the pattern {pattern[:100]!r} takes more than {_SECONDS:g} s on a text of "
            f"{len(text)} characters; write it with less backtracking"
        ) from error


def _escape(pattern: str, at: int, inside: bool, end: str, strict: bool) -> tuple[str, int]:
    """What stands for the escape whose letter is at `at`, and where to go on."""
    char = pattern[at : at + 1]
    if not char:
        raise PatternError("a backslash at the end")
    if char.lower() in _CLASSES:
        ranges = _CLASSES[char.lower()]
        if char.isupper():
            ranges = _complement(ranges)
        spelt = "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges)
        return (spelt if inside else f"[{spelt}]"), at + 1
    if char in _BOUNDARIES:
        return (r"\x08" if inside else _BOUNDARIES[char]), at + 1
    if char in _CONTROLS:
        return _char(_CONTROLS[char]), at + 1
    if char == "0":
        return _char(0), at + 1
    if char in "123456789" and not inside:
        digits = "".join(itertools.takewhile("0123456789".__contains__, pattern[at:]))
        return f"(?:\\{digits})", at + len(digits)
    if char == "c" and regex.match("[A-Za-z]", pattern[at + 1 : at + 2]):
        return _char(ord(pattern[at + 1]) % 32), at + 2
    if char in "xu":
        return _by_number(pattern, at)
    if char in "pP" and (name := regex.match(r"\{\^?[\w=]+\}", pattern[at + 1 :])):
        return f"\\{char}{name[0]}", at + 1 + len(name[0])
    if char == "k" and not inside and (name := regex.match(r"<(\w+)>", pattern[at + 1 :])):
        return f"(?P={name[1]})", at + 1 + len(name[0])
    if char in "AZz" and not inside and not strict:
        return ("^" if char == "A" else end), at + 1
    if char.isascii() and char.isalnum():
        raise PatternError(f"\\{char} means nothing")
    return _char(ord(char)), at + 1


def _by_number(pattern: str, at: int) -> tuple[str, int]:
    r"""The character of `\xHH`, `\uHHHH`, a pair of surrogates, or `\u{H}`."""
    forms = {"x": r"x([0-9a-fA-F]{2})", "u": r"u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}"}
    match = regex.match(forms[pattern[at]], pattern[at:])
    if match is None:
        raise PatternError(f"\\{pattern[at]} without its digits")
    code = int(next(filter(None, match.groups())), 16)
    at += len(match[0])
    low = regex.match(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})", pattern[at:])
    if 0xD800 <= code < 0xDC00 and low is not None:
        code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        at += len(low[0])
    if code > _LAST:
        raise PatternError(f"\\u{{{code:x}}} is no character")
    return _char(code), at


def _complement(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    starts = [0, *(b + 1 for _, b in ranges)]
    ends = [*(a - 1 for a, _ in ranges), _LAST]
    return tuple((a, b) for a, b in zip(starts, ends, strict=True) if a <= b)


def _char(code: int) -> str:
    """A character in a way that is literal in and outside of a class."""
    char = chr(code)
    if code < 0x80:
        return char if char.isalnum() or char == "_" else f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else char
