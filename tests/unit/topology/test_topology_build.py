import msgspec
import networkx as nx
import pytest

from slurmbridge.topology.graph import build
from slurmbridge.topology.index import TopologyRecord, compile_index
from slurmbridge.topology.slurm_text import read_slurm_text
from slurmbridge.topology.source import Places

NODES = tuple(f"n{i}" for i in range(8))


def slurm(text):
    return read_slurm_text(text).stated[0]


def labels(*levels, linked=True, side=False, source="labels", **of):
    """Places by level, each a text such as `aabb....`: one letter a node, a dot is unknown."""
    chains = zip(*(of[level] for level in levels), strict=True)
    places = {
        node: tuple(None if letter == "." else f"{letter}" for letter in chain)
        for node, chain in zip(NODES, chains, strict=True)
        if any(letter != "." for letter in chain)
    }
    return Places(source, levels, places, linked=linked, side=side)


def shape(index):
    """Per level above the node: names, and for each domain its nodes."""
    found = {}
    for height in range(1, index.top + 1):
        bounds = index.bounds[height]
        found[index.levels[height]] = [
            (name, " ".join(index.nodes[r] for r in index.row[bounds[d] : bounds[d + 1]]))
            for d, name in enumerate(index.names[height])
        ]
    return found


def texts(topology):
    return [f"{p.path}: {p.text}" for p in topology.problems]


def test_without_any_source_all_nodes_stand_in_one_cluster():
    topology = build(NODES, [])
    assert shape(topology.index) == {"cluster": [("cluster", " ".join(NODES))]}
    assert texts(topology) == []


def test_an_empty_pool_has_an_empty_topology():
    topology = build((), [labels("rack", rack="aabbccdd")])
    assert len(topology.index) == 0


def test_labels_become_levels_under_one_cluster():
    index = build(NODES, [labels("rack", "zone", rack="aabbccdd", zone="xxxxyyyy")]).index
    assert index.levels == ("node", "rack", "zone", "cluster")
    assert shape(index)["zone"] == [("x", "n0 n1 n2 n3"), ("y", "n4 n5 n6 n7")]
    assert index.path(4) == ("c", "y", "cluster")


def test_the_order_of_nodes_is_that_of_the_source_not_of_the_names():
    tree = slurm("SwitchName=t Switches=b,a\nSwitchName=a Nodes=n0,n2\nSwitchName=b Nodes=n3,n1")
    index = build(NODES[:4], [tree]).index
    assert shape(index)["level0"] == [("b", "n3 n1"), ("a", "n0 n2")]
    assert index.place.tolist() == [2, 1, 3, 0]


def test_a_node_without_a_domain_stands_alone_there_and_never_with_others():
    topology = build(NODES, [labels("rack", rack="aabb.ccd")])
    assert shape(topology.index)["rack"] == [
        ("a", "n0 n1"),
        ("b", "n2 n3"),
        ("c", "n5 n6"),
        ("d", "n7"),
        ("n4", "n4"),
    ]
    assert texts(topology) == ["topology: 1 pool nodes are in no source and stand alone: n4"]


def test_nodes_of_a_source_that_are_not_in_the_pool_are_counted_not_used():
    topology = build(("n0", "n1"), [slurm("SwitchName=s Nodes=n[0-9]")])
    assert topology.index.nodes == ("n0", "n1")
    assert texts(topology) == [
        "topology.conf: 8 nodes are not in the pool: n2, n3, n4, n5, n6 and 3 more"
    ]


def test_roots_that_slurm_does_not_link_stay_apart():
    tree = slurm("SwitchName=a Nodes=n[0-3]\nSwitchName=b Nodes=n[4-7]")
    index = build(NODES, [tree]).index
    assert index.levels == ("node", "level0")
    assert index.names[1] == ("a", "b")


def test_a_site_may_say_that_unlinked_roots_are_linked():
    tree = slurm("SwitchName=a Nodes=n[0-3]\nSwitchName=b Nodes=n[4-7]")
    assert build(NODES, [tree], linked=True).index.levels == ("node", "level0", "cluster")


def test_a_lone_leaf_beside_deeper_trunks_is_a_root_of_its_own():
    tree = slurm(
        "SwitchName=s1 Switches=l1,l2\nSwitchName=l1 Nodes=n[0-1]\nSwitchName=l2 Nodes=n[2-3]\n"
        "SwitchName=s2 Switches=l3\nSwitchName=l3 Nodes=n[4-5]\nSwitchName=l4 Nodes=n[6-7]"
    )
    index = build(NODES, [tree]).index
    assert index.names[2] == ("s1", "s2", "l4")


def test_the_graph_of_a_generation_is_a_forest_with_every_node_in_it():
    tree = slurm("SwitchName=t Switches=a,b\nSwitchName=a Nodes=n[0-3]\nSwitchName=b Nodes=n[4-7]")
    topology = build(NODES, [tree], generation=7)
    assert topology.generation == 7
    assert nx.is_forest(topology.graph)
    assert nx.shortest_path(topology.graph, ("level1", "t"), ("node", "n5")) == [
        ("level1", "t"),
        ("level0", "b"),
        ("node", "n5"),
    ]


def test_levels_named_like_ours_do_no_harm():
    own = labels("node", "cluster", node="abcdefgh", cluster="xxxxyyyy")
    index = build(NODES, [own]).index
    assert index.levels == ("node", "cluster", "whole-cluster")


def test_a_site_may_say_that_nothing_is_linked():
    side = labels("accelerator", accelerator="xyxyxyxy", side=True)
    index = build(NODES, [side], linked=False).index
    assert index.levels == ("node",)
    assert index.side.levels == ("node", "accelerator")


def test_a_record_travels_and_gives_the_same_index():
    topology = build(
        NODES,
        [
            labels("rack", rack="aabb.cc."),
            labels("accelerator", accelerator="xyxyxyxy", side=True),
        ],
    )
    sent = msgspec.json.decode(msgspec.json.encode(topology.record), type=TopologyRecord)
    index = compile_index(sent)
    assert shape(index) == shape(topology.index)
    assert index.side is not None
    assert shape(index.side) == shape(topology.index.side)


# Several sources.


def test_the_same_groups_under_another_name_are_the_same_level():
    tree = slurm("SwitchName=t Switches=a,b\nSwitchName=a Nodes=n[0-3]\nSwitchName=b Nodes=n[4-7]")
    index = build(NODES, [tree, labels("rack", rack="rrrrssss")]).index
    assert index.levels == ("node", "level0", "level1")
    assert index.height_of["rack"] == index.height_of["level0"] == 1
    assert index.names[1] == ("a", "b")


def test_finer_and_coarser_levels_of_a_later_source_go_below_and_above():
    first = labels("row", row="aaaabbbb")
    index = build(NODES, [first, labels("rack", "hall", rack="abcdefgh", hall="xxxxxxxx")]).index
    assert index.levels == ("node", "rack", "row", "hall")
    index = build(NODES, [first, labels("tray", tray="aabbccdd")]).index
    assert index.levels == ("node", "tray", "row", "cluster")


def test_a_level_that_cuts_across_is_left_out_and_reported():
    column = labels("column", column="xyxyxyxy", source="hand")
    topology = build(NODES, [labels("rack", rack="aaaabbbb"), column])
    assert topology.index.levels == ("node", "rack", "cluster")
    assert texts(topology) == ["hand: level column cuts across rack of labels; left out"]


def test_where_sources_differ_the_first_counts_and_the_difference_is_reported():
    first = labels("rack", rack="aaaaabbb", source="slurm")
    topology = build(NODES, [first, labels("rack", rack="aaaabbbb")])
    assert shape(topology.index)["rack"][0] == ("a", "n0 n1 n2 n3 n4")
    assert texts(topology) == [
        "labels: level rack differs from rack of slurm, which counts, for 1 nodes"
    ]


def test_a_later_source_places_nodes_that_the_first_does_not_know_in_the_first_ones_words():
    first = slurm("BlockName=a Nodes=n[0-2]\nBlockName=b Nodes=n[4-6]\nBlockSizes=1")
    topology = build(NODES, [first, labels("rack", rack="rrrrssss")])
    assert shape(topology.index)["block"] == [("a", "n0 n1 n2 n3"), ("b", "n4 n5 n6 n7")]
    assert texts(topology) == []


def test_a_node_without_a_switch_stands_alone_whatever_its_labels_say():
    tree = slurm("SwitchName=a Nodes=n[0-2]\nSwitchName=b Nodes=n[4-7]\nSwitchName=t Switches=a,b")
    topology = build(NODES, [tree, labels("rack", rack="rrrrssss")])
    assert shape(topology.index)["level0"] == [
        ("a", "n0 n1 n2"),
        ("b", "n4 n5 n6 n7"),
        ("n3", "n3"),
    ]
    assert shape(topology.index)["level1"][1] == ("n3", "n3")
    assert texts(topology) == [
        "topology.conf: nodes without a switch, which Slurm uses alone only: n3"
    ]


def test_a_node_that_left_its_block_while_powered_down_is_kept_in_it_by_the_file():
    answer = read_slurm_text(
        "BlockName=b1 BlockIndex=0 Nodes=n[0-2] BlockSize=4\n"
        "BlockName=b2 BlockIndex=1 Nodes=n[4-7] BlockSize=4\n",
        source="scontrol show topology",
    ).stated[0]
    file = slurm("BlockName=b1 Nodes=n[0-3]\nBlockName=b2 Nodes=n[4-7]\nBlockSizes=4,8")
    index = build(NODES, [answer, file]).index
    assert shape(index)["block"] == [("b1", "n0 n1 n2 n3"), ("b2", "n4 n5 n6 n7")]
    assert index.levels == ("node", "block", "block-8")
    assert shape(build(NODES, [answer]).index)["block"][2] == ("n3", "n3")


def test_sources_without_a_common_node_are_matched_level_by_level():
    index = build(NODES, [labels("leaf", leaf="aabb...."), labels("rack", rack="....ccdd")]).index
    assert index.levels == ("node", "leaf", "cluster")
    assert index.names[1] == ("a", "b", "c", "d")
    assert index.height_of["rack"] == 1


def test_one_wrong_label_does_not_cost_a_level_and_is_reported():
    nodes = tuple(f"n{i}" for i in range(20))
    rack = {n: (f"r{i // 5}",) for i, n in enumerate(nodes)}
    zone = {n: ("west" if i < 10 and i != 3 else "east",) for i, n in enumerate(nodes)}
    topology = build(nodes, [Places("slurm", ("rack",), rack), Places("labels", ("zone",), zone)])
    assert topology.index.path(3) == ("r0", "west", "cluster")
    assert texts(topology) == ["topology: rack r0 under west and east: west counts"]


def test_a_level_above_unlinked_roots_is_not_used_but_its_name_is_understood():
    tree = slurm("SwitchName=a Nodes=n[0-3]\nSwitchName=b Nodes=n[4-7]")
    topology = build(NODES, [tree, labels("zone", zone="zzzzzzzz")])
    assert topology.index.levels == ("node", "level0")
    assert topology.index.height_of["zone"] == 1
    assert texts(topology)[1:] == [
        "labels: level zone joins switches that Slurm does not link; not used"
    ]


def test_levels_that_two_sources_order_differently_are_reported():
    one = labels("a", "b", a="aabbccdd", b="xxxxyyyy")
    topology = build(NODES, [one, labels("b", "a", b="xxxxyyyy", a="aabbccdd", source="two")])
    assert topology.index.levels == ("node", "a", "b", "cluster")
    assert texts(topology) == ["two: level a lies elsewhere than in labels; left out"]


# The accelerator dimension.


def test_accelerator_domains_that_nest_become_a_level_of_the_tree():
    tree = labels("rack", rack="aaaabbbb")
    side = labels("accelerator", accelerator="wwxxyyzz", side=True)
    topology = build(NODES, [tree, side])
    assert topology.index.levels == ("node", "accelerator", "rack", "cluster")
    assert topology.index.side is None
    same = labels("accelerator", accelerator="wwwwxxxx", side=True)
    index = build(NODES, [tree, same]).index
    assert index.levels == ("node", "rack", "cluster")
    assert index.height_of["accelerator"] == 1


def test_accelerator_domains_that_cut_across_are_a_dimension_of_their_own():
    tree = labels("leaf", leaf="aabbccdd")
    side = labels("accelerator", accelerator="xyxyzwzw", side=True)
    topology = build(NODES, [tree, side])
    assert topology.index.levels == ("node", "leaf", "cluster")
    assert topology.index.side.levels == ("node", "accelerator", "cluster")
    assert shape(topology.index.side)["accelerator"][0] == ("x", "n0 n2")
    assert texts(topology) == [
        "labels: level accelerator does not nest into the tree: kept as a dimension of its own"
    ]


def test_a_node_without_an_accelerator_domain_is_not_drawn_into_one_by_its_rack():
    tree = labels("rack", rack="aabbccdd")
    side = labels("accelerator", accelerator="x.xxyyyy", side=True)
    index = build(NODES, [tree, side]).index
    assert index.side is not None
    assert shape(index.side)["accelerator"] == [
        ("x", "n0 n2 n3"),
        ("n1", "n1"),
        ("y", "n4 n5 n6 n7"),
    ]


def test_an_accelerator_domain_over_two_unlinked_roots_is_cut_in_two():
    tree = slurm(
        "SwitchName=l1 Nodes=n[0-1]\nSwitchName=l2 Nodes=n[2-3]\nSwitchName=l3 Nodes=n[4-7]\n"
        "SwitchName=r1 Switches=l[1-2]\nSwitchName=r2 Switches=l3"
    )
    side = labels("accelerator", accelerator="xyxyx..y", side=True)
    index = build(NODES, [tree, side]).index
    assert index.side.levels == ("node", "accelerator", "level1")
    assert [name for name, _ in shape(index.side)["accelerator"]] == [
        "x@r1",
        "y@r1",
        "x@r2",
        "n5",
        "n6",
        "y@r2",
    ]


@pytest.mark.parametrize("count", [1, 2, 13])
def test_arrays_agree_with_each_other_on_any_size(count):
    nodes = tuple(f"m{i}" for i in range(count))
    rack = {n: (f"r{i * 7 % 3}", f"z{i * 7 % 3 // 2}") for i, n in enumerate(nodes)}
    index = build(nodes, [Places("labels", ("rack", "zone"), rack)]).index
    assert index.row[index.place].tolist() == list(range(count))
    for height in range(1, index.top + 1):
        for domain in range(len(index.names[height])):
            first, last = index.children[height][domain : domain + 2]
            assert set(index.parent[height - 1][first:last]) == {domain}
            below = index.bounds[height - 1]
            assert below[first] == index.bounds[height][domain]
            assert below[last] == index.bounds[height][domain + 1]
