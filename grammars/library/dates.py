"""Dates, times and durations (ISO 8601)."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from guided_smc.grammars.library.base import ReadyPattern, check_count, check_one_of, listed
from guided_smc.grammars.schema import formats

Form = Literal["calendar", "week", "ordinal"]
Zone = Literal["none", "required", "optional"]

_DATE = formats.PATTERNS["date"].removeprefix("^").removesuffix("$")
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_OFFSET = (
    "(Z|[+]([01][0-9]|2[0-3]):[0-5][0-9]"
    "|-(0[1-9]|1[0-9]|2[0-3]):[0-5][0-9]|-00:(0[1-9]|[1-5][0-9]))"
)
_ZONES = {"none": "", "required": _OFFSET, "optional": f"{_OFFSET}?"}
_CENTURIES = (
    "([02468][048]|[13579][26])",
    "([02468][159]|[13579][37])",
    "([02468][26]|[13579][048])",
    "([02468][37]|[13579][159])",
)
"""The first two digits of a year, by the remainder when divided by four."""


@listed(
    accepted=("2024-02-29", "1999-12-31", "0001-01-01", "2000-02-29"),
    refused=("2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01", "2024-1-1", "20240101", ""),
)
def iso_date(*, form: Form = "calendar") -> ReadyPattern:
    """Dates that exist, leap years included, in the years 0001 to 9999.

    Dialect: ISO 8601-1:2019, extended format (with hyphens), complete dates. Left out: the basic
    format (`20240229`), years or months alone, years of more digits.

    Args:
        form: `"calendar"`: `2024-02-29`; `"week"`: `2024-W09-4`; `"ordinal"`: `2024-060`.

    Returns:
        A constraint whose values are `datetime.date`.

    Raises:
        ConstraintError: There is no such form.
    """
    check_one_of(form, ("calendar", "week", "ordinal"), "form")
    if form == "week":
        return ReadyPattern(_weeks(), "iso_date", read=_week_day)
    if form == "ordinal":
        return ReadyPattern(_ordinals(), "iso_date", read=_day_of_year)
    return ReadyPattern(_DATE, "iso_date", read=datetime.date.fromisoformat)


@listed(
    accepted=("08:30:00", "23:59:59.999999", "00:00:00.5"),
    refused=("24:00:00", "23:59:60", "8:30:00", "08:30", "08:30:00.", "08:30:00Z", "T08:30:00"),
)
def iso_time(*, zone: Zone = "none", digits: int = 6) -> ReadyPattern:
    """Times of a day, to the second or finer.

    Dialect: ISO 8601-1:2019, extended format (with colons), without the `T` in front. Left out:
    `24:00:00`, leap seconds, hours or minutes alone, offsets in hours alone, and `-00:00`, which
    the standard forbids.

    Args:
        zone: Whether the time ends with `Z` or an offset from UTC such as `+05:30`.
        digits: How many there may be behind the point of a second, up to 6.

    Returns:
        A constraint whose values are `datetime.time`.

    Raises:
        ConstraintError: An argument is not one of its values.
    """
    return ReadyPattern(
        _time(zone, digits),
        "iso_time",
        read=lambda text: datetime.time.fromisoformat(_for_python(text)),
    )


@listed(
    accepted=("2024-02-29T08:30:00Z", "1999-12-31T23:59:59.25+05:30", "2000-01-01T00:00:00"),
    refused=(
        "2023-02-29T08:30:00Z",
        "2024-02-29 08:30:00",
        "2024-02-29",
        "2024-02-29T08:30:00-00:00",
        "2024-02-29T24:00:00Z",
    ),
)
def iso_datetime(*, zone: Zone = "optional", digits: int = 6) -> ReadyPattern:
    """Moments: a date that exists, `T`, and a time of that day.

    Dialect: that of `iso_date` and `iso_time`, so a part of RFC 3339 where `zone="required"`.

    Args:
        zone: Whether the text ends with `Z` or an offset from UTC such as `+05:30`.
        digits: How many there may be behind the point of a second, up to 6.

    Returns:
        A constraint whose values are `datetime.datetime`, aware of their zone if they have one.

    Raises:
        ConstraintError: An argument is not one of its values.
    """
    return ReadyPattern(
        f"{_DATE}T{_time(zone, digits)}",
        "iso_datetime",
        read=lambda text: datetime.datetime.fromisoformat(_for_python(text)),
    )


@dataclass(frozen=True)
class Duration:
    """A duration as it is written; only the last component that is there may have a fraction."""

    years: Decimal = Decimal(0)
    months: Decimal = Decimal(0)
    weeks: Decimal = Decimal(0)
    days: Decimal = Decimal(0)
    hours: Decimal = Decimal(0)
    minutes: Decimal = Decimal(0)
    seconds: Decimal = Decimal(0)

    def timedelta(self) -> datetime.timedelta:
        """The length, to the microsecond.

        Raises:
            ValueError: It has years or months, whose length depends on the calendar.
        """
        if self.years or self.months:
            raise ValueError("years and months have no fixed length")
        microseconds = 1_000_000 * (
            self.seconds
            + 60 * self.minutes
            + 3600 * self.hours
            + 86_400 * (self.days + 7 * self.weeks)
        )
        return datetime.timedelta(microseconds=round(microseconds))


@listed(
    accepted=("P1Y2M10DT2H30M", "PT0S", "P3W", "PT36H", "P1DT0.5S", "P0.5Y", "P1Y1D"),
    refused=("", "P", "PT", "P1D2H", "P1M1Y", "1D", "P1.5DT1H", "-P1D", "P1W2D", "PT.5S"),
)
def iso_duration(*, calendar: bool = True) -> ReadyPattern:
    """Durations.

    Dialect: ISO 8601-1:2019: years, months, days, hours, minutes and seconds, any of them left
    out but not all, or weeks alone. Up to six digits each; the last one may have a fraction of up
    to six digits behind a point. Left out: signs, a comma for the point, and the alternative
    format that looks like a date.

    Args:
        calendar: Whether there may be years and months.

    Returns:
        A constraint whose values are `Duration`.

    Raises:
        ConstraintError: `calendar` is no bool.
    """
    check_one_of(calendar, (True, False), "calendar")
    units = "YMD" if calendar else "D"
    date, time = _in_order(units), _in_order("HMS")
    alternatives = (f"{_NUMBER}W", f"({date[1]})", f"({date[0]})?T({time[1]})")
    return ReadyPattern(f"P({'|'.join(alternatives)})", "iso_duration", read=_duration)


_INTEGER = "[0-9]{1,6}"
_NUMBER = rf"{_INTEGER}(\.[0-9]{{1,6}})?"


def _in_order(units: str) -> tuple[str, str]:
    """Components in their order, at least one; first without fractions, then with one at last."""
    whole, last = [], []
    for i, unit in enumerate(units):
        before = "".join(f"({_INTEGER}{u})?" for u in units[:i])
        whole.append(f"{before}{_INTEGER}{unit}")
        last.append(f"{before}{_NUMBER}{unit}")
    return "|".join(whole), "|".join(last)


_COMPONENTS = (
    (("years", "Y"), ("months", "M"), ("weeks", "W"), ("days", "D")),
    (
        ("hours", "H"),
        ("minutes", "M"),
        ("seconds", "S"),
    ),
)


def _duration(text: str) -> Duration:
    parts: dict[str, Decimal] = {}
    for part, components in zip(text[1:].split("T"), _COMPONENTS, strict=False):
        written = {unit: Decimal(number) for number, unit in re.findall("([0-9.]+)([A-Z])", part)}
        parts |= {name: written[unit] for name, unit in components if unit in written}
    return Duration(**parts)


def _time(zone: Zone, digits: int) -> str:
    check_one_of(zone, tuple(_ZONES), "zone")
    check_count(digits, "digits", 0, 6)
    fraction = rf"(\.[0-9]{{1,{digits}}})?" if digits else ""
    return f"{_TIME}{fraction}{_ZONES[zone]}"


def _for_python(text: str) -> str:
    """A time as every version of Python reads it."""
    text = text.replace("Z", "+00:00")
    return re.sub(r"\.[0-9]+", lambda fraction: f"{fraction[0]:0<7}", text)


def _weeks() -> str:
    """ISO week dates; only some years have a 53rd week, and the year 9999 ends in its 52nd."""
    year, before_last = (
        formats._YEAR,
        "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-8][0-9]{3}|9[0-8][0-9]{2}|99[0-8][0-9]|999[0-8])",
    )
    long = []
    for remainder, century in enumerate(_CENTURIES):
        first = 2000 + 100 * remainder  # weeks repeat every 400 years
        years = [y for y in range(100) if datetime.date(first + y, 12, 28).isocalendar()[1] == 53]
        long.append(f"{century}({'|'.join(f'{y:02}' for y in years)})")
    return (
        f"({year}-W((0[1-9]|[1-4][0-9]|5[01])-[1-7]|52-[1-5])"
        f"|({'|'.join(long)})-W53-[1-7]|{before_last}-W52-[67])"
    )


def _week_day(text: str) -> datetime.date:
    year, week, day = text.split("-")
    return datetime.date.fromisocalendar(int(year), int(week[1:]), int(day))


def _ordinals() -> str:
    days = "(00[1-9]|0[1-9][0-9]|[12][0-9]{2}|3[0-5][0-9]|36[0-5])"
    return f"({formats._YEAR}-{days}|{formats._LEAP_YEAR}-366)"


def _day_of_year(text: str) -> datetime.date:
    year, day = map(int, text.split("-"))
    return datetime.date(year, 1, 1) + datetime.timedelta(days=day - 1)
