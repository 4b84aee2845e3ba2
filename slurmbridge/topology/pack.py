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
then `Placement.exact` is False, and what still holds is: 1 for one size and for sizes that divide
each other (1, 2, 4, 8) when no segments or pod limits are given; and for one size the fewest
children right under the domain. 3 is exact along with 2 as far as its sums fit into the cost's 60
bits; upper levels are taken in first.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slurmbridge.topology import greedy
from slurmbridge.topology.gang import Gang, Placement, Refusal, Short, Wish
from slurmbridge.topology.index import Bools, Ints, TopologyIndex
from slurmbridge.topology.knapsack import (
    COST_BITS,
    INFEASIBLE,
    Floor,
    Knapsack,
    Laid,
    Segments,
    TooLargeError,
)
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
    dimension. A preferred level that the topology does not have limits nothing; a required one is
    refused.

    Args:
        index: the topology.
        free: int[N] by row, free GPUs of the type that the gang asks for.
        gang: the pods' sizes by rank.
        wish: how close they must stand; None: no wish.
        climb: whether the time limit of a preferred wish is over.
        candidates: bool[N] by row, nodes that may be used; None: all.
        total: int[N] by row, all GPUs of that type; tells wholly free nodes from used ones.
        slots: int[N] by row, how many of the gang's pods a node has CPUs and memory for; None: no
            limit. In a gang of mixed sizes it counts pods of any size.

    Cost: O(N + domains) for the level, and a tree knapsack under the domains of that level that
    hold the gang; 64 pods on 5,000 nodes: a few milliseconds.

    """
    wish = wish or Wish()
    asked = {wish.level, gang.segment_level} - {""}
    if index.side is not None and not asked <= set(index.height_of):
        index = index.side if asked & set(index.side.height_of) else index
    refusal = _refuse(index, gang, wish)
    if refusal is not None:
        return refusal
    default = min(1, index.top)
    height = index.height_of[gang.segment_level] if gang.segment_level else default
    need = need_of(gang, height)
    limit = index.top
    if wish.level in index.height_of and (wish.mode == "required" or not climb):
        limit = index.height_of[wish.level]
    if gang.segment and not need.has_segments:
        limit = min(limit, height)
    used = (level for level in (gang.segment_level, wish.level) if level in index.height_of)
    words = {index.height_of[level]: level for level in used}
    return _climb(_room(index, need, free, candidates, total, slots, words), limit)


def _refuse(index: TopologyIndex, gang: Gang, wish: Wish) -> Refusal | None:
    """What can never be served as it is written."""
    if not gang.gpus or min(gang.gpus) < 1:
        return Refusal("gang", "a gang needs at least one pod, and each pod at least one GPU")
    if wish.mode == "required" and wish.level not in index.height_of:
        known = ", ".join(index.height_of)
        return Refusal("level", f"no level {wish.level} in the topology ({known})", wish.level)
    if gang.segment_level and gang.segment_level not in index.height_of:
        known = ", ".join(index.height_of)
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
    open_gpus = np.maximum(np.asarray(free, np.int64), 0)
    if candidates is not None:
        open_gpus = np.where(candidates, open_gpus, 0)
    whole = None if total is None else (open_gpus >= np.asarray(total, np.int64))[index.row]
    limit = None if slots is None else np.maximum(np.asarray(slots, np.int64), 0)[index.row]
    return Room(index, need, open_gpus[index.row], whole, limit, words)


def _climb(room: Room, limit: int) -> Placement | Refusal:
    """The lowest level first; why each lower one did not do is kept."""
    index = room.index
    shorts: list[Short] = []
    if not len(index):
        return Refusal("room", "the pool has no nodes")
    for height in range(limit + 1):
        lacking = room.lacking(height)
        holds: Bools = np.logical_and.reduce(lacking <= 0, axis=0)
        if not holds.any():
            shorts.append(room.short(lacking, height))
            continue
        found = _lay_on_node(room, holds) if height == 0 else _lay(room, height, holds)
        if found is None:
            shorts.append(room.short(lacking, height, holds))
            continue
        domain, laid, exact = found
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
    return Refusal("room", str(shorts[-1]), room.level(limit), tuple(shorts))


Found = tuple[int, Laid, bool]
"""Domain, where the pods go (by place), whether that is exact."""


def _lay_on_node(room: Room, holds: Bools) -> Found | None:
    gpus = int(room.need.sizes @ room.need.count)
    holds = holds & (room.free >= gpus)
    if room.slots is not None:
        holds &= room.slots >= room.need.pods
    if not holds.any():
        return None
    place = least_broken(room.index, room.free, room.whole, holds)
    return place, Laid({place: tuple(room.need.count.tolist())}, {}), True


def _lay(room: Room, height: int, holds: Bools) -> Found | None:
    """The best of the domains that seem to hold the gang; None: none of them does."""
    try:
        return _lay_exactly(room, height, holds)
    except TooLargeError:
        if len(room.need.sizes) == 1:
            holds, _ = _fewest_children(room, height, holds)
        domains = np.flatnonzero(holds)
        value = room.values(height)
        for domain in domains[np.argsort(value[domains], kind="stable")].tolist():
            laid = greedy.lay(room, height, domain)
            if laid is not None:
                return domain, laid, False
        return None


def _lay_exactly(room: Room, height: int, holds: Bools) -> Found | None:
    index, need = room.index, room.need
    keep = None
    if len(need.sizes) == 1:
        holds, keep = _fewest_children(room, height, holds)
    alive = _alive(room, height, holds, keep)
    items = [np.flatnonzero(a) for a in alive]
    values = [room.values(h) for h in range(index.top + 1)]
    touch, fit_bits = _touch_costs(room, items, values)
    floors = [
        Floor(np.searchsorted(items[h + 1], index.parent[h][items[h]]), touch[h])
        for h in range(height)
    ]
    segments = None
    if need.has_segments and height > need.height:
        segments = Segments(need.height, need.kinds)
    solver = Knapsack(tuple(need.count.tolist()), segments, tuple(need.amount.tolist()))
    slots = None if room.slots is None else room.slots[items[0]]
    costs = solver.solve(need.sizes, room.free[items[0]], slots, floors)
    domains = items[height]
    above = [values[height][domains]]
    up = domains
    keys = []
    for h in range(height, index.top):
        up = index.parent[h][up]
        keys.append(values[h + 1][up])
    fit = costs & ((1 << fit_bits) - 1)
    order = np.lexsort((domains, *reversed(keys), fit, *above, costs >> fit_bits))
    best = int(order[0])
    if costs[best] >= INFEASIBLE:
        return None
    laid = solver.lay(best)
    pods = {int(items[0][item]): state for item, state in laid.pods.items()}
    pieces = {}
    if segments is not None:
        pieces = {int(items[need.height][item]): state for item, state in laid.pieces.items()}
    return int(domains[best]), Laid(pods, pieces), True


def _fewest_children(room: Room, height: int, holds: Bools) -> tuple[Bools, Bools]:
    """For pods of one size: only what can be part of an answer with the fewest children.

    Returns:
        bool[D[height]], the domains that need the fewest; bool[D[height - 1]], the children that
        are in some choice of so few that holds the gang.

    """
    index, need = room.index, room.need
    if need.has_segments and height > need.height:
        goal, room_of = len(need.kind_of), room.pieces(height - 1)
    else:
        goal, room_of = need.pods, room.pods(height - 1)[0]
    parent = index.parent[height - 1]
    order = np.lexsort((-room_of, parent))
    starts = index.children[height][:-1]
    sums = np.cumsum(room_of[order])
    sums -= np.repeat(sums[starts] - room_of[order][starts], np.diff(index.children[height]))
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(index.children[height]))
    enough = sums >= goal
    fewest = np.full(len(holds), np.iinfo(np.int64).max)
    np.minimum.at(fewest, parent[order][enough], rank[enough] + 1)
    least = fewest[holds].min()
    holds = holds & (fewest == least)
    # The roomiest are in some choice anyway; any other must make up for the last of them.
    others = np.zeros(len(holds), np.int64)
    if least > 1:
        last = rank == least - 2
        others[parent[order][last]] = sums[last]
    keep = np.zeros(len(order), np.bool_)
    keep[order] = (rank < least) | (room_of[order] + others[parent[order]] >= goal)
    return holds, keep


def _alive(room: Room, height: int, holds: Bools, keep: Bools | None) -> list[Bools]:
    """Per height up to `height`: the domains under `holds` that have room for anything."""
    index, need = room.index, room.need
    alive = [holds]
    for h in range(height - 1, -1, -1):
        if need.has_segments and height > need.height and h >= need.height:
            useful = room.pieces(h) > 0
        else:
            useful = np.logical_or.reduce(room.pods(h) > 0, axis=0)
        useful &= alive[0][index.parent[h]]
        if keep is not None and h == height - 1:
            useful &= keep
        alive.insert(0, useful)
    return alive


def _touch_costs(room: Room, items: list[Ints], values: list[Ints]) -> tuple[list[Ints], int]:
    """Cost of using each item, and how many low bits of a cost are best fit.

    From the highest bits down: the number of domains used of each level from the top, then the sum
    of their values in the same order, as long as there are bits.
    """
    index = room.index
    height = len(items) - 1
    counts, sums = [], []
    owner = items[height]
    for h in range(height - 1, -1, -1):
        owner = _owners(index, h, height, items[h])
        per_root = np.bincount(owner)
        most = min(room.need.pods, int(per_root.max()))
        counts.append(most.bit_length())
        value = values[h][items[h]]
        spent = min(int(np.bincount(owner, value).max()), most * int(value.max()))
        sums.append(spent.bit_length())
    if sum(counts) > COST_BITS:
        raise TooLargeError
    left = COST_BITS - sum(counts)
    kept = 0
    while kept < len(sums) and sum(sums[: kept + 1]) <= left:
        kept += 1
    fit_bits = sum(sums[:kept])
    touch: list[Ints] = []
    for number, h in enumerate(range(height - 1, -1, -1)):
        cost = np.full(len(items[h]), 1 << (fit_bits + sum(counts[number + 1 :])), np.int64)
        if number < kept:
            cost += values[h][items[h]] << sum(sums[number + 1 : kept])
        touch.insert(0, cost)
    return touch, fit_bits


def _owners(index: TopologyIndex, height: int, top: int, domains: Ints) -> Ints:
    """The domains of height `top` that these of `height` lie in."""
    for h in range(height, top):
        domains = index.parent[h][domains]
    return domains
