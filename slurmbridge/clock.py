"""The clock that everything gets passed in: the only place that reads the time.

`wall` is compared with Slurm's and Kubernetes' times, `monotonic` measures ages and deadlines; a
wall clock may jump, so no age is ever a difference of two wall times of different moments. `steady`
is for moments that are kept, compared with each other and read by people: Unix seconds that no step
of the host's clock moves.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Time as a value that can be passed in; tests pass one that they move by hand."""

    def wall(self) -> float:
        """Unix seconds (UTC)."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    def steady(self) -> float:
        """Unix seconds at the start of the process and the seconds since: never steps."""

    async def sleep(self, seconds: float) -> None:
        """Wait; zero or less gives other tasks a turn."""


class SystemClock:
    """The clock of this host."""

    def __init__(self) -> None:
        self._started = self.wall() - self.monotonic()

    def wall(self) -> float:
        """Unix seconds (UTC)."""
        return time.time()  # noqa: TID251 - this is where it is wrapped

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        return time.monotonic()

    def steady(self) -> float:
        """Unix seconds at the start of the process and the seconds since: never steps."""
        return self._started + self.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait; zero or less gives other tasks a turn."""
        await asyncio.sleep(seconds)
