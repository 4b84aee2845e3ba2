"""When a watcher's looks begin: every so often from begin to begin, one after the other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Cadence:
    """Due times of looks that never overlap.

    After a look that has lasted too long the next one begins at once, and those after it catch up.
    Behind by more than one look, the rest is given up: on a machine that is too slow looks follow
    one another, and after a long stall there is no burst of them.
    """

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._due = clock()

    def pause_s(self) -> float:
        """Seconds until the next look is to begin. To be asked once a look, at its end."""
        now = self._clock()
        self._due = max(self._due + self._every_s, now - self._every_s)
        return max(0.0, self._due - now)
