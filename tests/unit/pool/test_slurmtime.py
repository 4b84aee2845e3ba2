import json
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.slurmtime import parse_duration, parse_json_time, parse_number, parse_time
from tests.unit.pool.vectors import rows

READERS = {
    "time": parse_time,
    "duration": parse_duration,
    "number": lambda text: parse_number(json.loads(text)),
}
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(("what", "text", "expected"), rows("times.tsv", 3))
def test_the_collected_texts_are_read_or_refused(what, text, expected):
    if expected.startswith("ERROR"):
        with pytest.raises(ParseError, match=expected.removeprefix("ERROR ")):
            READERS[what](text)
    else:
        value = READERS[what](text)
        assert value == (None if expected == "NONE" else float(expected))


def utc(*parts):
    return datetime(*parts, tzinfo=UTC).timestamp()


def test_a_time_is_local_to_the_zone_of_its_printer():
    assert parse_time("2026-01-15T08:00:00", BERLIN) == utc(2026, 1, 15, 7)
    assert parse_time("2026-07-15T08:00:00", BERLIN) == utc(2026, 7, 15, 6)


def test_of_a_time_that_exists_twice_the_earlier_is_a_start_and_the_later_an_end():
    assert parse_time("2026-10-25T02:30:00", BERLIN) == utc(2026, 10, 25, 0, 30)
    assert parse_time("2026-10-25T02:30:00", BERLIN, late=True) == utc(2026, 10, 25, 1, 30)


def test_a_time_that_does_not_exist_is_held_to_its_outer_readings():
    assert parse_time("2026-03-29T02:30:00", BERLIN) == utc(2026, 3, 29, 0, 30)
    assert parse_time("2026-03-29T02:30:00", BERLIN, late=True) == utc(2026, 3, 29, 1, 30)


NOW = utc(2026, 5, 13, 12)  # a Wednesday
RELATIVE = {
    "14:24:22": utc(2026, 5, 13, 14, 24, 22),
    "Ystday 23:59": utc(2026, 5, 12, 23, 59),
    "Tomorr 08:00": utc(2026, 5, 14, 8),
    "Fri 08:00": utc(2026, 5, 15, 8),
    "Tue 08:00": utc(2026, 5, 19, 8),
    "11 Apr 2026": utc(2026, 4, 11),
    "13 May 2026": utc(2026, 5, 13),
}


@pytest.mark.parametrize(("text", "expected"), RELATIVE.items(), ids=RELATIVE)
def test_relative_forms_are_read_when_the_time_of_printing_is_known(text, expected):
    assert parse_time(text, UTC, NOW) == expected


def test_a_day_without_a_year_starts_as_early_and_ends_as_late_as_it_can():
    assert parse_time("4 Jun 08:00", UTC, NOW) == utc(2025, 6, 4, 8)
    assert parse_time("4 Jun 08:00", UTC, NOW, late=True) == utc(2026, 6, 4, 8)


@pytest.mark.parametrize("text", ["25:00:00", "31 Feb 08:00", "4 Xyz 08:00", "32 Jan 2026"])
def test_a_relative_form_of_no_real_time_is_refused(text):
    with pytest.raises(ParseError):
        parse_time(text, UTC, NOW)


def test_small_fields_have_their_own_no_value():
    assert parse_number(65534, bits=16) is None
    assert parse_number(0xFFFFFFFE, bits=16) is None
    assert parse_number(0xFFFFFFFE, bits=64) == 0xFFFFFFFE


def test_a_json_time_of_zero_was_never_set():
    assert parse_json_time({"set": True, "infinite": False, "number": 0}) is None
    assert parse_json_time(0) is None
    assert parse_json_time({"set": True, "infinite": False, "number": 1762529748}) == 1762529748
