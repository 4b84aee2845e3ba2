"""The exact packing under the domains of one height: what goes into the knapsack, and its best."""

from __future__ import annotations

import numpy as np

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
from slurmbridge.topology.need import Room

Found = tuple[int, Laid]
"""Domain, and where the pods go, by place."""


def lay_exactly(room: Room, height: int, holds: Bools) -> Found | None:
    """Lay the gang under the best of some domains, by the objective of `pack`.

    Args:
        room: the gang and the free nodes.
        height: of the domains, >= 1.
        holds: bool[D[height]], domains that are not known to be too small.

    Returns:
        None: none of them holds it.

    Raises:
        TooLargeError: the search would take too long, or a cost has more bits than an integer.

    """
    index, need = room.index, room.need
    keep = None
    if len(need.sizes) == 1:
        holds, keep = fewest_children(room, height, holds)
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
    costs = solver.solve(need.sizes, need.types, room.free[:, items[0]], slots, floors)
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
    return int(domains[best]), Laid(pods, pieces)


def fewest_children(room: Room, height: int, holds: Bools) -> tuple[Bools, Bools]:
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
