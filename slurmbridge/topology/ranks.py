"""Ranks on nodes: along the tree, so that neighbours in a ring are near.

Within a segment domain whole pieces go one after another, by rank. Pods of one size fill the nodes
in tree order. The packing of mixed sizes says which nodes are used; which size shares a node with
which is decided here anew, so that each domain has neighbours by rank, wherever that can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations

import numpy as np

from slurmbridge.topology import greedy
from slurmbridge.topology.index import Ints
from slurmbridge.topology.knapsack import Laid
from slurmbridge.topology.need import Room

MOST_TURNS = 4
"""Domains side by side of which every order is tried; of more only that of the tree and back."""


def assign_ranks(room: Room, laid: Laid) -> Ints:
    """Row of each pod by rank: int64[pods].

    Args:
        room: index and gang.
        laid: pods by size on each place, and, with segments, pieces by kind in each domain.

    """
    index, need = room.index, room.need
    size_of = room.need.size_of
    places = sorted(laid.pods)
    if laid.pieces:
        domain = index.domain[need.height]
        groups = [
            ([p for p in places if domain[p] == d], pieces)
            for d, pieces in sorted(laid.pieces.items())
        ]
    else:
        groups = [(places, tuple(need.amount.tolist()))]
    waiting = [np.flatnonzero(need.kind_of == kind).tolist() for kind in range(len(need.kinds))]
    rows = np.empty(need.pods, np.int64)
    for group, pieces in groups:
        taken = sorted(
            waiting[kind].pop(0) for kind, amount in enumerate(pieces) for _ in range(amount)
        )
        ranks = np.concatenate([np.arange(p, p + 1) for p in taken])
        ranks = (ranks[:, None] * need.segment + np.arange(need.segment)).reshape(-1)
        used = np.array([laid.pods[p] for p in group])
        _by_size(room, ranks, np.array(group), used, rows)
        if len(need.sizes) > 1 and len(np.unique(size_of[ranks])) > 1:
            _along(room, ranks, np.array(group), index.top, rows)
    return rows


def _by_size(room: Room, ranks: Ints, places: Ints, used: Ints, rows: Ints) -> None:
    """Each size by itself in tree order. used: int64[places, sizes], pods on each."""
    size_of = room.need.size_of[ranks]
    for size in range(len(room.need.sizes)):
        rows[ranks[size_of == size]] = np.repeat(room.index.row[places], used[:, size])


def _along(room: Room, ranks: Ints, places: Ints, height: int, rows: Ints) -> None:
    """Lay neighbours by rank into each domain under one of `height`, and so on down to the nodes.

    Where that cannot be they stay where `rows` has them.
    """
    if height == 0 or len(places) == 1:
        return
    domain = room.index.domain[height - 1][places]
    groups = [places[domain == d] for d in np.unique(domain)]
    if len(groups) == 1:
        _along(room, ranks, places, height - 1, rows)
        return
    for turn in _turns(groups):
        parts = _cut(room, ranks, turn)
        if parts is not None:
            for part, group in zip(parts, turn, strict=True):
                used = _fitting(room, part, group)
                if used is not None and len(part):
                    _by_size(room, part, group, used, rows)
                    _along(room, part, group, height - 1, rows)
            return


def _turns(groups: Sequence[Ints]) -> Iterable[Sequence[Ints]]:
    if len(groups) <= MOST_TURNS:
        return permutations(groups)
    return groups, groups[::-1]


def _cut(room: Room, ranks: Ints, groups: Sequence[Ints]) -> list[Ints] | None:
    """Cut the ranks into one part for each group, in their order: each as long as it can be.

    What fits into a group still fits without some of it: so if there is any such cut, this one is.
    """
    parts: list[Ints] = []
    for group in groups:
        fits, most = 0, len(ranks)
        while fits < most:
            tried = (fits + most + 1) // 2
            if _fitting(room, ranks[:tried], group) is None:
                most = tried - 1
            else:
                fits = tried
        parts.append(ranks[:fits])
        ranks = ranks[fits:]
    return None if len(ranks) else parts


def _fitting(room: Room, ranks: Ints, places: Ints) -> Ints | None:
    """How many pods of each size lie where, if these ranks fit: int64[places, sizes]."""
    need = room.need
    count = np.bincount(need.size_of[ranks], minlength=len(need.sizes))
    slots = np.full(len(places), need.pods) if room.slots is None else room.slots[places].copy()
    used = np.zeros((len(places), len(need.sizes)), np.int64)
    is_laid = greedy.fill(need, count, room.free[:, places], slots, used)
    return used if is_laid else None
