"""Whether gres.conf on disk is what slurmd has loaded: only then its order says what an index is.

slurmd reads gres.conf when it starts (22.05 also at `scontrol reconfigure`), and nobody can ask it
what it has read. So the first good reading is kept, with the time of slurmd's start; a file that
names the GPUs otherwise closes the node until slurmd has started after the file's last change. And
numbers that pods have GPUs by are not given to other GPUs as long as these pods are here. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Final

import msgspec

from slurmbridge.node.device import named
from slurmbridge.node.gresconf import GresFile

RESOLUTION_S: Final = 1.0
"""Slurm tells slurmd's start in whole seconds, cut off."""
REMEDY: Final = "restart slurmd on this node"


class Loaded(msgspec.Struct, frozen=True):
    """What slurmd has loaded. started: its start, Unix seconds, the node's clock.

    strayed: since then gres.conf was seen to say something else, so that a `scontrol reconfigure`
    may have loaded that: only a new start tells.
    """

    files: tuple[GresFile, ...]
    started: float
    strayed: bool = False


def is_settled(files: tuple[GresFile, ...], kept: Loaded | None) -> bool:
    """Whether what was kept answers for these files, so that slurmd's start need not be asked."""
    return kept is not None and not kept.strayed and kept.files == files


def judge(
    files: tuple[GresFile, ...],
    changed: float,
    kept: Loaded | None,
    started: float | None,
    used: Collection[int],
) -> tuple[Loaded | None, str]:
    """What to keep now, and why the node must take no pods ("" when it may).

    Args:
        files: of gres.conf as it is on disk.
        changed: its last change, Unix seconds, the node's clock.
        kept: what this returned before, None: nothing.
        started: slurmd's start, None: slurmctld does not say.
        used: indices of GPUs that pods of this node have.

    """
    if is_settled(files, kept):
        return kept, ""
    doubt = None if kept is None else msgspec.structs.replace(kept, strayed=True)
    if started is None:
        return (
            doubt,
            "slurmctld does not say when slurmd has started, so which gres.conf it has read",
        )
    if changed >= started + RESOLUTION_S:
        text = f"gres.conf was changed at {_at(changed)}, slurmd started at {_at(started)}"
        return doubt, f"{text} and may not have read it: {REMEDY}"
    if kept is not None and started <= kept.started:
        text = f"gres.conf is not what slurmd had read at its start at {_at(started)}"
        return doubt, f"{text}: {REMEDY}"
    if kept is not None:
        now = {file.index: file.path for file in files}
        moved = [f.index for f in kept.files if f.index in used and now.get(f.index) != f.path]
        if moved:
            text = f"gres.conf gives {named(moved)} to another device file while pods have it"
            return doubt, f"{text} by the old one: end these pods, then the node opens by itself"
    return Loaded(files, started), ""


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
