"""Lay a gang on the tree.

The objective, compared in this order:

1. the height of the lowest domain that holds the whole gang: least;
2. below it, from the level right under that domain down to the nodes: how many domains of the level
   are used in all: fewest, the upper levels before the lower ones;
3. best fit: the free GPUs of that domain, then in all those used of each level from the top down to
   the nodes: least, so that the emptiest domains stay whole; at equal sums wholly free ones last;
4. best fit of what is above the domain; then the order of the tree.

A gang that one node holds (height 0) goes where it breaks the least (`score`).

What is exact. 1 and 2 are the true optimum for gangs of one size, with or without segments, at any
depth, and for mixed sizes, unless the search would cost more than `knapsack.WORK_LIMIT` additions:
then `exact` is False in the answer, and what still holds is: 1 for one size, and for sizes that
divide each other (1, 2, 4, 8) when no segments or pod limits are given; and for one size the fewest
children right under the domain. 3 is exact along with 2 as far as its sums fit into the cost's 60
bits; upper levels are taken in first.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from slurmbridge.topology import greedy
from slurmbridge.topology.across import pack_across
from slurmbridge.topology.exact import Found, fewest_children, lay_exactly
from slurmbridge.topology.gang import Gang, Placement, Refusal, Short, Wish
from slurmbridge.topology.index import Bools, Ints, TopologyIndex
from slurmbridge.topology.knapsack import Laid, TooLargeError
from slurmbridge.topology.need import Need, Room, need_of
from slurmbridge.topology.ranks import assign_ranks
from slurmbridge.topology.score import least_broken


def pack(
    index: TopologyIndex,
    free: Ints,
    gang: Gang,
    wish: Wish | None = None,
    *,
    climb: bool = False,
    candidates: Bools | None = None,
    total: Ints | None = None,
    slots: Ints | None = None,
) -> Placement | Refusal:
    """Lay a gang on nodes, all of it or nothing.

    A wish for a level of the accelerator dimension, or segments of one, is planned in that
    dimension; with a wish in one dimension and segments in the other both are kept (`across`). A
    preferred level that the topology does not have limits nothing; a required one is
    refused.

    Args:
        index: the topology.
        free: int[N] by row, free GPUs of the type that the gang asks for; for a gang of several
            types int[1 + T, N]: of all types that it asks for, then of each.
        gang: the pods' sizes by rank.
        wish: how close they must stand; None: no wish.
        climb: whether the time limit of a preferred wish is over.
        candidates: bool[N] by row, nodes that may be used; None: all.
        total: int[N] by row, all GPUs of these types; tells wholly free nodes from used ones.
        slots: int[N] by row, how many of the gang's pods a node has CPUs and memory for; None: no
            limit. In a gang of mixed sizes it counts pods of any size.

    Cost: O(N + domains) for the level, and a tree knapsack under the domains of that level that
    hold the gang; 64 pods on 5,000 nodes: a few milliseconds.

    """
    wish = wish or Wish()
    refusal = _refuse(index, gang, wish)
    if refusal is not None:
        return refusal
    of_wish, of_segment = dimension(index, wish.level), dimension(index, gang.segment_level)
    if of_segment is not None and wish.level in of_segment.height_of:
        of_wish = of_segment
    if of_wish is not None and gang.segment_level in of_wish.height_of:
        of_segment = of_wish
    if of_wish is not None and of_segment is not None and of_wish is not of_segment:
        whole = msgspec.structs.replace(gang, segment=0, segment_level="")
        need = need_of(whole, min(1, of_wish.top))
        words = {of_wish.height_of[wish.level]: wish.level}
        return pack_across(
            _room(of_wish, need, free, candidates, total, slots, words),
            _limit(of_wish, wish, climb),
            lambda inside: pack(
                of_segment,
                free,
                gang,
                candidates=inside if candidates is None else inside & candidates,
                total=total,
                slots=slots,
            ),
        )
    index = next(one for one in (of_wish, of_segment, index) if one is not None)
    default = min(1, index.top)
    height = index.height_of[gang.segment_level] if gang.segment_level else default
    need = need_of(gang, height)
    limit = _limit(index, wish, climb)
    if gang.segment and not need.has_segments:
        limit = min(limit, height)
    used = (level for level in (gang.segment_level, wish.level) if level in index.height_of)
    words = {index.height_of[level]: level for level in used}
    return _climb(_room(index, need, free, candidates, total, slots, words), limit)


def dimension(index: TopologyIndex, level: str) -> TopologyIndex | None:
    """The tree, or the accelerator dimension, whichever has a level; None: neither, or no level."""
    for one in (index, index.side):
        if level and one is not None and level in one.height_of:
            return one
    return None


def _limit(index: TopologyIndex, wish: Wish, climb: bool) -> int:
    if wish.level in index.height_of and (wish.mode == "required" or not climb):
        return index.height_of[wish.level]
    return index.top


def _refuse(index: TopologyIndex, gang: Gang, wish: Wish) -> Refusal | None:
    """What can never be served as it is written."""
    if not gang.gpus or min(gang.gpus) < 1:
        return Refusal("gang", "a gang needs at least one pod, and each pod at least one GPU")
    sides = () if index.side is None else index.side.height_of
    known = ", ".join(dict.fromkeys((*index.height_of, *sides)))
    if wish.mode == "required" and dimension(index, wish.level) is None:
        return Refusal("level", f"no level {wish.level} in the topology ({known})", wish.level)
    if gang.segment_level and dimension(index, gang.segment_level) is None:
        text = f"no level {gang.segment_level} in the topology ({known})"
        return Refusal("level", text, gang.segment_level)
    if gang.segment < 0 or (
        0 < gang.segment < len(gang.gpus) and len(gang.gpus) % gang.segment != 0
    ):
        text = f"{len(gang.gpus)} pods are not a whole number of segments of {gang.segment}"
        return Refusal("segment", text)
    return None


def _room(
    index: TopologyIndex,
    need: Need,
    free: Ints,
    candidates: Bools | None,
    total: Ints | None,
    slots: Ints | None,
    words: Mapping[int, str],
) -> Room:
    """Everything by place, and nothing free that may not be used."""
    open_gpus = np.maximum(np.atleast_2d(np.asarray(free, np.int64)), 0)
    if candidates is not None:
        open_gpus = np.where(candidates, open_gpus, 0)
    whole = None if total is None else (open_gpus[0] >= np.asarray(total, np.int64))[index.row]
    limit = None if slots is None else np.maximum(np.asarray(slots, np.int64), 0)[index.row]
    return Room(index, need, open_gpus[:, index.row], whole, limit, words)


def _climb(room: Room, limit: int) -> Placement | Refusal:
    """The lowest level first; why each lower one did not do is kept."""
    index = room.index
    shorts: list[Short] = []
    exact = True
    if not len(index):
        return Refusal("room", "the pool has no nodes")
    for height in range(limit + 1):
        lacking = room.lacking(height)
        holds: Bools = np.logical_and.reduce(lacking <= 0, axis=0)
        if not holds.any():
            shorts.append(room.short(lacking, height))
            continue
        try:
            found = _lay_on_node(room, holds) if height == 0 else lay_exactly(room, height, holds)
        except TooLargeError:
            exact = False
            found = _lay_roughly(room, height, holds)
        if found is None:
            shorts.append(room.short(lacking, height, holds))
            continue
        domain, laid = found
        rows = assign_ranks(room, laid)
        places = index.place[rows]
        spread = {
            room.level(h): len(np.unique(index.domain[h][places]))
            for h in range(height - 1, -1, -1)
        }
        return Placement(
            rows=tuple(rows.tolist()),
            level=room.level(height),
            domain=index.names[height][domain],
            spread=spread,
            shorts=tuple(shorts),
            exact=exact,
        )
    return Refusal("room", str(shorts[-1]), room.level(limit), tuple(shorts), exact)


def _lay_on_node(room: Room, holds: Bools) -> Found | None:
    need = room.need
    holds = holds & (room.free[0] >= need.sizes @ need.count)
    for one in np.unique(need.types[need.types > 0]):
        holds &= room.free[one] >= need.sizes @ (need.count * (need.types == one))
    if room.slots is not None:
        holds &= room.slots >= need.pods
    if not holds.any():
        return None
    place = least_broken(room.index, room.free[0], room.whole, holds)
    return place, Laid({place: tuple(need.count.tolist())}, {})


def _lay_roughly(room: Room, height: int, holds: Bools) -> Found | None:
    """Without search: the first domain, least free first, in which filling up works."""
    if len(room.need.sizes) == 1:
        holds, _ = fewest_children(room, height, holds)
    domains = np.flatnonzero(holds)
    value = room.values(height)[domains]
    for domain in domains[np.argsort(value, kind="stable")].tolist():
        laid = greedy.lay(room, height, domain)
        if laid is not None:
            return domain, laid
    return None
