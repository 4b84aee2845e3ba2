"""Quantities against the parser of the Kubernetes Python client (exact decimals)."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.quantity import NANO, cpus, mib, nano, parse_count

SUFFIXES = ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
NUMBERS = st.from_regex(r"[0-9]{1,9}(\.[0-9]{1,9})?", fullmatch=True)
QUANTITIES = st.tuples(NUMBERS, st.sampled_from(SUFFIXES)).map("".join)
EXPONENTS = st.tuples(NUMBERS, st.integers(-12, 12))


@given(QUANTITIES)
def test_suffixes_are_read_as_the_client_reads_them(text: str) -> None:
    with localcontext(prec=80):  # the client computes with the caller's precision
        assert nano(text) == math.ceil(parse_quantity(text) * NANO)


@given(EXPONENTS)
def test_exponents_are_read_as_decimals(pair: tuple[str, int]) -> None:
    number, power = pair
    assert nano(f"{number}e{power}") == math.ceil(Decimal(f"{number}e{power}") * NANO)


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_rounding_comes_after_the_sum(millis: list[int]) -> None:
    assert cpus(*(f"{m}m" for m in millis)) == math.ceil(sum(millis) / 1000)
    assert mib(*(f"{m}Ki" for m in millis)) == math.ceil(sum(millis) / 1024)


@given(st.text(max_size=80))
def test_no_text_whatever_does_anything_but_a_number_or_a_parse_error(text: str) -> None:
    try:
        count = parse_count(text)
    except ParseError:
        return
    assert 0 <= count <= 4096
