"""How long to wait before the next try: exponential, with jitter, bounded, and reset by success.

Pure but for the random source, which is passed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Backoff:
    """Growing delays.

    Args:
        uniform: returns a float in [0, 1).
        base_s: the first delay.
        cap_s: the longest delay.
        factor: how much longer each next one is.

    The n-th delay in a row lies in [d/2, d) with d = min(cap_s, base_s * factor^n): half of it is
    certain, so that a failing peer is never asked at once, and half is chance, so that replicas
    drift apart.

    """

    def __init__(
        self,
        uniform: Callable[[], float],
        base_s: float = 0.2,
        cap_s: float = 30.0,
        factor: float = 2.0,
    ) -> None:
        self._uniform = uniform
        self._base_s = base_s
        self._cap_s = cap_s
        self._factor = factor
        self._next_s = base_s

    def delay(self, at_least_s: float | None = None) -> float:
        """Seconds to wait now; the next one in a row is longer.

        Args:
            at_least_s: what the peer asked for (Retry-After); None: nothing.

        """
        whole = self._next_s
        self._next_s = min(self._cap_s, whole * self._factor)
        waited = whole / 2 + self._uniform() * whole / 2
        return max(waited, at_least_s or 0.0)

    def reset(self) -> None:
        """It went well: the next delay is the first again."""
        self._next_s = self._base_s
