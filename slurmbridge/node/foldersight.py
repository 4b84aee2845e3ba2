"""Wakes when something appears in a folder or leaves it: Linux' inotify, without a package for it.

Where it cannot be had (too many watches, another system) a wait is a pause, and whoever waits looks
for itself. A kubelet that is back admits its pods within some tens of milliseconds: each one that
its plugin is earlier counts (docs/node-agent.md).

inotify_simple and asyncinotify were looked at: both are these two calls by ctypes again, with the
names of events, which nobody reads here, and the wait with a deadline would stay. watchfiles
gathers changes for 50 ms and more before it tells of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from typing import Any, Final, Self

from slurmbridge.clock import Clock

CREATE: Final = 0x00000100
MOVED_TO: Final = 0x00000080
DELETE: Final = 0x00000200
_READ_BYTES: Final = 65536


class FolderSight:
    """Sees the changes of one folder between `__enter__` and `__exit__`, inside a running loop."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._fd = -1
        self._woken = asyncio.Event()

    def __enter__(self) -> Self:
        libc: Any = ctypes.CDLL(None, use_errno=True)
        try:
            fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError:
            return self
        if fd < 0:
            return self
        path = os.fsencode(self._folder)
        if int(libc.inotify_add_watch(fd, path, CREATE | MOVED_TO | DELETE)) < 0:
            os.close(fd)
            return self
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    @property
    def sees(self) -> bool:
        """Whether changes wake; False: every wait lasts as long as it may."""
        return self._fd >= 0

    def wake(self) -> None:
        """End the wait, or the next one."""
        self._woken.set()

    async def wait(self, clock: Clock, longest_s: float) -> None:
        """Until the next change, or one since the last wait; at most `longest_s`."""
        pause = asyncio.ensure_future(clock.sleep(longest_s))
        change = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait({pause, change}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            change.cancel()
        self._woken.clear()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, _READ_BYTES)
        self._woken.set()
