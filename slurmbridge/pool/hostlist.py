"""Slurm host lists: `gpu[001-004,007]-ib[0-1],login` to names and back.

Source: the host list part of slurm.conf(5) and `scontrol show hostnames`, Slurm 22.05 to 26.05.
The padding rule is Slurm's: a range prints its numbers at the width of its first number, so that
`n[08-10]` is n08, n09, n10, and n[8-10] is n8, n9, n10. `node2` and `node02` are two nodes.

The text may come from a user (an annotation) or be cut by a narrow column: whatever is not surely
a list of names is refused, and no text can make more than `MAX_NAMES` names of more than
`MAX_NAME_CHARS` characters each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from typing import Final

from slurmbridge.pool.errors import ParseError

MAX_NAMES: Final = 200_000
"""Most names that one expression may give: three times the largest cluster that Slurm is run on."""

MAX_NAME_CHARS: Final = 255
"""Longest name: Slurm itself holds host names to 64, a DNS name to 253 characters."""

MAX_TEXT_CHARS: Final = 8 * 1024 * 1024
"""Longest expression: `MAX_NAMES` names of 40 characters, without any range."""

NO_NODES: Final = frozenset({"", "(null)", "None assigned", "N/A", "n/a"})
"""What Slurm's commands print where a job or a reservation has no nodes."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")  # no leading "-": never an option
_PIECE = re.compile(r"([^\[\],\s]*)(?:\[([^\[\]\s]*)\])?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?\Z")
_DIGITS = re.compile(r"\d+")
_TAIL = re.compile(r"(.*?)([0-9]{1,18})\Z", re.DOTALL)


def expand(text: str) -> list[str]:
    """Give the names of a host list, in the order of the text; a name given twice comes twice.

    Args:
        text: an expression as Slurm prints it; `NO_NODES` texts give no names.

    Returns:
        The names, at most `MAX_NAMES`.

    Raises:
        ParseError: not a host list, or it makes too many or too long names. `part` is the
            element at fault, not the whole list.

    Cost:
        O(names). `expand("n[1-2]x[3-4]")` is n1x3, n1x4, n2x3, n2x4.

    """
    text = text.strip()
    if text in NO_NODES:
        return []
    if len(text) > MAX_TEXT_CHARS:
        raise ParseError(text, f"host list is longer than {MAX_TEXT_CHARS} characters")
    names: list[str] = []
    for element in _elements(text):
        _expand_element(element, names)
    return names


def fold(names: Iterable[str]) -> str:
    """Give the shortest usual expression for a set of names: sorted, each name once.

    Only the last number of a name is folded, as Slurm does: `r1n1`, `r1n2` is `r1n[1-2]`.
    `set(expand(fold(names)))` is `set(names)`.

    Raises:
        ParseError: something in names is not a host name.

    """
    single: set[str] = set()
    numbered: dict[str, dict[int, set[int]]] = {}
    for name in set(names):
        _check_name(name, name)
        tail = _TAIL.match(name)
        if tail is None:
            single.add(name)
        else:
            prefix, digits = tail.groups()
            numbered.setdefault(prefix, {}).setdefault(len(digits), set()).add(int(digits))
    folded = [(name, name) for name in single]
    for prefix, by_width in numbered.items():
        ranges = _ranges(by_width)
        only = ranges[0] if len(ranges) == 1 and "-" not in ranges[0] else f"[{','.join(ranges)}]"
        folded.append((prefix, prefix + only))
    return ",".join(text for _, text in sorted(folded))


def _elements(text: str) -> Iterable[str]:
    """Split at the commas outside brackets."""
    depth = start = 0
    for at, char in enumerate(text):
        if char == "[":
            depth += 1
            if depth > 1:
                raise ParseError(text[start : at + 1], "bracket inside a bracket in a host list")
        elif char == "]":
            depth -= 1
            if depth < 0:
                raise ParseError(text[start : at + 1], "bracket closed before it is opened")
        elif char == "," and not depth:
            yield text[start:at]
            start = at + 1
    if depth:
        raise ParseError(text[start:], "bracket not closed in a host list (cut text?)")
    yield text[start:]


def _expand_element(element: str, names: list[str]) -> None:
    """Append the names of one element (no comma outside its brackets)."""
    pieces: list[list[str]] = []
    count, at, width = 1, 0, 0
    while at < len(element):
        piece = _PIECE.match(element, at)
        if piece is None or piece.end() == at:
            raise ParseError(element, f"not a host name: unexpected {element[at]!r}")
        literal, numbers = piece.groups()
        at = piece.end()
        if literal:
            pieces.append([literal])
            width += len(literal)
        if numbers is not None:
            options = _numbers(numbers, element, MAX_NAMES // count)
            pieces.append(options)
            count *= len(options)
            width += max(map(len, options))
        if width > MAX_NAME_CHARS:
            raise ParseError(element, f"host name is longer than {MAX_NAME_CHARS} characters")
    if len(names) + count > MAX_NAMES:
        raise ParseError(element, f"host list gives more than {MAX_NAMES} names")
    if not pieces:
        raise ParseError(element, "empty element in a host list (cut text?)")
    made = ["".join(parts) for parts in product(*pieces)] if len(pieces) > 1 else pieces[0]
    _check_name(made[0], element)
    names.extend(made)


def _numbers(text: str, element: str, limit: int) -> list[str]:
    """Give the numbers of one bracket as padded texts, at most limit."""
    out: list[str] = []
    for part in text.split(","):
        found = _RANGE.match(part)
        if found is None:
            raise ParseError(element, f"bad range {part!r} in a host list")
        low, high = found.group(1), found.group(2)
        if high is None:
            out.append(low)
            high = low
        else:
            first, last = int(low), int(high)
            if last < first:
                raise ParseError(element, f"reversed range {part!r} in a host list")
            if len(high) != len(low) and (high.startswith("0") or len(high) < len(low)):
                raise ParseError(element, f"range {part!r} mixes widths: which nodes are meant?")
            if last - first >= limit - len(out):
                raise ParseError(element, f"host list gives more than {MAX_NAMES} names")
            width = len(low)
            out.extend(f"{number:0{width}d}" for number in range(first, last + 1))
        if len(out) > limit:
            raise ParseError(element, f"host list gives more than {MAX_NAMES} names")
    return out


def _ranges(by_width: dict[int, set[int]]) -> list[str]:
    """Give `3`, `08-10`, ... for numbers grouped by how many digits they were written with."""
    runs: list[tuple[int, int, int]] = []  # width of the first, first, last
    for width in sorted(by_width):
        for number in sorted(by_width[width]):
            if runs and number == runs[-1][2] + 1:
                begun, first, _ = runs[-1]
                padded = begun > 1 and first < 10 ** (begun - 1)
                # 9 and 10 are one range only where nothing is padded.
                if begun == width or (not padded and number >= 10 ** (width - 1)):
                    runs[-1] = (begun, first, number)
                    continue
            runs.append((width, number, number))
    return [
        f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}"
        for width, first, last in runs
    ]


def _check_name(name: str, part: str) -> None:
    if len(name) > MAX_NAME_CHARS or _NAME.match(name) is None:
        raise ParseError(part, "not a host name")


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that reads numbers in a name as numbers: `w-10` after `w-9`."""
    parts = [(-1, text) for text in _DIGITS.split(name)]
    numbers = [(int(digits[:18]), "") for digits in _DIGITS.findall(name)]
    return tuple(x for pair in zip(parts, [*numbers, (-1, "")], strict=False) for x in pair)
