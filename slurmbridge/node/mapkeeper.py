"""The node's map of GPUs, read again and again, and taken only while it is what slurmd goes by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

from slurmbridge.clock import Clock
from slurmbridge.log import get_logger
from slurmbridge.node import loaded
from slurmbridge.node.book import Book
from slurmbridge.node.device import DeviceMap
from slurmbridge.node.inventory import MapReading
from slurmbridge.pool.errors import PeerError

_log = get_logger(__name__)

GOOD_S: Final = 10.0
"""Pause between two readings of a map that holds."""
FAULT_S: Final = 2.0
"""And of one with a fault: slurmctld may be asked for slurmd's start each time."""


class MapKeeper:
    """Keeps the map.

    Args:
        read: reads gres.conf and driver; blocks, and runs in a thread.
        stamp: of gres.conf: another one is read at once. Must not block.
        book: keeps what slurmd has loaded over restarts of the agent.
        started: slurmd's start (Unix seconds), None: not known. Raises PeerError.
        clock: for pauses.

    Attributes:
        devices: the map as it is now.

    """

    def __init__(
        self,
        read: Callable[[], MapReading],
        stamp: Callable[[], Hashable],
        book: Book,
        started: Callable[[], Awaitable[float | None]],
        clock: Clock,
    ) -> None:
        self._read = read
        self._stamp = stamp
        self._seen: Hashable = None
        self._book = book
        self._started = started
        self._clock = clock
        self._next = 0.0
        self.devices = DeviceMap(faults=("not looked yet",))

    async def refresh(self) -> bool:
        """Read it where that is due; whether the map has changed."""
        stamp = self._stamp()
        if stamp == self._seen and self._clock.monotonic() < self._next:
            return False
        self._seen = stamp
        fresh = await self._settled(await asyncio.to_thread(self._read))
        self._next = self._clock.monotonic() + (FAULT_S if fresh.fault else GOOD_S)
        if fresh == self.devices:
            return False
        if fresh.fault:
            _log.error("this node takes no pods", why=fresh.fault)
        else:
            _log.info("device map", gpus=[f"{g.index}={g.path}={g.uuid}" for g in fresh.gpus])
        self.devices = fresh
        if not fresh.fault:
            # A map with a fault has no GPUs: the last good one tells the hooks who uses what.
            self._book.gpus = fresh.gpus
            self._book.save()
        return True

    async def _settled(self, reading: MapReading) -> DeviceMap:
        """The map, or why slurmd may go by another one."""
        kept = self._book.loaded
        if reading.devices.fault or loaded.is_settled(reading.files, kept):
            return reading.devices
        try:
            started = await self._started()
        except PeerError as error:
            _log.warning("slurmd's start is not known", error=str(error))
            started = None
        used = {index for entry in self._book.pods.values() for index in entry.gpus}
        fresh, why = loaded.judge(reading.files, reading.changed, kept, started, used)
        if fresh != kept:
            self._book.loaded = fresh
            self._book.save()
        return DeviceMap(faults=(why,)) if why else reading.devices
