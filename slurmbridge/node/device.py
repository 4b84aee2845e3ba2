"""The GPUs of a node as Slurm, the driver and the kubelet call them, and the map between. Pure.

Slurm says `IDX`, the driver says minor number (`/dev/nvidia<minor>`) and UUID, the kubelet takes
the UUID as device id. A MIG device is a GPU of its own to all of them. The map is made from
gres.conf's files and from what the driver reports; a GPU that only one side knows, or that both
know differently, is a fault, and a node with a fault takes no pods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

import msgspec

from slurmbridge.node.gresconf import GresFile
from slurmbridge.pool.gres import format_indices

MOST_ID_CHARS: Final = 63
"""Longest device id that the kubelet takes."""


class FoundGpu(msgspec.Struct, frozen=True):
    """One GPU as the driver (or the site's file) reports it.

    minor: of its device file; of a MIG device: of the GPU that it is a part of. numa: its NUMA
    node, -1 where it has none. mig: MIG mode is on, so that the GPU as a whole cannot be used.
    files: all device files that a container needs for it, where that is more than path (MIG).
    """

    uuid: str
    minor: int
    path: str
    model: str = ""
    numa: int = -1
    mig: bool = False
    files: tuple[str, ...] = ()


class Gpu(msgspec.Struct, frozen=True):
    """One GPU under all its names. index: Slurm's. type: GRES type, "" for none."""

    index: int
    uuid: str
    minor: int
    path: str
    type: str = ""
    model: str = ""
    numa: int = -1
    files: tuple[str, ...] = ()


class DeviceMap(msgspec.Struct, frozen=True):
    """All GPUs of a node in the order of their Slurm indices, or why there is no such map."""

    gpus: tuple[Gpu, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def fault(self) -> str:
        """Why the node must take no pods; "" when the map holds."""
        return "; ".join(self.faults)

    @property
    def by_uuid(self) -> dict[str, Gpu]:
        """GPUs by device id."""
        return {gpu.uuid: gpu for gpu in self.gpus}

    @property
    def by_index(self) -> dict[int, Gpu]:
        """GPUs by Slurm index."""
        return {gpu.index: gpu for gpu in self.gpus}

    def uuids(self, indices: Iterable[int]) -> list[str]:
        """Device ids of Slurm indices, in their order; unknown ones are left out."""
        known = self.by_index
        return [known[i].uuid for i in sorted(indices) if i in known]

    def indices(self, uuids: Iterable[str]) -> list[int]:
        """Slurm indices of device ids, ascending; unknown ones are left out."""
        known = self.by_uuid
        return sorted(known[u].index for u in uuids if u in known)


def map_devices(
    files: Sequence[GresFile],
    found: Sequence[FoundGpu],
    identity: Callable[[str], Hashable] = lambda path: path,
) -> DeviceMap:
    """Join what gres.conf says with what the driver reports.

    Args:
        files: of gres.conf, in the order of their indices.
        found: of the driver.
        identity: what file a path is, however it is called (None: there is none).

    Returns:
        A map with all GPUs; or one without any, and every fault in words.

    """
    faults: list[str] = []
    if not files:
        faults.append("gres.conf names no GPU of this node")
    if not found:
        faults.append("no GPU was found on this node")
    for what, names in (
        ("UUID", [gpu.uuid for gpu in found]),
        ("device file", [gpu.path for gpu in found]),
    ):
        faults += [f"{what} {n} was found twice" for n, k in Counter(names).items() if k > 1]
    faults += [
        f"device id {gpu.uuid!r} is empty or longer than {MOST_ID_CHARS} characters"
        for gpu in found
        if not 0 < len(gpu.uuid) <= MOST_ID_CHARS
    ]
    by_file = {identity(gpu.path): gpu for gpu in found}
    by_file.pop(None, None)
    gpus: list[Gpu] = []
    for file in files:
        which = identity(file.path)
        gpu = None if which is None else by_file.pop(which, None)
        if gpu is None:
            faults.append(f"{file.path} of gres.conf (index {file.index}) is no GPU here")
            continue
        if gpu.mig:
            faults.append(
                f"{file.path} (index {file.index}) is in MIG mode, gres.conf takes it whole"
            )
        gpus.append(
            Gpu(
                index=file.index,
                uuid=gpu.uuid,
                minor=gpu.minor,
                path=gpu.path,
                type=file.type,
                model=gpu.model,
                numa=gpu.numa,
                files=gpu.files,
            )
        )
    if files:
        # A GPU in MIG mode is not used as a whole by anyone.
        left = [gpu for gpu in by_file.values() if not gpu.mig]
        faults += [f"{gpu.path} ({gpu.uuid}) is not in gres.conf" for gpu in left]
    return DeviceMap(faults=tuple(faults)) if faults else DeviceMap(gpus=tuple(gpus))


def named(indices: Iterable[int]) -> str:
    """`GPU 0-1,3` for people."""
    return f"GPU {format_indices(indices)}"
