"""Ranks on nodes: along the tree, so that neighbours in a ring are near.

Within a segment domain whole pieces go one after another, by rank. Pods of one size fill the nodes
in tree order; with mixed sizes each size does so by itself, since the packing has decided which
sizes share a node.
"""

from __future__ import annotations

import numpy as np

from slurmbridge.topology.index import Ints
from slurmbridge.topology.knapsack import Laid
from slurmbridge.topology.need import Room


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
        for size in range(len(need.sizes)):
            mine = ranks[size_of[ranks] == size]
            counts = [laid.pods[p][size] for p in group]
            rows[mine] = np.repeat(index.row[group], counts)
    return rows
