"""Times, durations and "no value" as Slurm spells them.

Times in text have no zone: they are local to the command that printed them, in the form that
SLURM_TIME_FORMAT names. We run Slurm's commands with TZ=UTC and the standard form, so nothing here
has to guess; texts of people (reservations typed by hand) may still need a zone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

from slurmbridge.pool.errors import ParseError

NO_TIME: Final = frozenset(
    {"", "(NULL)", "0", "INFINITE", "N/A", "NONE", "NOT_SET", "UNKNOWN", "UNLIMITED"}
)
"""Upper-case texts for a time that is not set. Epoch 0 is Slurm's own "never"."""

NO_DURATION: Final = frozenset(
    {
        "",
        "(NULL)",
        "INFINITE",
        "INVALID",
        "N/A",
        "NONE",
        "NOT_SET",
        "PARTITION_LIMIT",
        "UNKNOWN",
        "UNLIMITED",
    }
)
"""Upper-case texts for a duration that is not set or has no end."""

NO_VALUES: Final[Mapping[int, frozenset[int]]] = {
    16: frozenset({0xFFFE, 0xFFFF}),
    32: frozenset({0xFFFFFFFE, 0xFFFFFFFF}),
    64: frozenset({0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF}),
}
"""NO_VAL and INFINITE by field width in bits (slurm.h)."""

_ISO = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2})(?::([0-9]{2}))?\Z")
_EPOCH = re.compile(r"[0-9]{1,11}\Z")
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?\Z")
_DAY = re.compile(r"([0-9]{1,2}) ([A-Z][a-z]{2}) (?:([0-9]{4})|([0-9]{1,2}):([0-9]{2}))\Z")
_NEAR = re.compile(r"(Ystday|Tomorr|Mon|Tue|Wed|Thu|Fri|Sat|Sun) ([0-9]{1,2}):([0-9]{2})\Z")
_DURATION = re.compile(
    r"(?:([0-9]{1,6})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,2}))?(?:\.[0-9]{1,6})?\Z"
)
_MONTHS: Final = (
    *("Jan", "Feb", "Mar", "Apr", "May", "Jun"),
    *("Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
)
_WEEKDAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_REMEDY: Final = "relative time: set SLURM_TIME_FORMAT=standard for the command that printed it"


def parse_time(
    text: str, tz: tzinfo = UTC, now: float | None = None, *, late: bool = False
) -> float | None:
    """Read a point in time.

    Args:
        text: `2025-08-26T07:00:00`, epoch seconds (SLURM_TIME_FORMAT=%s), or one of `NO_TIME`.
        tz: of the printer. A local time that exists twice (clocks set back) or never (set
            forward) has two readings, an hour apart: the earlier is taken, or the later with
            `late`. So take the earlier for the start of what keeps us away (a reservation) and
            the later for its end: the doubtful hour is never ours.
        now: Unix seconds. With it the relative forms are read too (`14:24:22`, `4 Jun 08:00`,
            `11 Apr 2026`, `Tomorr 08:00`, `Fri 08:00`); a day without a year can be a year off,
            and again the earlier or the later of what it may mean is taken.

    Returns:
        Unix seconds, or None when no time is set.

    Raises:
        ParseError: not a time; or a relative form and no `now`: the text names the remedy.

    """
    text = text.strip().strip('"')
    if text.upper() in NO_TIME:
        return None
    if _EPOCH.match(text):
        return None if int(text) in NO_VALUES[32] else float(text)
    found = _ISO.match(text)
    if found is not None:
        year, month, day, hour, minute, second = (int(g or 0) for g in found.groups())
        return _instant(text, tz, late, (year, month, day), (hour, minute, second))
    if not (_CLOCK.match(text) or _DAY.match(text) or _NEAR.match(text)):
        raise ParseError(text, "not a time of Slurm's")
    if now is None:
        raise ParseError(text, _REMEDY)
    return _relative(text, tz, late, now)


def iso(seconds: float) -> str:
    """`2026-11-30T18:00:00Z`: a time for people, to the second, in UTC."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_duration(text: str) -> int | None:
    """Read a duration: `7-00:00:00`, `1:00:00`, `5:00` (minutes, seconds), `30` (minutes), `1-12`.

    Returns:
        Seconds, or None when it is not set or has no end (`NO_DURATION`).

    Raises:
        ParseError: not a duration.

    """
    text = text.strip()
    if text.upper() in NO_DURATION:
        return None
    found = _DURATION.match(text)
    if found is None:
        raise ParseError(text, "not a duration ([D-]HH:MM:SS)")
    days, first, second, third = found.groups()
    if days is not None:  # D-HH, D-HH:MM, D-HH:MM:SS
        parts = (int(days), int(first), int(second or 0), int(third or 0))
    elif third is not None:
        parts = (0, int(first), int(second), int(third))
    else:  # M or M:S
        parts = (0, 0, int(first), int(second or 0))
    return ((parts[0] * 24 + parts[1]) * 60 + parts[2]) * 60 + parts[3]


def parse_number(value: object, bits: int = 32) -> int | float | None:
    """Read a number of slurmrestd, of any data parser version.

    Args:
        value: `{"set": true, "infinite": false, "number": 5}` (v0.0.39 on), or a bare number, or
            null, "" and other texts for "not set".
        bits: width of the field in slurmctld (16, 32, 64): NO_VAL and INFINITE of this and of
            larger widths are no value. 65534 is a count in a field of 32 bits.

    Returns:
        The number; None when it is not set or infinite. Time fields that were never set come as
        `{"set": true, "number": 0}` and are 0 here: see `parse_json_time`.

    Raises:
        ParseError: neither a number nor one of the known forms for none.

    """
    if isinstance(value, Mapping):
        if value.get("infinite") is True or value.get("set") is not True:
            return None
        value = value.get("number")
    if isinstance(value, bool):
        raise ParseError(str(value), "not a number")
    if value is None or (isinstance(value, str) and value.strip().upper() in NO_DURATION):
        return None
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value.strip()):
        value = int(value)
    if not isinstance(value, int | float):
        raise ParseError(str(value), "not a number of slurmrestd")
    if value in (-1, -2) or any(value in NO_VALUES[w] for w in NO_VALUES if w >= bits):
        return None
    return value


def parse_json_time(value: object) -> float | None:
    """Read a time of slurmrestd: as `parse_number`, but 0 is "never". Unix seconds."""
    number = parse_number(value)
    return float(number) if number else None


def _instant(
    text: str,
    tz: tzinfo,
    late: bool,
    date: tuple[int, int, int],
    clock: tuple[int, int, int] = (0, 0, 0),
) -> float:
    """Turn a local time into Unix seconds; of two readings the earlier, or the later if late."""
    try:
        local = datetime(*date, *clock, tzinfo=tz)
        both = (local.replace(fold=0).timestamp(), local.replace(fold=1).timestamp())
    except (ValueError, OverflowError) as error:
        raise ParseError(text, "no such day or time") from error
    return max(both) if late else min(both)


def _relative(text: str, tz: tzinfo, late: bool, now: float) -> float:
    today = datetime.fromtimestamp(now, tz)
    clock = _CLOCK.match(text)
    if clock is not None:
        hour, minute, second = (int(g or 0) for g in clock.groups())
        return _instant(text, tz, late, _date(today), (hour, minute, second))
    near = _NEAR.match(text)
    if near is not None:
        word, hour, minute = near.group(1), int(near.group(2)), int(near.group(3))
        if word == "Ystday":
            shift = -1
        elif word == "Tomorr":
            shift = 1
        else:  # Slurm writes a weekday for the coming 2 to 6 days only
            shift = (_WEEKDAYS.index(word) - today.weekday()) % 7
        return _instant(text, tz, late, _date(today + timedelta(days=shift)), (hour, minute, 0))
    found = _DAY.match(text)
    if found is None or found.group(2) not in _MONTHS:
        raise ParseError(text, "not a time of Slurm's")
    day, month = int(found.group(1)), _MONTHS.index(found.group(2)) + 1
    if found.group(3):
        return _instant(text, tz, late, (int(found.group(3)), month, day))
    hour, minute = int(found.group(4)), int(found.group(5))
    readings = []
    for year in (today.year - 1, today.year, today.year + 1):
        try:
            at = _instant(text, tz, late, (year, month, day), (hour, minute, 0))
        except ParseError:
            continue  # 29 February
        if abs(at - now) <= 366 * 86400:
            readings.append(at)
    if not readings:
        raise ParseError(text, "no such day or time")
    return max(readings) if late else min(readings)


def _date(day: datetime) -> tuple[int, int, int]:
    return day.year, day.month, day.day
