import numpy as np
import pytest

from slurmbridge.topology.beside import place_beside
from slurmbridge.topology.gang import Refusal, Wish
from slurmbridge.topology.graph import build
from slurmbridge.topology.source import Places

NODES = tuple(f"n{i}" for i in range(8))
INDEX = build(
    NODES,
    [
        Places(
            "labels",
            ("rack", "zone"),
            {n: (f"r{i // 2}", f"z{i // 4}") for i, n in enumerate(NODES)},
        )
    ],
).index
FULL = np.full(8, 8)

PLACES = {
    # others, free GPUs of n0..n7, GPUs of the pod -> node
    "a node that the gang is on already": ([0, 1], "88888888", 4, "n0"),
    "the fuller one of two such nodes": ([0, 1], "86888888", 4, "n1"),
    "the same rack, where no node of the gang has room": ([0], "28888888", 4, "n1"),
    "the same zone, where the rack has no room": ([0, 1], "22888888", 4, "n2"),
    "a rack that the gang is in, before a new one": ([0, 4], "2282 2888".replace(" ", ""), 4, "n5"),
    "anywhere, where the zone has no room": ([0, 1], "22228868", 4, "n6"),
    "where it breaks the least, without others": ([], "88888588", 4, "n5"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_member_that_is_replaced_comes_to(name):
    others, free, gpus, expected = PLACES[name]
    row = place_beside(INDEX, np.array([int(f) for f in free]), gpus, others, total=FULL)
    assert NODES[row] == expected


def test_a_required_level_keeps_it_with_the_others_or_refuses():
    free = np.array([2, 2, 8, 8, 8, 8, 8, 8])
    refusal = place_beside(INDEX, free, 4, [0, 1], Wish("required", "rack"))
    assert isinstance(refusal, Refusal)
    assert refusal.text == "no rack holds it: r0 comes closest and lacks room for 1 pod (4 GPUs)"
    row = place_beside(INDEX, free, 4, [0, 1], Wish("required", "zone"))
    assert NODES[row] == "n2"


def test_a_preferred_level_keeps_it_until_it_may_climb():
    free = np.array([0, 0, 0, 0, 8, 8, 8, 8])
    wish = Wish("preferred", "zone")
    assert isinstance(place_beside(INDEX, free, 4, [0], wish), Refusal)
    assert place_beside(INDEX, free, 4, [0], wish, climb=True) == 4


def test_a_wish_for_the_accelerator_dimension_keeps_it_there():
    leaf = Places("labels", ("leaf",), {n: (f"l{i // 2}",) for i, n in enumerate(NODES)})
    nvl = {n: (f"x{i % 2 + 2 * (i // 4)}",) for i, n in enumerate(NODES)}
    index = build(NODES, [leaf, Places("labels", ("nvlink",), nvl, side=True)]).index
    free = np.array([0, 8, 8, 8, 8, 8, 8, 8])
    assert place_beside(index, free, 4, [0]) == 1
    assert place_beside(index, free, 4, [0], Wish("required", "nvlink")) == 2


def test_only_candidates_are_used_and_an_unknown_level_is_refused():
    candidates = np.array([name == "n7" for name in NODES])
    assert place_beside(INDEX, FULL, 1, [0], candidates=candidates) == 7
    refusal = place_beside(INDEX, FULL, 9, [0])
    assert refusal.reason == "room"
    assert place_beside(INDEX, FULL, 1, [0], Wish("required", "row")).reason == "level"
    assert place_beside(build((), []).index, np.zeros(0), 1, []).reason == "room"
