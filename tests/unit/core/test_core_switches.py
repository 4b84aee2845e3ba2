"""What a gang in Slurm's queue asks of Slurm's switches: leaves, for levels of its own tree."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from slurmbridge.pool.group import Group
from tests.support.builders import Story, make_job, make_kube_node, make_pod, make_settings, only

NODES = tuple(f"n{i}" for i in range(1, 9))
TREE = (
    "SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\n"
    "SwitchName=s3 Nodes=n[5-6]\nSwitchName=s4 Nodes=n[7-8]\n"
    "SwitchName=p1 Switches=s[1-2]\nSwitchName=p2 Switches=s[3-4]\nSwitchName=p0 Switches=p[1-2]\n"
)
BLOCKS = "".join(f"BlockName=b{i} Nodes=n[{2 * i - 1}-{2 * i}]\n" for i in range(1, 5))


def switches(wish, *, size, gpus=8, text=TREE, file=None):
    """`--switches` of a gang that finds the pool full."""
    pods = []
    for rank in range(size):
        group = Group("own", "default", "g", size=size, rank=(rank,))
        pod = make_pod(f"g{rank}").gpus(gpus).but(gates=(keys.GATE,), group=group)
        pods.append(pod.wrote(TOPOLOGY=wish))
    story = Story(*NODES, settings=make_settings(topology_labels=("x/rack", "x/chassis")))
    for i, name in enumerate(NODES):
        labels = {"x/rack": f"r{i // 2}", "x/chassis": f"c{i}"}
        story.kube_nodes[name] = make_kube_node(name).but(labels=labels)
    story.slurm(*(make_job(900 + i).on(name, "0-7") for i, name in enumerate(NODES)))
    story.start()
    story.handle(ev.TopologyRead(text, file))
    for pod in pods:
        story.see(pod)
    story.pass_time(4)
    request = only(story.of(act.QueueGroup), act.QueueGroup).request
    assert request.least == -(-size * gpus // 8)
    return request.switches


@pytest.mark.parametrize(
    ("wish", "size", "asked"),
    [
        ("preferred:level0", 2, "1@2:00"),
        ("preferred:rack", 2, "1@2:00"),
        ("preferred:rack@10m", 2, "1@10:00"),
        ("preferred:level1", 4, "2@2:00"),
        ("preferred:level1", 3, "2@2:00"),
        ("preferred:level1", 2, "1@2:00"),
    ],
)
def test_a_preferred_level_of_slurms_tree_is_as_many_leaves_as_the_gang_needs(wish, size, asked):
    assert switches(wish, size=size) == asked


@pytest.mark.parametrize(
    ("wish", "size", "gpus"),
    [
        ("preferred:level2", 4, 8),
        ("preferred:chassis", 2, 4),
        ("preferred:hall", 4, 8),
        ("required:rack", 2, 8),
        ("none", 4, 8),
    ],
)
def test_of_other_levels_and_other_wishes_no_switches_are_asked_for(wish, size, gpus):
    assert switches(wish, size=size, gpus=gpus) == ""


@pytest.mark.parametrize(("text", "file"), [("", None), (BLOCKS, None), ("", ("/t.conf", TREE))])
def test_where_slurmctld_itself_has_no_switches_none_are_asked_for(text, file):
    assert switches("preferred:rack", size=2, text=text, file=file) == ""
