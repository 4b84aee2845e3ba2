"""A wish in one dimension and segments in the other: a rack, and NVLink domains that cut across it.

The lowest domain that does by the wish's dimension, as anywhere; inside it the pieces are laid by
the dimension of the segments. How many domains of the wish's dimension are used below that one is
not what decides then, so such an answer is not `exact`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slurmbridge.topology.gang import Placement, Refusal, Short
from slurmbridge.topology.index import Bools
from slurmbridge.topology.need import Room

MOST_TRIES = 64
"""Domains of a level that are tried, those with the least room first."""


def pack_across(
    room: Room, limit: int, lay: Callable[[Bools], Placement | Refusal]
) -> Placement | Refusal:
    """Lay a gang inside one domain of the wish's dimension.

    Args:
        room: the gang without its segments, in the wish's dimension.
        limit: the highest level that will do.
        lay: packs the gang with its segments on nodes of a mask by row.

    """
    index = room.index
    shorts: list[Short] = []
    exact = True
    if not len(index):
        return Refusal("room", "the pool has no nodes")
    for height in range(limit + 1):
        lacking = room.lacking(height)
        holds: Bools = np.logical_and.reduce(lacking <= 0, axis=0)
        domains = np.flatnonzero(holds)
        order = domains[np.argsort(room.values(height)[domains], kind="stable")]
        exact &= len(order) <= MOST_TRIES
        for domain in order[:MOST_TRIES].tolist():
            inside = np.zeros(len(index), np.bool_)
            first, last = index.bounds[height][domain : domain + 2]
            inside[index.row[first:last]] = True
            found = lay(inside)
            exact &= found.exact
            if isinstance(found, Placement):
                return _in_words_of(room, height, domain, found, tuple(shorts))
        shorts.append(room.short(lacking, height, holds if holds.any() else None))
    return Refusal("room", str(shorts[-1]), room.level(limit), tuple(shorts), exact)


def _in_words_of(
    room: Room, height: int, domain: int, found: Placement, shorts: tuple[Short, ...]
) -> Placement:
    """The same rows, told in the wish's dimension."""
    index = room.index
    places = index.place[np.array(found.rows)]
    spread = {
        room.level(h): len(np.unique(index.domain[h][places])) for h in range(height - 1, -1, -1)
    }
    return Placement(
        rows=found.rows,
        level=room.level(height),
        domain=index.names[height][domain],
        spread=spread,
        shorts=shorts,
        exact=False,
    )
