"""String formats that are enforced, and those that only look as if they were.

llguidance knows most formats; dates and times it knows by shape only (`2021-02-29` passes), so
they are spelt out here. Years start at 0001, and a leap second is 23:59:60 UTC.
"""

from __future__ import annotations

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = (
    rf"({_HOUR_MINUTE}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOUR_MINUTE})"
    r"|23:59:60(\.[0-9]+)?([Zz]|[+-]00:00))"
)

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
}
"""Formats that become a pattern (RFC 3339)."""

PORTABLE_SPACES = "^[^\ufeff\u0085]*$"
"""Beside a pattern that speaks of white space: regular expressions of JavaScript, which JSON
Schema means, and those of Rust disagree whether these two characters are."""

ENFORCED = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
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
