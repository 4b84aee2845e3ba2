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
from slurmbridge.node.gresconf import read_gres_conf
from slurmbridge.pool.errors import ParseError, PeerUnavailable


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
        except (OSError, msgspec.DecodeError) as error:
            raise PeerUnavailable("device file", self._path, str(error)) from error

    def usage(self) -> dict[str, Usage]:
        """See `Inventory.usage`."""
        return {}


def read_map(inventory: Inventory, gres_conf: str, node: str) -> DeviceMap:
    """The map of this node as its gres.conf and its driver say now; faults stand in it.

    Args:
        inventory: where the GPUs are read.
        gres_conf: path of gres.conf.
        node: Slurm node name.

    """
    folder = Path(gres_conf).parent
    try:
        text = Path(gres_conf).read_text(encoding="utf-8")
        files = read_gres_conf(text, node, lambda name: (folder / name).read_text(encoding="utf-8"))
        found = inventory.find()
    except (OSError, UnicodeDecodeError) as error:
        return DeviceMap(faults=(f"gres.conf cannot be read: {error}",))
    except (ParseError, PeerUnavailable) as error:
        return DeviceMap(faults=(str(error),))
    return map_devices(files, found, slurm_script.file_identity)
