"""A clock that moves only when a test says so."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class HandClock:
    """Implements `slurmbridge.clock.Clock`; `sleep` ends when `advance` has passed its moment."""

    def __init__(self, wall: float = 1_800_000_000.0) -> None:
        self._wall = self._started = wall
        self._monotonic = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def wall(self) -> float:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    def steady(self) -> float:
        return self._started + self._monotonic

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._order), future))
        await future

    def step_wall(self, seconds: float) -> None:
        """Someone sets the clock of the host; no time passes."""
        self._wall += seconds

    async def advance(self, seconds: float) -> None:
        """Let time pass, waking sleepers in order and letting them run."""
        end = self._monotonic + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, future = heapq.heappop(self._sleepers)
            self._wall += due - self._monotonic
            self._monotonic = due
            if not future.done():
                future.set_result(None)
            await settle()
        self._wall += end - self._monotonic
        self._monotonic = end


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)
