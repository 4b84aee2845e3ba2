"""Single pods: where they break the least.

Compared in this order: wholly free domains that the pod would break, the highest level first, down
to the node itself; then best fit: what is free on the node, in its closest domain, and so on up.
So a node in use is filled before a whole one is broken, and a rack in use before a whole rack.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from slurmbridge.topology.index import Bools, Ints, TopologyIndex

MAX_KEY: Final = 1023
_KEY_BITS: Final = 62


def topology_key(index: TopologyIndex, free: Ints, total: Ints) -> Ints:
    """How little a pod breaks above the node: int64[N] by row, 0 <= key <= 1023, larger is better.

    For scores that weigh the node itself on their own (partly used first, few GPUs left).
    """
    free, whole = _state(index, free, total)
    broken, fit = _levels(index, free, whole)
    _, step = np.unique(_packed([*broken[:0:-1], *fit[1:]]), return_inverse=True)
    step = step.reshape(-1)
    worst = int(step.max(initial=0))
    if worst > MAX_KEY:
        step = step * MAX_KEY // worst
    key = np.empty(len(index), np.int64)
    key[index.row] = MAX_KEY - step
    return key


def least_broken(index: TopologyIndex, free: Ints, whole: Bools | None, holds: Bools) -> int:
    """The place among `holds` where pods break the least; all arrays by place."""
    places = np.flatnonzero(holds)
    return int(places[_packed(_keys(index, free, whole))[places].argmin()])


def _state(index: TopologyIndex, free: Ints, total: Ints) -> tuple[Ints, Bools]:
    """By place: free GPUs, and whether nothing of the node is in use."""
    counted = np.maximum(np.asarray(free, np.int64), 0)[index.row]
    return counted, counted >= np.asarray(total, np.int64)[index.row]


def _keys(index: TopologyIndex, free: Ints, whole: Bools | None) -> list[Ints]:
    broken, fit = _levels(index, free, whole)
    return [*reversed(broken), *fit]


def _levels(index: TopologyIndex, free: Ints, whole: Bools | None) -> tuple[list[Ints], list[Ints]]:
    """By height, by place: 1 if nothing of the domain is in use; the free GPUs in it."""
    broken, fit = [], []
    for height in range(index.top + 1):
        domain = index.domain[height]
        if whole is not None:
            count = index.sums(whole.astype(np.int64), height)
            broken.append((count == np.diff(index.bounds[height]))[domain].astype(np.int64))
        fit.append(index.sums(free, height)[domain])
    return broken, fit


def _packed(keys: list[Ints]) -> Ints:
    """Several keys as one integer, the first in the highest bits; what has no room is left out."""
    packed = np.zeros(len(keys[0]), np.int64) if keys else np.zeros(0, np.int64)
    left = _KEY_BITS
    for key in keys:
        bits = int(key.max(initial=0)).bit_length()
        if bits > left:
            break
        packed = packed << bits | key
        left -= bits
    return packed
