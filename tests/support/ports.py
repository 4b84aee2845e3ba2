"""Blocks of free TCP ports on 127.0.0.1, reserved among all test clusters of one user.

Daemons are told their ports before they bind them, and several clusters start side by side. A block
is therefore held by a record lock (`F_OFD_SETLK`, one byte a port) on a file in the temporary
folder: the kernel drops it when the holder ends, however it ends. Ports stand below the range that
the kernel gives to outgoing connections (32768 and up), so no client takes one by chance.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import tempfile
from dataclasses import dataclass

LOWEST = 10_240
HIGHEST = 32_000
ALIGN = 16


class NoFreePortsError(RuntimeError):
    """No free block of that size between LOWEST and HIGHEST."""


@dataclass
class PortBlock:
    """`count` ports from `first` on, ours until `release` or the end of this process."""

    first: int
    count: int
    _file: int

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.first + index

    def release(self) -> None:
        """Give the block back; may be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def reserve(count: int) -> PortBlock:
    """Reserve `count` consecutive ports that nothing listens on.

    Raises:
        NoFreePortsError: there is no such block.

    """
    path = os.path.join(tempfile.gettempdir(), f"slurmbridge-ports-{os.getuid()}")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    slots = (HIGHEST - LOWEST - count) // ALIGN
    # Each process starts looking elsewhere: fewer collisions with what others are about to bind.
    start = (os.getpid() * 61) % max(slots, 1)
    for step in range(slots):
        first = LOWEST + (start + step) % slots * ALIGN
        if not _locked(file, first, count):
            continue
        if all(_unused(port) for port in range(first, first + count)):
            return PortBlock(first, count, file)
        _unlock(file, first, count)
    os.close(file)
    raise NoFreePortsError(f"no {count} free ports in a row between {LOWEST} and {HIGHEST}")


def _flock(kind: int, first: int, count: int) -> bytes:
    # struct flock of 64-bit Linux: type, whence, start, length, pid (0 for OFD locks).
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, first, count, 0)


def _locked(file: int, first: int, count: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, first, count))
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise
    return True


def _unlock(file: int, first: int, count: int) -> None:
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, first, count))


def _unused(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Daemons that listen on all addresses must not be in the way either.
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
