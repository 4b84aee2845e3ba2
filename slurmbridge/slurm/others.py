"""All nodes of Slurm but one, as a host list that slurmctld reads quickly: pure.

An allocation on one named node still makes slurmctld look at every node of the partition, which on
22.05 costs it 35 ms with 5,000 nodes. Those that are excluded it leaves out at once: 3 ms.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable
from typing import Final

from slurmbridge.pool.policy import OPTION_RE

MOST_CHARS: Final = 2048
"""Longest list; a pool whose names do not fold is not worth the bytes, in each job's record."""
_TAIL: Final = re.compile(r"(.*?)(\d{1,18})", re.DOTALL | re.ASCII)


class Others:
    """Host lists over a fixed set of names.

    Args:
        names: of all nodes. Names that may not be the value of an option make it say nothing.

    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._single: list[str] = []
        self._numbers: dict[tuple[str, int], list[int]] = {}
        self._is_fit = all(OPTION_RE.fullmatch(name) for name in self._names)
        for name in self._names:
            tail = _TAIL.fullmatch(name)
            if tail is None:
                self._single.append(name)
            else:
                self._numbers.setdefault((tail[1], len(tail[2])), []).append(int(tail[2]))
        self._runs = {key: _runs(sorted(found)) for key, found in self._numbers.items()}

    def are(self, names: Collection[str]) -> bool:
        """Whether these are the names."""
        return len(names) == len(self._names) and self._names.issuperset(names)

    def but(self, name: str) -> str:
        """All names but one: `gpu[0001-0006,0008-5000]`; "" when it is unknown, alone, or too long.

        Cost: O(runs).
        """
        if name not in self._names or not self._is_fit:
            return ""
        tail = _TAIL.fullmatch(name)
        parts = sorted(one for one in self._single if one != name)
        for (prefix, width), runs in self._runs.items():
            left = runs
            if tail is not None and (tail[1], len(tail[2])) == (prefix, width):
                left = _without(runs, int(tail[2]))
            if left:
                parts.append(f"{prefix}[{','.join(_text(run, width) for run in left)}]")
        text = ",".join(parts)
        return text if len(text) <= MOST_CHARS else ""


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def _without(runs: list[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    at = bisect_right(runs, (number, float("inf"))) - 1
    low, high = runs[at]
    halves = [(low, number - 1), (number + 1, high)]
    return [*runs[:at], *(half for half in halves if half[0] <= half[1]), *runs[at + 1 :]]


def _text(run: tuple[int, int], width: int) -> str:
    low, high = (str(number).zfill(width) for number in run)
    return low if low == high else f"{low}-{high}"
