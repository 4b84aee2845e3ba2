from itertools import pairwise

import numpy as np
import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.topology import exact
from slurmbridge.topology.gang import Gang, Placement, Refusal, Short, Wish, parse_topology_wish
from slurmbridge.topology.graph import build
from slurmbridge.topology.pack import pack
from slurmbridge.topology.score import topology_key
from slurmbridge.topology.slurm_text import read_slurm_text
from slurmbridge.topology.source import Places


def racks(*sizes, rows=None, zones=None):
    """Racks r0, r1, ... of so many nodes, in zones (`zones[i]` of rack i) if given."""
    of = {}
    for rack, size in enumerate(sizes):
        for number in range(size):
            zone = () if zones is None else (zones[rack],)
            of[f"r{rack}n{number}"] = (f"r{rack}", *zone)
    levels = ("rack",) if zones is None else ("rack", "zone")
    return build(tuple(of) if rows is None else rows, [Places("labels", levels, of)]).index


def names(index, placement):
    assert isinstance(placement, Placement), placement
    return [index.nodes[row] for row in placement.rows]


def free_of(index, default=8, **given):
    return np.array([given.get(name, default) for name in index.nodes])


# Where.


def test_a_gang_goes_into_the_lowest_domain_that_holds_it():
    index = racks(2, 4, 4, zones="aab")
    found = pack(index, free_of(index), Gang((8,) * 4))
    assert (found.level, found.domain, found.spread) == ("rack", "r2", {"node": 4})
    found = pack(index, free_of(index, r1n0=0, r2n0=0), Gang((8,) * 4))
    assert (found.level, found.domain, found.spread) == ("zone", "a", {"rack": 2, "node": 4})
    found = pack(index, free_of(index), Gang((8,) * 7))
    assert (found.level, found.spread) == ("cluster", {"zone": 2, "rack": 2, "node": 7})


def test_of_two_domains_the_one_with_less_free_is_taken_so_that_the_other_stays_whole():
    index = racks(4, 4, 4)
    found = pack(index, free_of(index, r1n3=0), Gang((8,) * 3))
    assert found.domain == "r1"


def test_of_two_domains_with_as_much_free_the_one_in_use_is_taken_before_a_whole_one():
    index = racks(3, 4)
    total = free_of(index)
    free = free_of(index, r1n3=0)
    assert pack(index, free, Gang((8,) * 3), total=total).domain == "r1"
    index = racks(4, 3)
    free = free_of(index, r0n3=0)
    assert pack(index, free, Gang((8,) * 3), total=free_of(index)).domain == "r0"


def test_a_gang_over_three_switches_of_two_nodes_each_uses_exactly_two_of_them():
    index = racks(2, 2, 2)
    found = pack(index, free_of(index), Gang((8,) * 4))
    assert found.spread == {"rack": 2, "node": 4}
    found = pack(index, free_of(index, r0n0=0), Gang((8,) * 4))
    assert {name[:2] for name in names(index, found)} == {"r1", "r2"}


def test_the_roomiest_racks_are_not_always_the_right_ones():
    # Two racks hold 10 pods as (6, 4): with 4 + 2 nodes, or as (5, 5): with 1 + 1.
    index = racks(4, 2, 1, 1)
    free = free_of(index, 5, r0n0=2, r0n1=2, r0n2=1, r0n3=1, r1n0=2, r1n1=2)
    found = pack(index, free, Gang((1,) * 10))
    assert found.spread == {"rack": 2, "node": 2}


def test_several_pods_share_a_node_and_the_fewest_nodes_are_used():
    index = racks(4)
    found = pack(index, free_of(index, 4, r0n2=8), Gang((2,) * 6))
    assert names(index, found) == ["r0n0"] * 2 + ["r0n2"] * 4
    assert found.spread == {"node": 2}


def test_a_gang_that_one_node_holds_goes_on_one_node():
    index = racks(2, 2)
    found = pack(index, free_of(index, r1n1=4), Gang((2, 2)))
    assert (found.level, found.domain, found.spread) == ("node", "r1n1", {})


def test_pods_of_different_sizes_share_nodes():
    index = racks(3)
    found = pack(index, free_of(index), Gang((8, 6, 6, 2, 2)))
    assert (found.exact, found.spread) == (True, {"node": 3})
    pods = names(index, found)
    assert pods[1] != pods[2]
    assert set(pods[3:]) == set(pods[1:3])


def test_sizes_that_do_not_divide_each_other_are_not_promised_what_only_the_sums_allow():
    index = racks(2, 3)
    # The 20 GPUs of r0 are as many as the pods ask for, but no two of these make 10.
    found = pack(index, free_of(index, 10), Gang((7, 5, 4, 4)))
    assert (found.exact, found.level, found.domain) == (True, "rack", "r1")
    assert found.shorts[-1] == Short("node", "r0n0", 2, 12)
    refusal = pack(racks(2), np.array([10, 10]), Gang((7, 5, 4, 4)))
    assert refusal.shorts[-1] == Short("rack", "r0", 1, 4)


def test_nodes_that_are_no_candidates_or_unknown_are_never_used():
    index = racks(2, 2)
    candidates = np.array([True, False, True, True])
    found = pack(index, free_of(index), Gang((8, 8)), candidates=candidates)
    assert found.domain == "r1"
    found = pack(index, free_of(index, r1n0=-1), Gang((8, 8)))
    assert found.domain == "r0"


def test_a_node_takes_no_more_pods_than_it_has_slots_for():
    index = racks(3)
    found = pack(index, free_of(index), Gang((1,) * 4), slots=np.array([1, 3, 9]))
    assert names(index, found) == ["r0n2"] * 4
    found = pack(index, free_of(index), Gang((1,) * 4), slots=np.array([1, 3, 3]))
    assert names(index, found) == ["r0n0"] + ["r0n1"] * 3
    found = pack(index, free_of(index), Gang((4, 1, 1)), slots=np.array([1, 2, 1]))
    assert len(set(found.rows)) == 2


# Wishes.


def test_required_is_refused_where_only_a_wider_domain_holds_the_gang():
    index = racks(4, 4)
    refusal = pack(
        index, free_of(index, r0n0=0, r1n0=4, r1n1=4), Gang((8,) * 4), Wish("required", "rack")
    )
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.level, refusal.short_by) == ("room", "rack", 1)
    assert refusal.text == "no rack holds it: r0 comes closest and lacks room for 1 pod (8 GPUs)"
    assert refusal.shorts == (Short("node", "r0n1", 3, 24), Short("rack", "r0", 1, 8))


def test_preferred_holds_like_required_until_it_may_climb():
    index = racks(2, 2)
    wish = Wish("preferred", "rack")
    assert isinstance(pack(index, free_of(index), Gang((8,) * 3), wish), Refusal)
    found = pack(index, free_of(index), Gang((8,) * 3), wish, climb=True)
    assert found.level == "cluster"
    assert [str(short) for short in found.shorts] == [
        "no node holds it: r0n0 comes closest and lacks room for 2 pods (16 GPUs)",
        "no rack holds it: r0 comes closest and lacks room for 1 pod (8 GPUs)",
    ]


def test_a_required_level_that_is_not_known_is_refused_and_a_preferred_one_limits_nothing():
    index = racks(2, 2)
    refusal = pack(index, free_of(index), Gang((8, 8)), Wish("required", "row"))
    assert (refusal.reason, refusal.level) == ("level", "row")
    assert "node, rack, cluster" in refusal.text
    found = pack(index, free_of(index), Gang((8,) * 3), Wish("preferred", "row"))
    assert found.level == "cluster"


def test_answers_use_the_name_of_the_level_that_was_asked_for():
    tree = read_slurm_text("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]").stated[0]
    rack = Places("labels", ("rack",), {f"n{i}": (f"r{(i + 1) // 2}",) for i in range(1, 5)})
    index = build(("n1", "n2", "n3", "n4"), [tree, rack]).index
    refusal = pack(index, free_of(index), Gang((8,) * 3), Wish("required", "rack"))
    assert refusal.text.startswith("no rack holds it: s1 ")
    refusal = pack(index, free_of(index), Gang((8,) * 3))
    assert refusal.text.startswith("no level0 holds it: s1 ")


def test_no_gang_spans_fabrics_that_are_not_linked():
    tree = read_slurm_text(
        "SwitchName=gpu Switches=g[1-2]\nSwitchName=g1 Nodes=a[1-2]\nSwitchName=g2 Nodes=a[3-4]\n"
        "SwitchName=tpu Switches=t1\nSwitchName=t1 Nodes=b[1-4]\n"
    ).stated[0]
    nodes = tuple(f"{x}{i}" for i in range(1, 5) for x in "ab")
    index = build(nodes, [tree]).index
    found = pack(index, free_of(index, b1=0), Gang((8,) * 4))
    assert sorted(names(index, found)) == ["a1", "a2", "a3", "a4"]
    refusal = pack(index, free_of(index, b1=0), Gang((8,) * 5))
    assert (refusal.level, refusal.short_by) == ("level1", 1)


def test_two_fabrics_under_one_stated_root_are_used_together_only_when_neither_is_enough():
    tree = read_slurm_text(
        "SwitchName=any Switches=gpu,tpu\nSwitchName=gpu Nodes=a[1-4]\nSwitchName=tpu Nodes=b[1-4]\n"
    ).stated[0]
    nodes = tuple(f"{x}{i}" for i in range(1, 5) for x in "ab")
    index = build(nodes, [tree]).index
    assert pack(index, free_of(index, a1=0), Gang((8,) * 4)).domain == "tpu"
    assert pack(index, free_of(index), Gang((8,) * 5)).domain == "any"
    wish = Wish("required", "level0")
    assert isinstance(pack(index, free_of(index), Gang((8,) * 5), wish), Refusal)


def test_a_wish_for_the_accelerator_dimension_is_planned_in_it():
    nodes = tuple(f"n{i}" for i in range(8))
    leaf = Places("labels", ("leaf",), {n: (f"l{i // 2}",) for i, n in enumerate(nodes)})
    nvl = {n: (f"x{i % 2 + 2 * (i // 4)}",) for i, n in enumerate(nodes)}
    side = Places("labels", ("accelerator",), nvl, side=True)
    index = build(nodes, [leaf, side]).index
    assert names(index, pack(index, free_of(index), Gang((8, 8)))) == ["n0", "n1"]
    found = pack(index, free_of(index), Gang((8, 8)), Wish("required", "accelerator"))
    assert (found.level, names(index, found)) == ("accelerator", ["n0", "n2"])
    refusal = pack(index, free_of(index), Gang((8, 8, 8)), Wish("required", "accelerator"))
    assert refusal.level == "accelerator"
    segments = Gang((8,) * 4, segment=2, segment_level="accelerator")
    found = names(index, pack(index, free_of(index), segments))
    assert [nvl[a] == nvl[b] for a, b in (found[:2], found[2:])] == [True, True]


WISHES = {
    "none": Wish(),
    "required:rack": Wish("required", "rack"),
    " preferred:tier-0 ": Wish("preferred", "tier-0"),
}


@pytest.mark.parametrize("text", WISHES)
def test_a_wish_is_read(text):
    assert parse_topology_wish(text) == WISHES[text]


@pytest.mark.parametrize(
    "text", ["", "rack", "required", "required:", "wanted:rack", "required:a b", "required:-x"]
)
def test_a_wish_of_another_form_is_an_error(text):
    with pytest.raises(ParseError):
        parse_topology_wish(text)


# Segments.


def test_three_blocks_of_17_give_a_gang_of_36_in_segments_of_12_one_segment_each():
    text = "".join(f"BlockName=b{i} Nodes=n{i}[01-17]\n" for i in (1, 2, 3)) + "BlockSizes=16"
    nodes = tuple(f"n{i}{j:02}" for i in (1, 2, 3) for j in range(1, 18))
    index = build(nodes, read_slurm_text(text).stated).index
    found = pack(index, free_of(index), Gang((8,) * 36, 12, "block"))
    blocks = [name[:2] for name in names(index, found)]
    assert [blocks.count(b) for b in ("n1", "n2", "n3")] == [12, 12, 12]
    assert all(len(set(blocks[i : i + 12])) == 1 for i in (0, 12, 24))
    without = pack(index, free_of(index), Gang((8,) * 36))
    assert max(names(index, without).count(n) for n in nodes) == 1


def test_a_gang_of_one_segment_stays_in_one_domain_of_its_level():
    index = racks(2, 2)
    refusal = pack(index, free_of(index), Gang((8,) * 3, segment=4))
    assert (refusal.reason, refusal.level) == ("room", "rack")


def test_segments_may_be_of_an_upper_level():
    index = racks(2, 2, 2, 2, zones="aabb")
    found = pack(index, free_of(index, r0n0=0, r2n0=0), Gang((8,) * 6, 3, "zone"))
    zones = [index.path(row)[1] for row in found.rows]
    assert zones == ["a"] * 3 + ["b"] * 3


def test_a_segment_too_many_is_named_by_its_pods():
    index = racks(3, 3)
    refusal = pack(index, free_of(index), Gang((8,) * 6, 2))
    assert (
        refusal.text
        == "no cluster holds it: cluster comes closest and lacks room for 2 pods (16 GPUs)"
    )


def test_segments_of_mixed_pods_are_whole_in_their_domain():
    index = racks(2, 2)
    gang = Gang((2, 8, 4, 2, 8, 4), 3)
    found = pack(index, free_of(index), gang)
    assert [index.path(row)[0] for row in found.rows] == ["r0"] * 3 + ["r1"] * 3


NEVER = {
    "no pods": (Gang(()), "gang"),
    "a pod without GPUs": (Gang((8, 0)), "gang"),
    "not a whole number of segments": (Gang((8,) * 5, 2), "segment"),
    "a negative segment": (Gang((8,) * 4, -2), "segment"),
    "segments of an unknown level": (Gang((8,) * 4, 2, "row"), "level"),
}


@pytest.mark.parametrize("name", NEVER)
def test_what_can_never_be_served_is_told_apart_from_no_room(name):
    gang, reason = NEVER[name]
    index = racks(4, 4)
    assert pack(index, free_of(index), gang).reason == reason


def test_an_empty_pool_has_no_room():
    index = build((), []).index
    assert pack(index, np.zeros(0, np.int64), Gang((1,))).reason == "room"


def test_what_mixed_pods_lack_counts_the_largest_out_first():
    index = racks(2)
    refusal = pack(index, free_of(index), Gang((8, 8, 4, 4)))
    assert refusal.shorts[-1] == Short("rack", "r0", 1, 8)


# Order of ranks.


def test_ranks_follow_the_switches_where_these_differ_from_the_names():
    tree = read_slurm_text(
        "SwitchName=top Switches=s[1-3]\nSwitchName=s1 Nodes=n4,n1\n"
        "SwitchName=s2 Nodes=n6,n2\nSwitchName=s3 Nodes=n3,n5\n"
    ).stated[0]
    index = build(tuple(f"n{i}" for i in range(1, 7)), [tree]).index
    found = pack(index, free_of(index), Gang((8,) * 6))
    assert names(index, found) == ["n4", "n1", "n6", "n2", "n3", "n5"]


def test_a_ring_over_the_ranks_crosses_as_few_switches_as_there_are():
    index = racks(3, 3, 3, zones="aba")
    found = pack(index, free_of(index, r0n1=0), Gang((4,) * 14))
    for height in (1, 2):
        walk = [index.path(row)[height - 1] for row in found.rows]
        changes = sum(a != b for a, b in pairwise([*walk, walk[0]]))
        assert changes == (len(set(walk)) if len(set(walk)) > 1 else 0)


# Size of the search.


def test_a_search_that_would_take_too_long_is_not_made_and_the_answer_says_so(monkeypatch):
    monkeypatch.setattr("slurmbridge.topology.knapsack.WORK_LIMIT", 1000)
    index = racks(*[8] * 40)
    found = pack(index, free_of(index), Gang((8,) * 100))
    assert (found.exact, found.spread) == (False, {"rack": 13, "node": 100})
    mixed = Gang((8, 6, 2) * 20)
    found = pack(index, free_of(index), mixed)
    assert (found.exact, found.spread["node"]) == (False, 40)
    refusal = pack(racks(2, 2), np.array([8, 8, 8, 8]), Gang((7, 7, 3, 3, 3, 3, 1, 1)))
    assert isinstance(refusal, Placement)


def test_costs_with_more_bits_than_an_integer_are_not_compared_wrongly(monkeypatch):
    monkeypatch.setattr(exact, "COST_BITS", 3)
    index = racks(3, 3, 3)
    found = pack(index, free_of(index), Gang((8,) * 5))
    assert (found.exact, found.spread) == (False, {"rack": 2, "node": 5})


# Single pods.


def test_thirty_single_pods_leave_a_whole_block_for_the_gang():
    index = racks(4, 4, 4, 4)
    total = free_of(index)
    free = total.copy()
    for _ in range(30):
        (row,) = pack(index, free, Gang((1,)), total=total).rows
        free[row] -= 1
    assert sorted(free.tolist())[3:] == [2, *[8] * 12]
    found = pack(index, free, Gang((8,) * 4), Wish("required", "rack"), total=total)
    assert isinstance(found, Placement)


def test_the_key_above_the_node_prefers_racks_in_use_and_stays_in_its_range():
    index = racks(2, 2, 2)
    key = topology_key(index, free_of(index, r1n0=1, r2n0=7), free_of(index))
    assert key[2] == key[3] > key[4] == key[5] > key[0] == key[1]
    many = racks(*[1] * 3000)
    key = topology_key(many, np.arange(3000), np.full(3000, 4000))
    assert (key.min(), key.max()) == (0, 1023)
    assert (np.diff(key) <= 0).all()
