"""One pod to stand with others: a member that is replaced while its gang runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmbridge.topology.gang import Refusal, Short, Wish
from slurmbridge.topology.index import Bools, Ints, TopologyIndex
from slurmbridge.topology.score import least_broken


def place_beside(
    index: TopologyIndex,
    free: Ints,
    gpus: int,
    others: Sequence[int],
    wish: Wish | None = None,
    *,
    climb: bool = False,
    candidates: Bools | None = None,
    total: Ints | None = None,
) -> int | Refusal:
    """The row where one more pod stands best with others that stay where they are.

    Least, in this order: new domains that the pod brings in, the highest level first, down to the
    node; then what it breaks (`score`). A wish keeps it in the domains of that level that the
    others are in; for a segment pass its other members and `required:` its level. The old place of
    a replaced member is free again, or not: if it is to win, ask for it first with `candidates`.

    Args:
        index: the topology.
        free: int[N] by row, free GPUs, without what the others hold.
        gpus: GPUs of the pod, >= 1.
        others: rows of the members that stay; empty: where the pod breaks the least.
        wish, climb, candidates, total: as for `pack`.

    """
    wish = wish or Wish()
    if index.side is not None and wish.level and wish.level not in index.height_of:
        index = index.side if wish.level in index.side.height_of else index
    if wish.mode == "required" and wish.level not in index.height_of:
        known = ", ".join(index.height_of)
        return Refusal("level", f"no level {wish.level} in the topology ({known})", wish.level)
    limit = index.top
    if wish.level in index.height_of and (wish.mode == "required" or not climb):
        limit = index.height_of[wish.level]
    counted = np.maximum(np.asarray(free, np.int64), 0)
    fits = counted >= gpus
    if candidates is not None:
        fits &= candidates
    by_place = counted[index.row]
    holds = fits[index.row]
    places = index.place[np.asarray(others, np.int64)]
    if len(places):
        for height in range(index.top, -1, -1):
            here = np.isin(index.domain[height], index.domain[height][places])
            if height >= limit and not (holds & here).any():
                return _refusal(index, by_place, places, limit, gpus, wish.level)
            if height >= limit or (holds & here).any():
                holds &= here
    if not holds.any():
        return _refusal(index, by_place, places, limit, gpus, wish.level)
    whole = None if total is None else (counted >= np.asarray(total, np.int64))[index.row]
    return int(index.row[least_broken(index, by_place, whole, holds)])


def _refusal(
    index: TopologyIndex, free: Ints, places: Ints, height: int, gpus: int, word: str
) -> Refusal:
    """No room at `height`: named is the domain that the others are in (the first of them)."""
    level = word if index.height_of.get(word) == height else index.levels[height]
    domain = int(index.domain[height][places[0]]) if len(places) else 0
    if not len(free):
        return Refusal("room", "the pool has no nodes")
    short = Short(level, index.names[height][domain], 1, gpus)
    return Refusal("room", str(short), level, (short,))
