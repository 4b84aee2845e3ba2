"""Ranks of mixed sizes: wherever whole racks can have neighbours by rank, they have.

The oracle tries every order of the racks in use and every cut of the ranks, and packs each part
node by node in every way. It shares no code with the product.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from slurmbridge.topology.gang import Gang, Placement
from slurmbridge.topology.pack import pack
from tests.support.pack_checks import index_of


def test_sizes_in_turn_change_the_rack_no_more_often_than_there_are_racks():
    index = index_of([("r1", "z")] * 3 + [("r2", "z")] * 3)
    found = pack(index, np.full(6, 8), Gang((4, 8) * 4))
    assert isinstance(found, Placement)
    assert _changes(found, 3) == 2


def test_a_leader_of_another_size_is_beside_the_first_workers():
    index = index_of([("r1", "z")] * 2 + [("r2", "z")] * 2)
    found = pack(index, np.array([8, 8, 8, 4]), Gang((4, 8, 8, 8)))
    assert isinstance(found, Placement)
    assert _changes(found, 2) == 2


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_where_any_cut_of_the_ranks_fits_the_racks_there_is_one(start):
    racks, possible = 3, 0
    for seed in range(start, start + 100):
        rng = np.random.default_rng(seed)
        each = int(rng.integers(1, 4))
        free = rng.choice([0, 4, 8, 8], racks * each)
        gpus = tuple(rng.choice([2, 4, 8], int(rng.integers(3, 9))).tolist())
        index = index_of([(f"r{i // each}", "z") for i in range(racks * each)])
        found = pack(index, free, Gang(gpus))
        if not isinstance(found, Placement):
            continue
        _fits_where_it_is(free, gpus, found.rows)
        used = sorted(set(found.rows))
        on_rack = {r: tuple(int(free[n]) for n in used if n // each == r) for r in range(racks)}
        mine = [nodes for nodes in on_rack.values() if nodes]
        if len(mine) > 1 and any(_can_be_cut(gpus, turn) for turn in permutations(mine)):
            possible += 1
            assert _changes(found, each) == len(mine), (seed, found)
    assert possible > 20


def _changes(found, each):
    """How often a ring over the ranks changes the rack."""
    racks = [row // each for row in found.rows]
    return sum(a != b for a, b in pairwise([*racks, racks[0]]))


def _fits_where_it_is(free, gpus, rows):
    on = np.zeros(len(free), int)
    np.add.at(on, list(rows), gpus)
    assert (on <= free).all()


def _can_be_cut(gpus, racks):
    ends = combinations(range(1, len(gpus)), len(racks) - 1)
    return any(
        all(
            _holds(nodes, tuple(sorted(gpus[a:b], reverse=True)))
            for nodes, (a, b) in zip(racks, pairwise((0, *cut, len(gpus))), strict=True)
        )
        for cut in ends
    )


@cache
def _holds(nodes, pods):
    if not pods:
        return True
    return any(
        _holds((*nodes[:i], left - pods[0], *nodes[i + 1 :]), pods[1:])
        for i, left in enumerate(nodes)
        if left >= pods[0]
    )
