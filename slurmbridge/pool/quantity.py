"""Kubernetes quantities, read exactly: `500m`, `2Gi`, `1e3`, `1.5`.

A quantity is a decimal number with a binary suffix (`Ki` to `Ei`), a decimal suffix (`n u m k M G
T P E`) or an exponent. Kubernetes rounds sums up, and so do we: first sum, then round, so that two
containers of 500m are one CPU and not two. Amounts are whole numbers of billionths (`NANO`), as
Kubernetes itself keeps them: what is finer is rounded up. Text of a user never makes us compute a
huge power: length and exponent are bounded before anything is computed.

Source: apimachinery `pkg/api/resource/quantity.go` (grammar in the comment of `Quantity`).
"""

from __future__ import annotations

import re
from typing import Final

from slurmbridge.pool.errors import ParseError

Number = str | int | float
"""A quantity as JSON carries it: nearly always a string, but a bare number is allowed."""

NANO: Final = 10**9
"""Billionths in one: amounts in this module are integers of this unit."""

MAX_CHARS: Final = 64
"""Longest text that is looked at; the longest that the API server writes has some 20 characters."""
MAX_EXPONENT: Final = 30
"""Largest power of ten; Kubernetes itself saturates at 2^63, which is below 10^19."""
MAX_COUNT: Final = 4096
"""Most extended resources that are believed: no node has as many GPUs, time-sliced or not."""
MAX_CPUS: Final = 1 << 20
"""Most CPUs that are believed of a pod or node."""
MAX_MIB: Final = 1 << 40
"""Most memory that is believed of a pod or node: one EiB, in MiB."""

_GRAMMAR: Final = re.compile(
    r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?[0-9]{1,4}))?"
)
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def nano(text: Number) -> int:
    """The value of a quantity in billionths, rounded up (away from zero) where finer.

    Raises:
        ParseError: not a Kubernetes quantity, or one with an absurd length or exponent.

    """
    word = str(text)
    if len(word) > MAX_CHARS:
        raise ParseError(word, f"a quantity has at most {MAX_CHARS} characters")
    if word.isascii() and word.isdigit():
        return int(word) * NANO
    match = _GRAMMAR.fullmatch(word)
    if match is None:
        raise ParseError(word, "expected a Kubernetes quantity such as 4, 500m, 1.5 or 2Gi")
    sign, whole, part, binary, decimal, exponent = match.groups()
    digits = whole + (part or "")
    if not digits:
        raise ParseError(word, "expected a Kubernetes quantity such as 4, 500m, 1.5 or 2Gi")
    power = 9 - len(part or "")
    value = int(digits)
    if binary:
        value <<= _BINARY[binary]
    elif decimal:
        power += _DECIMAL[decimal]
    elif exponent:
        if abs(int(exponent)) > MAX_EXPONENT:
            raise ParseError(word, f"the exponent of a quantity is at most {MAX_EXPONENT}")
        power += int(exponent)
    scale = int(10 ** abs(power))
    value = value * scale if power >= 0 else -(-value // scale)
    return -value if sign == "-" else value


def parse_count(text: Number) -> int:
    """A number of extended resources (GPUs): whole and not negative.

    Args:
        text: `8`, `"8"`, `"8e0"`; `"1k"` is 1000: lawful, though hardly meant.

    Returns:
        0 to `MAX_COUNT`.

    Raises:
        ParseError: no quantity, a fraction, negative, or more than `MAX_COUNT`.

    """
    if type(text) is str and len(text) <= 3 and text.isascii() and text.isdigit():
        return int(text)  # nearly every pod ends here
    value = nano(text)
    if value % NANO:
        raise ParseError(str(text), "GPUs are counted in whole numbers; ask for 1, 2, 3 ...")
    if value < 0:
        raise ParseError(str(text), "a number of GPUs cannot be negative")
    if value > MAX_COUNT * NANO:
        raise ParseError(str(text), f"more than {MAX_COUNT} GPUs cannot be on one node")
    return value // NANO


def amount(text: Number) -> int:
    """A CPU or memory quantity in billionths of a CPU or byte: `nano`, and not negative.

    Raises:
        ParseError: no quantity, or negative.

    """
    value = nano(text)
    if value < 0:
        raise ParseError(str(text), "a CPU or memory quantity cannot be negative")
    return value


def cpus(*texts: Number) -> int:
    """Whole Slurm CPUs that hold the sum of CPU quantities: `cpus("500m", "600m") == 2`.

    Raises:
        ParseError: one is no quantity, negative, or the sum is above `MAX_CPUS`.

    """
    return whole_cpus(sum(map(amount, texts)))


def mib(*texts: Number) -> int:
    """MiB that hold the sum of memory quantities: `mib("1Gi", "1") == 1025`.

    Raises:
        ParseError: one is no quantity, negative, or the sum is above `MAX_MIB`.

    """
    return whole_mib(sum(map(amount, texts)))


def whole_cpus(value: int) -> int:
    """Billionths of a CPU as whole CPUs, rounded up.

    Raises:
        ParseError: more than `MAX_CPUS`.

    """
    return _whole(value, NANO, MAX_CPUS, "CPUs")


def whole_mib(value: int) -> int:
    """Billionths of a byte as MiB, rounded up.

    Raises:
        ParseError: more than `MAX_MIB`.

    """
    return _whole(value, NANO << 20, MAX_MIB, "MiB")


def _whole(value: int, unit: int, most: int, name: str) -> int:
    rounded = -(-value // unit)
    if rounded > most:
        raise ParseError(str(rounded), f"more than {most} {name} cannot be on one node")
    return rounded
