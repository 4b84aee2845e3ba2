import pytest

from slurmbridge.topology.graph import places_of_tree
from slurmbridge.topology.slurm_text import read_slurm_text
from slurmbridge.topology.source import Places, SwitchTree


def tree(text, **options):
    """Places and all problems of a text with switch lines."""
    reading = read_slurm_text(text, **options)
    (stated,) = reading.stated
    assert isinstance(stated, SwitchTree)
    places, problems = places_of_tree(stated)
    return places, [*reading.problems, *problems]


def blocks(text):
    reading = read_slurm_text(text)
    (stated,) = reading.stated
    assert isinstance(stated, Places)
    return stated, reading.problems


TREES = {
    "switches and nodes as host lists": (
        "SwitchName=top Switches=s[1-2]\nSwitchName=s1 Nodes=n[01-02]\nSwitchName=s2 Nodes=n03",
        {"n01": ("s1", "top"), "n02": ("s1", "top"), "n03": ("s2", "top")},
    ),
    "keys in any case, comments, joined lines, quotes, spaces around the sign": (
        (
            "# fabric\nswitchname = top SWITCHES = \\\n  s1 # the only one\n"
            'SWITCHNAME=s1 nodes="n1,n2" LinkSpeed=900\n'
        ),
        {"n1": ("s1", "top"), "n2": ("s1", "top")},
    ),
    "switch names with dots": (
        "SwitchName=sw.2.1 Switches=sw.1.[1-2]\nSwitchName=sw.1.1 Nodes=a\nSwitchName=sw.1.2 Nodes=b",
        {"a": ("sw.1.1", "sw.2.1"), "b": ("sw.1.2", "sw.2.1")},
    ),
    "scontrol lists all nodes at upper switches, in no order of levels": (
        (
            "SwitchName=r1 Level=0 LinkSpeed=1 Nodes=a\n"
            "SwitchName=row Level=1 LinkSpeed=1 Nodes=a Switches=r1\n"
            "SwitchName=top Level=2 LinkSpeed=1 Nodes=a,b Switches=row,loose\n"
            "SwitchName=loose Level=0 LinkSpeed=1 Nodes=b"
        ),
        {"a": ("r1", "row", "top"), "b": ("loose", None, "top")},
    ),
    "a branch that is one level deeper": (
        (
            "SwitchName=top Switches=mid,g2\nSwitchName=mid Switches=g1\n"
            "SwitchName=g1 Switches=l1\nSwitchName=g2 Switches=l2\n"
            "SwitchName=l1 Nodes=a\nSwitchName=l2 Nodes=b"
        ),
        {"a": ("l1", "g1", "mid", "top"), "b": ("l2", "g2", None, "top")},
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_a_switch_tree_tells_each_node_its_switches_closest_first(name):
    text, expected = TREES[name]
    places, problems = tree(text)
    assert dict(places.of) == expected
    assert not problems


def test_levels_are_called_as_slurm_numbers_them_or_as_the_site_wants():
    text = "SwitchName=top Switches=s1\nSwitchName=s1 Nodes=n1"
    assert tree(text)[0].levels == ("level0", "level1")
    assert tree(text, level_names=("rack",))[0].levels == ("rack", "level1")


def test_nodes_of_a_switch_that_is_not_described_hang_on_the_upper_one_and_it_is_reported():
    places, problems = tree(
        "SwitchName=cell Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=sw1[10,12]\n"
        "SwitchName=sw110 Level=0 LinkSpeed=1 Nodes=n[1-2]"
    )
    assert places.of["n1"] == ("sw110", "cell")
    assert places.of["n3"] == (None, "cell")
    assert [p.text for p in problems] == [
        "switches that are named but not described: sw112 (under cell)"
    ]


def test_two_roots_are_reported_and_both_are_used():
    places, problems = tree(
        "SwitchName=gpu Switches=blue\nSwitchName=blue Nodes=b[0-1]\n"
        "SwitchName=tpu Switches=slim\nSwitchName=slim Nodes=s0\n"
    )
    assert places.of == {"b0": ("blue", "gpu"), "b1": ("blue", "gpu"), "s0": ("slim", "tpu")}
    assert not places.linked
    assert [p.text for p in problems] == ["2 roots, no gang spans two of them: gpu, tpu"]


def test_a_loop_of_switches_is_named_and_what_hangs_below_it_is_still_used():
    places, problems = tree(
        "SwitchName=core Switches=spine1,spine2\n"
        "SwitchName=spine1 Switches=leaf1,core\n"
        "SwitchName=spine2 Switches=leaf2,core\n"
        "SwitchName=leaf1 Nodes=a\nSwitchName=leaf2 Nodes=b\n"
    )
    assert places.of == {"a": ("leaf1",), "b": ("leaf2",)}
    assert problems[0].text == (
        "loop core -> spine1 -> core; left out with all that is in a loop with it: "
        "core, spine1, spine2"
    )
    assert problems[1].text == "2 roots, no gang spans two of them: leaf1, leaf2"


def test_a_switch_that_is_its_own_child_is_a_loop():
    places, problems = tree("SwitchName=a Switches=a,b\nSwitchName=b Nodes=n1")
    assert places.of == {"n1": ("b",)}
    assert problems[0].text.startswith("loop a -> a;")


def test_of_two_parents_the_first_one_written_counts():
    places, problems = tree(
        "SwitchName=s0 Nodes=a,b\nSwitchName=s1 Nodes=b,c\n"
        "SwitchName=up1 Switches=s[0-1]\nSwitchName=up2 Switches=s[0-1]"
    )
    assert places.of == {"a": ("s0", "up1"), "b": ("s0", "up1"), "c": ("s1", "up1")}
    assert [p.text for p in problems] == [
        "switch s0, s1 under up1 and up2: up1 counts",
        "node b under s0 and s1: s0 counts",
    ]


def test_a_switch_described_twice_or_with_nothing_under_it_is_reported():
    places, problems = tree("SwitchName=s Nodes=a\nSwitchName=s Nodes=b\nSwitchName=e")
    assert places.of == {"a": ("s",)}
    assert [(p.path, p.text) for p in problems] == [
        ("topology.conf:2", "switch s is described twice"),
        ("topology.conf:3", "switch e has nothing under it"),
    ]


def test_a_last_line_that_is_to_be_continued_is_read_as_it_is():
    places, problems = tree("SwitchName=s \\\n Nodes=a \\")
    assert (dict(places.of), problems) == ({"a": ("s",)}, [])


FAULTY = {
    "a host list that is none": ("SwitchName=s Nodes=a[1-", "topology.conf:1"),
    "a line of another file": ("SwitchName=s Nodes=a\nNodeName=a Gres=gpu:8", "topology.conf:2"),
    "prose": ("SwitchName=s Nodes=a\nhello there", "topology.conf:2"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_line_is_reported_by_its_number_and_the_rest_is_read(name):
    text, where = FAULTY[name]
    reading = read_slurm_text(text)
    assert len(reading.stated) == 1
    assert [p.path for p in reading.problems] == [where]


def test_slurm_without_a_topology_states_nothing_and_that_is_no_fault():
    assert read_slurm_text("No topology information available\n").stated == ()
    assert read_slurm_text("No topology information available\n").problems == ()
    assert read_slurm_text("").stated == ()


BLOCK_FILE = "".join(f"BlockName=b{i} Nodes=n[{i}1-{i}4]\n" for i in range(1, 7))

SIZES = {
    "a list": ("BlockSizes=4,8,16", ("block", "block-8", "block-16"), 0),
    "the base size alone": ("BlockSizes=4", ("block",), 0),
    "a base size below the nodes of a block": ("BlockSizes=1", ("block",), 0),
    "missing: Slurm's default, up to what holds all": (
        "",
        ("block", "block-8", "block-16", "block-32"),
        0,
    ),
    "-1: as if missing": (
        "BlockSizes=-1",
        ("block", "block-8", "block-16", "block-32"),
        1,
    ),
    "0: as if missing": ("BlockSizes=0", ("block", "block-8", "block-16", "block-32"), 1),
    "not a power of two times the base: the valid beginning counts": (
        "BlockSizes=4,8,12",
        ("block", "block-8"),
        1,
    ),
    "larger than all blocks together: up to the first that holds all": (
        "BlockSizes=4,32,64",
        ("block", "block-32"),
        0,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_block_sizes(name):
    line, levels, faults = SIZES[name]
    places, problems = blocks(BLOCK_FILE + line)
    assert places.levels == levels
    assert len(problems) == faults, problems


def test_aggregated_blocks_are_neighbours_in_the_file_and_a_rest_stays_alone():
    places, _ = blocks(
        BLOCK_FILE.replace("BlockName=b6 Nodes=n[61-64]\n", "") + "BlockSizes=4,8,16"
    )
    assert places.of["n11"] == ("b1", "b[1-2]", "b[1-4]")
    assert places.of["n41"] == ("b4", "b[3-4]", "b[1-4]")
    assert places.of["n51"] == ("b5", None, None)


def test_blocks_smaller_than_the_base_size_or_without_nodes_are_reported_and_used():
    places, problems = blocks(
        "BlockName=a Nodes=n1\nBlockName=b\nBlockName=c Nodes=n2\nBlockSizes=2,4"
    )
    assert [p.text for p in problems] == [
        "block b has no nodes",
        "fewer nodes than the base block size 2: a, c",
    ]
    assert places.of == {"n1": ("a", "a,b"), "n2": ("c", None)}


def test_a_node_in_two_blocks_stays_in_the_first():
    places, problems = blocks("BlockName=a Nodes=n1,n2\nBlockName=b Nodes=n2,n3\nBlockSizes=2")
    assert places.of["n2"] == ("a",)
    assert [p.text for p in problems] == ["in two blocks, the first counts: n2"]


def test_all_blocks_commented_out_leave_no_topology_and_say_so():
    reading = read_slurm_text("#BlockName=a Nodes=n1\nBlockSizes=20")
    assert reading.stated == ()
    assert [p.text for p in reading.problems] == ["BlockSizes without any block"]


def test_scontrol_lists_aggregated_blocks_itself():
    places, problems = blocks(
        "BlockName=g0 BlockIndex=0 Nodes=10.0.0.3,10.0.1.5 BlockSize=2\n"
        "BlockName=g1 BlockIndex=1 Nodes=10.0.0.7,10.0.1.9 BlockSize=2\n"
        "AggregatedBlock=g[0-1] BlockIndex=2 Nodes=10.0.0.3,10.0.0.7,10.0.1.5,10.0.1.9 BlockSize=4\n"
        "BlockName=other BlockIndex=0 Nodes=w[1-2]\n"
    )
    assert places.levels == ("block", "block-4")
    assert places.of["10.0.1.9"] == ("g1", "g[0-1]")
    assert places.of["w1"] == ("other", None)
    assert places.linked
    assert not problems


def test_no_aggregated_block_is_made_up_that_scontrol_does_not_list():
    places, _ = blocks(
        "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\n"
        "BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2\n"
    )
    assert places.levels == ("block",)


def test_an_aggregated_block_without_a_size_is_left_out_and_reported():
    _, problems = blocks(
        "BlockName=a BlockIndex=0 Nodes=n1\nAggregatedBlock=a BlockIndex=1 Nodes=n1"
    )
    assert [p.text for p in problems] == ["aggregated block a has no BlockSize and is left out"]


def test_switch_and_block_lines_in_one_file_are_two_topologies_and_reported():
    reading = read_slurm_text("SwitchName=s Nodes=a\nBlockName=b Nodes=c\n")
    assert [type(s) for s in reading.stated] == [SwitchTree, Places]
    assert len(reading.problems) == 1


def test_rings_keep_the_order_of_their_nodes_and_are_not_linked():
    (ring,) = read_slurm_text("RingName=r0 Nodes=n3,n1,n2\nRingName=r1 Nodes=n2,n4\n").stated
    assert list(ring.of.items()) == [
        ("n3", ("r0",)),
        ("n1", ("r0",)),
        ("n2", ("r0",)),
        ("n4", ("r1",)),
    ]
    assert not ring.linked
