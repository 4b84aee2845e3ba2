import pytest

from slurmbridge.topology.graph import places_of_tree
from slurmbridge.topology.slurm_yaml import read_topology_yaml

ALL_KINDS = """
- topology: fabric
  cluster_default: true
  tree:
    switches:
      - {switch: root, children: "s[1-2]"}
      - {switch: s1, nodes: "n[1-2]"}
      - {switch: s2, nodes: "n[3-4]"}
- topology: nvlink
  block:
    block_sizes: [2, 4]
    blocks:
      - {block: b1, nodes: "n[1-2]"}
      - {block: b2, nodes: "n[3-4]"}
- topology: plain
  flat: true
- topology: plain-too
  flat: {alpha_step_rank: true}
- topology: circle
  ring:
    rings:
      - {ring: r1, nodes: "n[2,1]"}
- topology: cube
  torus3d:
    toruses:
      - name: pod1
        dims: {x: 2, y: 2, z: 1}
        nodes: n[1-4]
        placements: [{dims: {x: 2, y: 1, z: 1}}]
      - name: pod2
        dims: {x: 2, y: 1, z: 1}
        regions:
          - {anchor: {x: 0, y: 0, z: 0}, dims: {x: 1, y: 1, z: 1}, nodes: n5}
          - {anchor: {x: 1, y: 0, z: 0}, dims: {x: 1, y: 1, z: 1}, nodes: n6}
"""


def test_every_kind_of_topology_in_one_file_is_read():
    reading = read_topology_yaml(ALL_KINDS)
    assert reading.problems == ()
    by_name = {stated.topology: stated for stated in reading.stated}
    assert list(by_name) == ["fabric", "nvlink", "plain", "plain-too", "circle", "cube"]
    assert reading.default() is by_name["fabric"]
    places, problems = places_of_tree(by_name["fabric"])
    assert (places.of["n3"], places.topology, problems) == (("s2", "root"), "fabric", [])
    assert by_name["nvlink"].levels == ("block", "block-4")
    assert by_name["nvlink"].of["n3"] == ("b2", "b[1-2]")
    assert by_name["plain"].levels == by_name["plain-too"].levels == ()
    assert by_name["plain"].linked
    assert list(by_name["circle"].of) == ["n2", "n1"]
    assert by_name["cube"].of["n4"] == ("pod1",)
    assert by_name["cube"].of["n6"] == ("pod2",)


def test_the_first_topology_is_the_default_where_none_says_so():
    reading = read_topology_yaml("- {topology: a, flat: true}\n- {topology: b, flat: true}")
    assert reading.default().topology == "a"
    assert read_topology_yaml("").default() is None


FAULTS = {
    "not YAML": ("- {topology: ", 0, "topology.yaml"),
    "not a list": ("topology: a", 0, "topology.yaml"),
    "an entry that is no mapping": ("- a\n- {topology: b, flat: true}", 1, "topology.yaml[0]"),
    "no kind": ("- {topology: a}\n- {topology: b, flat: true}", 1, "topology.yaml[0]"),
    "two kinds": ("- {topology: a, flat: true, tree: {switches: []}}", 0, "topology.yaml[0]"),
    "flat: false is no kind": ("- {topology: a, flat: false}", 0, "topology.yaml[0]"),
    "no name": ("- {flat: true}", 1, "topology.yaml[0].topology"),
    "switches that are no list": (
        "- {topology: a, tree: {switches: s1}}",
        1,
        "topology.yaml[0].tree.switches",
    ),
    "a tree that is no mapping": ("- {topology: a, tree: [s1]}", 0, "topology.yaml[0].tree"),
    "a faulty host list": (
        "- {topology: a, tree: {switches: [{switch: s, nodes: 'n[1-'}]}}",
        1,
        "topology.yaml[0].tree.switches[0].nodes",
    ),
    "a faulty block size": (
        "- {topology: a, block: {block_sizes: [-1], blocks: [{block: b, nodes: n1}]}}",
        1,
        "topology.yaml[0].block.block_sizes",
    ),
    "a block without nodes": (
        "- {topology: a, block: {blocks: [{block: b}]}}",
        1,
        "topology.yaml[0].block.blocks[0]",
    ),
    "a ring without nodes": (
        "- {topology: a, ring: {rings: [{ring: r}]}}",
        1,
        "topology.yaml[0].ring.rings[0]",
    ),
    "a name used twice": (
        "- {topology: a, flat: true}\n- {topology: a, flat: true}",
        2,
        "topology.yaml",
    ),
    "two defaults": (
        (
            "- {topology: a, cluster_default: true, flat: true}\n"
            "- {topology: b, cluster_default: true, flat: true}"
        ),
        2,
        "topology.yaml",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_with_its_path_and_the_rest_is_read(name):
    text, read, where = FAULTS[name]
    reading = read_topology_yaml(text)
    assert len(reading.stated) == read
    assert [p.path for p in reading.problems] == [where]


def test_names_that_yaml_takes_for_numbers_are_names():
    text = "- {topology: 7, tree: {switches: [{switch: 12, nodes: n1}]}}"
    (tree,) = read_topology_yaml(text).stated
    assert (tree.topology, tree.switches[0].name) == ("7", "12")
