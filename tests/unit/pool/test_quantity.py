"""Kubernetes quantities."""

from __future__ import annotations

import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.quantity import MAX_COUNT, NANO, amount, cpus, mib, nano, parse_count

COUNTS = {
    "plain": ("8", 8),
    "JSON number": (8, 8),
    "none": ("0", 0),
    "leading zeros": ("008", 8),
    "plus sign": ("+3", 3),
    "minus zero": ("-0", 0),
    "decimal kilo": ("1k", 1000),
    "binary kilo": ("2Ki", 2048),
    "exponent": ("8e0", 8),
    "capital exponent": ("2E2", 200),
    "fraction that is whole": ("2.0", 2),
    "float that is whole": (4.0, 4),
    "milli that is whole": ("3000m", 3),
    "trailing point": ("5.", 5),
    "the most we believe": (str(MAX_COUNT), MAX_COUNT),
}


@pytest.mark.parametrize(("text", "expected"), COUNTS.values(), ids=COUNTS)
def test_gpus_are_counted(text: str | float, expected: int) -> None:
    assert parse_count(text) == expected


NO_COUNTS = {
    "negative": ("-1", "negative"),
    "fraction": ("1.5", "whole"),
    "milli": ("500m", "whole"),
    "finer than nano": ("1.0000000000001", "whole"),
    "a billion by exponent": ("1e9", "cannot be on one node"),
    "two billion by suffix": ("2Gi", "cannot be on one node"),
    "one more than believed": (str(MAX_COUNT + 1), "cannot be on one node"),
    "2^63": ("9223372036854775808", "cannot be on one node"),
    "empty": ("", "expected a Kubernetes quantity"),
    "word": ("all", "expected a Kubernetes quantity"),
    "point only": (".", "expected a Kubernetes quantity"),
    "sign only": ("+", "expected a Kubernetes quantity"),
    "suffix only": ("Gi", "expected a Kubernetes quantity"),
    "space": (" 1", "expected a Kubernetes quantity"),
    "line feed": ("1\n", "expected a Kubernetes quantity"),
    "unknown suffix": ("1K", "expected a Kubernetes quantity"),
    "two suffixes": ("1kGi", "expected a Kubernetes quantity"),
    "hexadecimal": ("0x8", "expected a Kubernetes quantity"),
    "underscore": ("1_0", "expected a Kubernetes quantity"),
    "digits of another script": ("٣", "expected a Kubernetes quantity"),
    "superscript": ("²", "expected a Kubernetes quantity"),
    "not a number": (float("nan"), "expected a Kubernetes quantity"),
    "infinite": (float("inf"), "expected a Kubernetes quantity"),
    "exponent bomb": ("1e9999", "exponent"),
    "longer exponent bomb": ("1e99999999", "expected a Kubernetes quantity"),
    "very long": ("1" * 100_000, "at most 64 characters"),
}


@pytest.mark.parametrize(("text", "remedy"), NO_COUNTS.values(), ids=NO_COUNTS)
def test_what_is_no_number_of_gpus_is_refused_with_a_remedy(text: str | float, remedy: str) -> None:
    with pytest.raises(ParseError, match=remedy):
        parse_count(text)


CPUS = {
    "nothing": ((), 0),
    "two halves are one": (("500m", "500m"), 1),
    "a little more than one is two": (("1", "1m"), 2),
    "eleven tenths": (("1.1",), 2),
    "whole": (("4", "12"), 16),
    "one nano": (("1n",), 1),
    "thousand slices": (("1m",) * 1000, 1),
}


@pytest.mark.parametrize(("texts", "expected"), CPUS.values(), ids=CPUS)
def test_cpus_are_summed_before_they_are_rounded_up(texts: tuple[str, ...], expected: int) -> None:
    assert cpus(*texts) == expected


MIBS = {
    "nothing": ((), 0),
    "one byte": (("1",), 1),
    "binary": (("1Gi", "512Mi"), 1536),
    "decimal": (("1G",), 954),
    "two halves of a MiB": (("512Ki", "512Ki"), 1),
    "milli bytes exist": (("128974848000m",), 123),
    "exponent": (("129e6",), 124),
}


@pytest.mark.parametrize(("texts", "expected"), MIBS.values(), ids=MIBS)
def test_memory_is_summed_before_it_is_rounded_up(texts: tuple[str, ...], expected: int) -> None:
    assert mib(*texts) == expected


@pytest.mark.parametrize("text", ["-1", "-1n", "x", "1e31"])
def test_amounts_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ParseError):
        amount(text)


@pytest.mark.parametrize(("read", "text"), [(cpus, "2000000"), (cpus, "1E"), (mib, "1e25")])
def test_sums_beyond_belief_are_refused(read: type, text: str) -> None:
    with pytest.raises(ParseError, match="cannot be on one node"):
        read(text)


def test_what_is_finer_than_a_billionth_is_rounded_up_as_kubernetes_does() -> None:
    assert nano("0.0000000001") == 1
    assert nano("-0.0000000001") == -1
    assert nano("1.5") == NANO * 3 // 2
