"""Topologies as they are written out there: all are read, and what is wrong with them is told.

Files of other projects lie in tests/unit/data/topology; shapes of files that may not lie there (of
Slurm's own tests and manuals, of vendors' pages) are written here with other names.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.topology.graph import build
from slurmbridge.topology.slurm_text import read_slurm_text
from slurmbridge.topology.slurm_yaml import read_topology_yaml
from slurmbridge.topology.source import SwitchTree

DATA = Path(__file__).parents[1] / "data" / "topology"

# Of the first topology of a file: nodes, levels above the node, and parts of what is reported.
FILES = {
    "azure_block_18_guid.conf": (72, ("block", "cluster"), ()),
    "azure_block_all_commented.conf": (0, (), ("BlockSizes without any block",)),
    "azure_tree_cyclic_raw.conf": (128, ("level0",), ("loop ibsw14 -> ibsw47", "40 roots")),
    "azure_tree_small.conf": (16, ("level0", "level1"), ()),
    "gcp_tree_two_roots.conf": (28, ("level0", "level1", "level2"), ("2 roots",)),
    "show_topology_tree_soperator.txt": (4, ("level0", "level1", "level2"), ()),
    "topograph_block_12x8.conf": (96, ("block", "block-16", "block-32", "cluster"), ()),
    "topograph_no_topology_and_placeholder.conf": (
        17,
        ("level0", "level1", "level2"),
        ("block block015 has no nodes", "block016", "are mixed", "roots"),
    ),
    "topograph_tree_switch_dots.conf": (96, ("level0", "level1", "level2"), ()),
    "topology_yaml_three.yaml": (4, ("level0", "level1"), ()),
}

SHAPES = {
    "switches named by a hostlist without a dash, nodes in several brackets, no common root": (
        (
            "SwitchName=top-L2 Level=1 LinkSpeed=1 Nodes=g[001-018] Switches=sw1[0100,0102]\n"
            "SwitchName=sw10100 Level=0 LinkSpeed=1 Nodes=g[001-008,013-014]\n"
            "SwitchName=sw10102 Level=0 LinkSpeed=1 Nodes=g[009-012],g[015-018]\n"
            "SwitchName=alone Level=0 LinkSpeed=1 Nodes=b[21-29],b[39-43]\n"
        ),
        (32, ("level0", "level1"), ("2 roots",)),
    ),
    "blocks of ten times eighteen as scontrol lists them": (
        "".join(
            f"BlockName=blk{i:02} BlockIndex={i} Nodes=c[{18 * i:03}-{18 * i + 17:03}] BlockSize=18\n"
            for i in range(10)
        ),
        (180, ("block", "cluster"), ()),
    ),
    "eight blocks of four with sizes up to more than there are": (
        "".join(f"BlockName=k{i} Nodes=m[{4 * i}-{4 * i + 3}]\n" for i in range(8))
        + "BlockSizes=4,8,16,32,64\n",
        (32, ("block", "block-8", "block-16", "block-32"), ()),
    ),
    "a root with leaves at different depths, one named with one number in brackets": (
        (
            "SwitchName=root Switches=mid[0],far\nSwitchName=mid0 Switches=near\n"
            "SwitchName=near Nodes=a[1-2]\nSwitchName=far Nodes=a[3-4]\n"
        ),
        (4, ("level0", "level1", "level2"), ()),
    ),
    "two trunks and a leaf that nothing joins": (
        (
            "SwitchName=sA Switches=lA[1-2]\nSwitchName=lA1 Nodes=n[1-8]\nSwitchName=lA2 Nodes=n[9-16]\n"
            "SwitchName=sB Switches=lB1\nSwitchName=lB1 Nodes=n[17-24]\nSwitchName=lC Nodes=n[33-40]\n"
        ),
        (32, ("level0", "level1"), ("3 roots",)),
    ),
    "two tops over leaves of twenty": (
        "SwitchName=t1 Switches=l[1-2]\nSwitchName=t2 Switches=l3\n"
        + "".join(f"SwitchName=l{i} Nodes=p[{20 * i}-{20 * i + 19}]\n" for i in (1, 2, 3)),
        (60, ("level0", "level1"), ("2 roots",)),
    ),
}


def look(reading):
    """Nodes, levels above the node, and problems of the first topology, and of all of it."""
    problems = list(reading.problems)
    if not reading.stated:
        return 0, (), problems
    first = reading.stated[0]
    if isinstance(first, SwitchTree):
        nodes = sorted({node for switch in first.switches for node in switch.nodes})
    else:
        nodes = sorted(first.of)
    topology = build(nodes, [first])
    return len(nodes), topology.index.levels[1:], problems + list(topology.problems)


def check(found, expected):
    nodes, levels, problems = found
    assert (nodes, levels) == expected[:2]
    assert len(problems) == len(expected[2]), problems
    told = " / ".join(problem.text for problem in problems)
    for part in expected[2]:
        assert part in told


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_project_is_read_and_its_faults_are_told(name):
    text = (DATA / name).read_text()
    read = read_topology_yaml if name.endswith(".yaml") else read_slurm_text
    check(look(read(text)), FILES[name])


def test_every_file_there_is_looked_at():
    assert {p.name for p in DATA.iterdir()} - {"README.md"} == set(FILES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_is_in_use_is_read_and_its_faults_are_told(name):
    text, expected = SHAPES[name]
    check(look(read_slurm_text(text)), expected)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [7, 60, 211, 400])
def test_a_file_that_breaks_off_is_read_as_far_as_it_goes_or_is_a_typed_error(name, cut):
    text = (DATA / name).read_text()[:cut]
    try:
        found = (read_topology_yaml if name.endswith(".yaml") else read_slurm_text)(text)
    except ParseError as error:
        assert name.endswith(".yaml"), error
    else:
        nodes, _, problems = look(found)
        assert nodes or problems or not found.stated
