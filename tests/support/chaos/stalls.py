"""How long this machine stood still, or had no time for us, while a chaos run went on.

A thread sleeps a tenth of a second again and again and notes how late it wakes up. A deadline of
the run is put off by what was lost meanwhile: a bridge that had no processor for a minute could not
do in that minute what it has a minute for. No promise is: a GPU has one owner on a busy machine too.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY_S = 0.1
LATE_S = 0.1
"""Lateness up to this is the machine's ordinary way; it is not counted."""


class Stalls:
    """Watches from `__enter__` to `__exit__`; may be asked at any time, and by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        began = self._clock()
        while not self._end.wait(EVERY_S):
            began = self.tick(began)

    def tick(self, began: float) -> float:
        """A sleep that began then has ended now; begin of the next one."""
        now = self._clock()
        if (late := now - began - EVERY_S) > LATE_S:
            self._found.append((now, late))
        return now

    def between(self, begin: float, end: float) -> float:
        """Seconds lost between two moments of the clock, in stalls that ended after `begin`."""
        return sum(late for at, late in list(self._found) if at > begin and at - late < end)

    def since(self, begin: float) -> float:
        """Seconds lost since a moment of the clock."""
        return self.between(begin, self._clock())

    def is_over(self, begin: float, limit_s: float) -> bool:
        """Whether what began then has had its time, without what was lost meanwhile."""
        return self._clock() - begin > limit_s + self.since(begin)

    @property
    def lost_s(self) -> float:
        """Seconds lost in all."""
        return sum(late for _, late in list(self._found))

    @property
    def longest_s(self) -> float:
        """The longest stall, in seconds."""
        return max((late for _, late in list(self._found)), default=0.0)
