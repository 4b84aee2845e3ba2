"""A wish in one dimension and segments in the other, against all ways to lay the gang."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest

from slurmbridge.topology.gang import Gang, Placement, Wish
from slurmbridge.topology.pack import pack
from tests.support.pack_checks import index_of


def pool(rng):
    """Six nodes in racks of a zone, and links that may cut across; free GPUs."""
    racks = sorted(rng.integers(0, 3, 6).tolist())
    links = rng.integers(0, 3, 6).tolist()
    tree = index_of([(f"level-r{r}", "z") for r in racks])
    side = index_of([(f"l{a}", "z") for a in links])
    side = msgspec.structs.replace(
        side,
        levels=("node", "link", "level2"),
        height_of={"node": 0, "link": 1, "level2": 2},
    )
    index = msgspec.structs.replace(tree, side=side)
    return index, racks, links, rng.choice([0, 4, 8, 8], 6)


def lowest(outer, inner, free, gpus, segment, limit):
    """Height of the lowest domain by `outer` that holds the gang; None: there is no way."""
    best = None
    for rows in product(range(6), repeat=len(gpus)):
        on = np.zeros(6, int)
        np.add.at(on, list(rows), gpus)
        pieces = [rows[i : i + segment] for i in range(0, len(rows), segment)]
        if (on > free).any() or any(len({inner[r] for r in piece}) > 1 for piece in pieces):
            continue
        height = 0 if len(set(rows)) == 1 else 1 if len({outer[r] for r in rows}) == 1 else 2
        if height <= limit and (best is None or height < best):
            best = height
    return best


def check(index, outer, inner, free, gpus, wish, level, limit):
    found = pack(index, free, Gang(gpus, 2, level), wish)
    wanted = lowest(outer, inner, free, gpus, 2, limit)
    if wanted is None:
        assert not isinstance(found, Placement), found
        assert found.reason == "room"
        return None
    assert isinstance(found, Placement), (found, wanted)
    on = np.zeros(6, int)
    np.add.at(on, list(found.rows), gpus)
    assert (on <= free).all()
    for i in range(0, len(gpus), 2):
        assert len({inner[row] for row in found.rows[i : i + 2]}) == 1
    where = {outer[row] for row in found.rows}
    assert (len(set(found.rows)) > 1) + (len(where) > 1) == wanted
    return wanted


@pytest.mark.parametrize("start", range(0, 150, 50))
def test_both_hold_at_the_lowest_level_that_is_possible(start):
    seen = set()
    for seed in range(start, start + 50):
        rng = np.random.default_rng(seed)
        index, racks, links, free = pool(rng)
        gpus = tuple(rng.choice([4, 8], 4).tolist()) if seed % 2 else (int(rng.choice([4, 8])),) * 4
        tree_level = index.levels[1]
        for mode in ("required", "preferred"):
            wish = Wish(mode, tree_level)
            seen.add(check(index, racks, links, free, gpus, wish, "link", 1))
        wish = Wish("required", "link")
        seen.add(check(index, links, racks, free, gpus, wish, tree_level, 1))
    assert {None, 1} <= seen


def test_a_preferred_level_of_the_other_dimension_is_left_when_its_time_is_over():
    index = index_of([("r1", "z"), ("r1", "z"), ("r2", "z"), ("r2", "z")])
    side = index_of([("a", "z"), ("b", "z"), ("b", "z"), ("a", "z")])
    side = msgspec.structs.replace(
        side, levels=("node", "link", "level2"), height_of={"node": 0, "link": 1, "level2": 2}
    )
    index = msgspec.structs.replace(index, side=side)
    free, gang = np.full(4, 8), Gang((8, 8), 2, "link")
    wish = Wish("preferred", "level1")
    refused = pack(index, free, gang, wish)
    assert not isinstance(refused, Placement)
    assert (refused.reason, refused.level) == ("room", "level1")
    found = pack(index, free, gang, wish, climb=True)
    assert isinstance(found, Placement)
    assert (found.level, {("a", "b", "b", "a")[row] for row in found.rows}) in (
        ("level2", {"a"}),
        ("level2", {"b"}),
    )
    assert found.shorts[-1].level == "level1"


def test_a_level_that_neither_has_is_refused_with_all_that_there_are():
    index = index_of([("r1", "z")] * 2)
    side = msgspec.structs.replace(
        index_of([("a", "z")] * 2),
        levels=("node", "link", "level2"),
        height_of={"node": 0, "link": 1, "level2": 2},
    )
    index = msgspec.structs.replace(index, side=side)
    found = pack(index, np.full(2, 8), Gang((8, 8), 2, "link"), Wish("required", "row"))
    assert found.text == "no level row in the topology (node, level1, level2, link)"
