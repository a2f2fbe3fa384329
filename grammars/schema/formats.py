"""String formats: those that are enforced, and how, and those that only look as if they were.

llguidance knows many; dates and times it knows by shape only (`2021-02-29` passes), so these and
what it does not know are spelt out here as patterns, where a pattern can say it. Years start at
0001, and a leap second is 23:59:60 UTC, in a time zone that is half hours from it.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from guided_smc.grammars.matching import EXACT_MASKS, CompiledGrammar, Limits, every_byte
from guided_smc.grammars.schema.regexes import PatternError, compiled, found

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"


def _leap_seconds() -> str:
    """23:59:60 UTC as the clocks of all time zones show it, with offsets of half hours."""
    shown = [r"23:59:60(\.[0-9]+)?[Zz]"]
    for hour, minute in itertools.product(range(24), (29, 59)):
        ahead, behind = 60 * hour + minute - 1439, 1439 - 60 * hour - minute
        offsets = (f"{m % 1440 // 60:02}:{m % 60:02}" for m in (ahead, behind))
        shown.append(rf"{hour:02}:{minute}:60(\.[0-9]+)?(\+{next(offsets)}|-{next(offsets)})")
    return "|".join(shown)


_TIME = rf"({_HOUR_MINUTE}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOUR_MINUTE})|{_leap_seconds()})"

_POINTER = "(/([^/~]|~[01])*)*"
_PERCENT = "%[0-9A-Fa-f]{2}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_BEYOND_ASCII = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U000efffd"


def _uri_reference(letters: str, scheme: str = "?") -> str:
    """RFC 3986, and with letters beyond ASCII RFC 3987; `scheme` is how often there is one."""
    unreserved = rf"0-9A-Za-z._~{letters}\-"
    char = rf"([{unreserved}!$&'()*+,;=:@]|{_PERCENT})"
    segment, first = f"{char}*", rf"([{unreserved}!$&'()*+,;=@]|{_PERCENT})+"
    user = rf"(([{unreserved}!$&'()*+,;=:]|{_PERCENT})*@)?"
    host = rf"(\[[0-9A-Fa-f:.]+\]|\[[vV][0-9A-Fa-f]+\.[{unreserved}!$&'()*+,;=:]+\]"
    host += rf"|([{unreserved}!$&'()*+,;=]|{_PERCENT})*)"
    authority = f"//{user}{host}(:[0-9]*)?(/{segment})*"
    rooted = f"/({char}+(/{segment})*)?"
    named = rf"[A-Za-z][A-Za-z0-9+.\-]*:({authority}|{rooted}|{char}+(/{segment})*)?"
    plain = f"|{authority}|{rooted}|{first}(/{segment})*|" if scheme == "?" else ""
    return rf"^({named}{plain})(\?({char}|[/?])*)?(#({char}|[/?])*)?$"


def _ipv6() -> str:
    """RFC 3986: eight groups, of which `::` stands for one or more and the last two are IPv4."""
    group = "[0-9A-Fa-f]{1,4}"
    last = rf"({group}:{group}|({_BYTE}\.){{3}}{_BYTE})"
    forms = [f"({group}:){{6}}{last}", f"::({group}:){{5}}{last}"]
    for before in range(5):
        begun = f"(({group}:){{0,{before}}}{group})?::"
        forms.append(f"{begun}({group}:){{{4 - before}}}{last}")
    forms += [f"(({group}:){{0,5}}{group})?::{group}", f"(({group}:){{0,6}}{group})?::"]
    return f"({'|'.join(forms)})"


_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~\\-]+"
_LABEL = r"[0-9A-Za-z]([0-9A-Za-z\-]{0,61}[0-9A-Za-z])?"
_EMAIL = (
    rf'({_ATOM}(\.{_ATOM})*|"([\x20\x21\x23-\x5b\x5d-\x7e]|\\[\x20-\x7e])*")'
    rf"@({_LABEL}(\.{_LABEL})*|\[({_BYTE}\.){{3}}{_BYTE}\]|\[IPv6:{_ipv6()}\])"
)
_VARIABLE = rf"([0-9A-Za-z_]|{_PERCENT})(\.?([0-9A-Za-z_]|{_PERCENT}))*(:[1-9][0-9]{{0,3}}|\*)?"

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "ipv6": f"^{_ipv6()}$",
    "email": f"^{_EMAIL}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
    "uri-reference": _uri_reference(""),
    "iri-reference": _uri_reference(_BEYOND_ASCII),
    "iri": _uri_reference(_BEYOND_ASCII, scheme="1"),
    "uri-template": (
        rf"^([^\x00-\x20\x22'%<>\\^`{{|}}\x7f]|{_PERCENT}"
        rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(,{_VARIABLE})*\}})*$"
    ),
    "idn-email": r'^("[^"@\\]+"|[^@\s".]+(\.[^@\s".]+)*)@(\[[^\]\s]+\]|[^@\s\[\]]+)$',
}
"""Formats that become a pattern (RFC 3339, 3986, 3987, 5321, 6570, 6901)."""

ENFORCED = frozenset({"duration", "hostname", "ipv4", "uuid", "uri"})
"""Formats that llguidance enforces exactly."""

HINTS = frozenset({"password", "path", "binary", "float", "double"})
"""Formats that any string, or any number, satisfies."""

BOUNDS = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    # llguidance computes with float64: the outermost 1023 integers on each side are given up.
    "int64": (-(2**63 - 1024), 2**63 - 1024),
}
"""Integer formats of OpenAPI and others, as bounds."""


def is_known(name: str) -> bool:
    """Whether values can be held against a format."""
    ours = name in PATTERNS or name in ENFORCED or name in HINTS or name in BOUNDS
    return ours or name == "regex" or name in _of_library().checkers


def holds(name: str, value: Any) -> bool:
    """Whether a value has a format; one that does not concern it holds."""
    if name in BOUNDS:
        low, high = BOUNDS[name]
        other = isinstance(value, bool | str | list | dict | None)
        return other or bool(low <= value <= high)
    if not isinstance(value, str) or name in HINTS:
        return True
    if name in PATTERNS:
        return found(PATTERNS[name], value)
    if name in ENFORCED:
        return _matches(name, value)
    if name == "regex":
        return _is_pattern(value)
    return _of_library().conforms(value, name)


def _of_library() -> Any:
    """What jsonschema checks; that depends on the packages that are installed."""
    return Draft202012Validator.FORMAT_CHECKER


def _is_pattern(text: str) -> bool:
    try:
        compiled(text, strict=True)
    except PatternError:
        return False
    return True


@cache
def _grammar(name: str) -> CompiledGrammar:
    schema = {"type": "string", "format": name}
    return CompiledGrammar(
        f"{EXACT_MASKS}start: %json {json.dumps(schema)}\n", every_byte(), Limits(), name
    )


def _matches(name: str, text: str) -> bool:
    """Whether llguidance finds a format in a text: the same judgement as in its masks."""
    state = _grammar(name).start()
    spelt = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return all(state.advance(byte) for byte in spelt.encode()) and state.accepting
