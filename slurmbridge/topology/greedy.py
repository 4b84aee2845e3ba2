"""Packing without search, for gangs that are too large for the exact one.

The roomiest child of every domain first, the largest pods first, each node filled up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmbridge.topology.index import Ints
from slurmbridge.topology.knapsack import Laid, State
from slurmbridge.topology.need import Need, Room


def lay(room: Room, height: int, domain: int) -> Laid | None:
    """Lay the gang under one domain, or None when that fails (for one size it never does)."""
    index, need = room.index, room.need
    places = _roomiest_first(room, height, domain)
    free = room.free[:, places]
    slots = np.full(len(places), need.pods) if room.slots is None else room.slots[places]
    used = np.zeros((len(places), len(need.sizes)), np.int64)
    if not (need.has_segments and height > need.height):
        if not fill(need, need.count, free, slots, used):
            return None
        return Laid(_by_place(places, used), {})
    waiting = need.amount.copy()
    pieces: dict[int, State] = {}
    domains = index.domain[need.height][places]
    for one in dict.fromkeys(domains.tolist()):
        here = domains == one
        part = [free[:, here], slots[here], used[here]]
        got = np.zeros(len(need.kinds), np.int64)
        for kind in range(len(need.kinds)):
            while waiting[kind]:
                trial = [a.copy() for a in part]
                if not fill(need, need.kinds[kind], *trial):
                    break
                part = trial
                got[kind] += 1
                waiting[kind] -= 1
        if got.any():
            pieces[one] = tuple(got.tolist())
            used[here] = part[2]
    if waiting.any():
        return None
    return Laid(_by_place(places, used), pieces)


def _roomiest_first(room: Room, height: int, domain: int) -> Ints:
    """Places under a domain; at every level the child with the most room comes first."""
    index = room.index
    first, last = index.bounds[height][domain : domain + 2]
    places = np.arange(first, last)
    keys: list[Ints] = [places]
    for h in range(height):
        if room.need.has_segments and height > room.need.height <= h:
            space = [room.pieces(h)]
        else:
            space = list(room.pods(h)[::-1])
        here = index.domain[h][places]
        keys.append(here)
        keys += [-s[here] for s in space]
    return places[np.lexsort(keys)]


def fill(need: Need, count: Ints, free: Ints, slots: Ints, used: Ints) -> bool:
    """Put pods on nodes in their order, largest first; changes the last three. False: no room."""
    for size in range(len(need.sizes)):
        gpus, rows = need.sizes[size], sorted({0, int(need.types[size])})
        fits = np.minimum(free[rows].min(axis=0) // gpus, slots)
        before = np.cumsum(fits) - fits
        take = np.clip(count[size] - before, 0, fits)
        if int(take.sum()) < count[size]:
            return False
        free[rows] -= take * gpus
        slots -= take
        used[:, size] += take
    return True


def _by_place(places: Sequence[int] | Ints, used: Ints) -> dict[int, State]:
    return {
        int(place): tuple(line.tolist())
        for place, line in zip(places, used, strict=True)
        if line.any()
    }
