"""A gang as tasks of one Slurm job: equal tasks, each of which stands on one node.

Slurm has no job whose tasks differ, and takes no GPUs of a running job back (ADR 0009). So members
that differ can be said in one job only where together they fill equal tasks to the last GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from slurmbridge.pool.claim import Ask
from slurmbridge.pool.record import GpuRequest


class Tasks(NamedTuple):
    """So many tasks, each of which asks for this."""

    ask: Ask
    number: int


def as_tasks(asks: Sequence[Ask], node_gpus: int) -> Tasks | None:
    """The tasks that hold all members of a gang, or None where there are none.

    Members with the same number of GPUs are a task each; what else they need is asked for as the
    largest needs it. Members with different numbers share tasks of the size of the largest, if all
    are full, and no node holds two (then any nodes that Slurm gives hold the gang: each is filled
    as here).

    Args:
        asks: of each member; at least one.
        node_gpus: GPUs of the largest node.

    """
    alike = {
        msgspec.structs.replace(a, gpu=GpuRequest(0, a.gpu.type), cpus=0, memory_mib=0)
        for a in asks
    }
    if len(alike) > 1:
        return None
    size = max(a.gpu.count for a in asks)
    bins: list[list[Ask]] = []
    for ask in sorted(asks, key=lambda a: -a.gpu.count):
        into = next((b for b in bins if _gpus(b) + ask.gpu.count <= size), None)
        if into is None:
            bins.append([ask])
        else:
            into.append(ask)
    is_mixed = any(a.gpu.count != size for a in asks)
    if is_mixed and (2 * size <= node_gpus or any(_gpus(b) < size for b in bins)):
        return None
    whole = msgspec.structs.replace(
        asks[0],
        gpu=GpuRequest(size, asks[0].gpu.type),
        cpus=max(sum(a.cpus for a in b) for b in bins),
        memory_mib=max(sum(a.memory_mib for a in b) for b in bins),
    )
    return Tasks(whole, len(bins))


def _gpus(asks: Sequence[Ask]) -> int:
    return sum(a.gpu.count for a in asks)
