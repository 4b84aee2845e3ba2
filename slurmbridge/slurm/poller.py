"""When to read slurmctld next: as often as its share allows, never two at a time.

The pace follows the cost: if a reading takes c seconds of slurmctld's time and may take the share
b, the next one starts c / b seconds after it, within bounds. A slow slurmctld is asked less often,
all by itself; a dead one with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from slurmbridge.clock import Clock
from slurmbridge.pool.errors import PeerError
from slurmbridge.pool.record import SlurmSnapshot

LONGEST_PAUSE_S: Final = 4.0
"""Longest pause after failures, seconds: how late we may notice that slurmctld is back."""

COSTS: Final = 3
"""The cost is seen from outside, so a busy host of ours looks like a busy slurmctld: the least of
so many readings counts, and a lasting rise is followed after as many."""
SPREAD: Final = 0.1
"""An interval is made longer by up to this share, so that readers of one slurmctld part."""


class Pace(msgspec.Struct, frozen=True):
    """Bounds of the pace.

    budget: share of slurmctld's time, 0 to 1. min_s, max_s: shortest and longest interval.
    """

    budget: float = 0.05
    min_s: float = 1.0
    max_s: float = 30.0


def next_interval(pace: Pace, cost_s: float, jitter: float = 0.0) -> float:
    """Give the seconds from the end of a reading to the start of the next.

    Args:
        pace: bounds.
        cost_s: slurmctld's time that the last reading took.
        jitter: 0 to 1.

    """
    interval = min(pace.max_s, max(pace.min_s, cost_s / pace.budget))
    return interval * (1 + SPREAD * jitter)


def backoff(pace: Pace, failures: int, jitter: float = 0.0) -> float:
    """Give the seconds to wait after so many failures in a row (1 or more).

    Doubles from a quarter of min_s to 4 s (or max_s): a slurmctld that is down is not burdened by
    being asked, and the first readers after its restart find the claims that it forgot. The jitter
    (0 to 1) takes off up to half, so that not all come at once.
    """
    wait = min(pace.max_s, LONGEST_PAUSE_S, pace.min_s / 4 * 2.0 ** min(failures - 1, 20))
    return wait * (1 - jitter / 2)


class Poller:
    """Reads again and again, one reading at a time.

    Args:
        read: makes a snapshot (`SlurmReader.snapshot`).
        on_snapshot, on_failure: told of each result, in order; they must not raise. on_snapshot is
            told the seconds until the next reading too.
        pace: bounds.
        clock: to wait by.
        jitter: a random number of [0, 1) at each call.

    """

    def __init__(
        self,
        read: Callable[[], Awaitable[SlurmSnapshot]],
        on_snapshot: Callable[[SlurmSnapshot, float], None],
        on_failure: Callable[[PeerError], None],
        *,
        pace: Pace,
        clock: Clock,
        jitter: Callable[[], float],
    ) -> None:
        self._read = read
        self._on_snapshot = on_snapshot
        self._on_failure = on_failure
        self._pace = pace
        self._clock = clock
        self._jitter = jitter
        self._poked = asyncio.Event()

    def poke(self) -> None:
        """Ask for a reading soon: `min_s` after the end of the last instead of when it is due."""
        self._poked.set()

    async def run(self) -> None:
        """Read until cancelled. Errors that are not a `PeerError` are bugs and end it."""
        failures = 0
        costs: deque[float] = deque(maxlen=COSTS)
        while True:
            self._poked.clear()
            try:
                snapshot = await self._read()
            except PeerError as error:
                failures += 1
                self._on_failure(error)
                # A poke does not hurry a slurmctld that is in trouble.
                await self._clock.sleep(backoff(self._pace, failures, self._jitter()))
                continue
            failures = 0
            costs.append(snapshot.cost_s)
            interval = next_interval(self._pace, min(costs), self._jitter())
            self._on_snapshot(snapshot, interval)
            await self._wait(interval)

    async def _wait(self, seconds: float) -> None:
        first = min(self._pace.min_s, seconds)
        await self._clock.sleep(first)
        if self._poked.is_set() or seconds <= first:
            return
        rest = asyncio.ensure_future(self._clock.sleep(seconds - first))
        poke = asyncio.ensure_future(self._poked.wait())
        try:
            await asyncio.wait((rest, poke), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (rest, poke):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
