"""Which GPUs are here: from the driver (NVML), or from a file where there is no driver.

The file is JSON: `{"gpus": [{"uuid": "GPU-...", "minor": 0, "path": "/dev/nvidia0"}]}`, with the
fields of `FoundGpu`; for other vendors' devices, for tests, and for nodes whose driver is not
reachable from where the agent runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from slurmbridge.node import slurm_script
from slurmbridge.node.device import DeviceMap, FoundGpu, map_devices
from slurmbridge.node.gresconf import GresFile, read_gres_conf
from slurmbridge.pool.errors import UNREADABLE, ParseError, PeerUnavailable


class Usage(msgspec.Struct, frozen=True):
    """One GPU at one moment. utilisation in percent, memory in bytes; None: not known.

    pids: processes with a context on it, as this node numbers them.
    """

    pids: tuple[int, ...] = ()
    utilisation: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_mw: int | None = None


class Inventory(Protocol):
    """Where GPUs and their use are read."""

    def find(self) -> list[FoundGpu]:
        """All GPUs.

        Raises:
            PeerUnavailable: they cannot be read now.

        """

    def usage(self) -> dict[str, Usage]:
        """UUID -> its use; {} where there is no driver to ask.

        Raises:
            PeerUnavailable: it cannot be read now.

        """


class _File(msgspec.Struct, frozen=True):
    gpus: tuple[FoundGpu, ...]


class FileInventory:
    """GPUs of a file; of their use nothing is known but the processes that hold them open."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find(self) -> list[FoundGpu]:
        """See `Inventory.find`."""
        try:
            return list(msgspec.json.decode(Path(self._path).read_bytes(), type=_File).gpus)
        except (OSError, *UNREADABLE) as error:
            raise PeerUnavailable("device file", self._path, str(error)) from error

    def usage(self) -> dict[str, Usage]:
        """See `Inventory.usage`."""
        return {}


def stamp_of(path: str) -> tuple[int, int] | None:
    """Which file this is and when it was changed last; None: there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


class MapReading(msgspec.Struct, frozen=True):
    """gres.conf and driver as they are now.

    files: of gres.conf, in the order of their indices; () when `devices` has a fault. changed: last
    change of gres.conf or of a file that it includes, Unix seconds.
    """

    devices: DeviceMap
    files: tuple[GresFile, ...] = ()
    changed: float = 0.0


def read_map(inventory: Inventory, gres_conf: str, node: str) -> MapReading:
    """The map of this node as its gres.conf and its driver say now; faults stand in it.

    Args:
        inventory: where the GPUs are read.
        gres_conf: path of gres.conf.
        node: Slurm node name.

    """
    changes: list[float] = []

    def text_of(path: Path) -> str:
        found = path.stat()
        # Copying tools set the time of the content as they like, but not that of the file.
        changes.append(max(found.st_mtime, found.st_ctime))
        return path.read_text(encoding="utf-8")

    folder = Path(gres_conf).parent
    try:
        text = text_of(Path(gres_conf))
        files = read_gres_conf(text, node, lambda name: text_of(folder / name))
        found = inventory.find()
    except (OSError, UnicodeDecodeError) as error:
        return MapReading(DeviceMap(faults=(f"gres.conf cannot be read: {error}",)))
    except (ParseError, PeerUnavailable) as error:
        return MapReading(DeviceMap(faults=(str(error),)))
    devices = map_devices(files, found, slurm_script.file_identity)
    return MapReading(devices) if devices.fault else MapReading(devices, files, max(changes))
