"""The pool's topology in the core: sources, what is told of it, single pods, dimensions beside."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core import publish
from slurmbridge.pool import keys
from slurmbridge.pool.group import Group
from tests.support.builders import Story, make_job, make_kube_node, make_pod, make_settings

NODES = ("n1", "n2", "n3", "n4")
RACKS = dict(zip(NODES, ("r1", "r1", "r2", "r2"), strict=True))
SWITCHES = "SwitchName=s0 Switches=s[1-2]\nSwitchName=s1 Nodes=n[1,3]\nSwitchName=s2 Nodes=n[2,4]\n"


def pool(*pods, jobs=(), labels=None, keys=("x/rack",), **settings):
    settings = {"topology_labels": keys, "gangs_as_one": False} | settings
    story = Story(*NODES, settings=make_settings(**settings))
    labels = labels or {name: {"x/rack": rack} for name, rack in RACKS.items()}
    for name in NODES:
        story.kube_nodes[name] = make_kube_node(name).but(labels=labels[name])
    return story.slurm(*jobs).start(*pods)


def domains(story):
    nodes = publish.view(story.machine.state).nodes
    return {name: node.domains for name, node in nodes.items()}


def gated(name, gpus=8):
    return make_pod(name).gpus(gpus).but(gates=(keys.GATE,))


def asked(actions):
    return {a.uid: a.request.slurm_node for a in actions if isinstance(a, act.Allocate)}


def test_a_single_pod_goes_into_a_rack_in_use_before_it_breaks_a_whole_one():
    for busy, beside in (("n1", "n2"), ("n4", "n3"), ("n2", "n1")):
        story = pool(gated("a"), jobs=(make_job(1).on(busy, "0-7"),))
        assert asked(story.actions) == {"uid-a": beside}


def test_the_view_tells_where_nodes_stand_and_again_when_a_label_has_changed():
    story = pool()
    assert domains(story) == {n: (r, "cluster") for n, r in RACKS.items()}
    moved = make_kube_node("n2").but(labels={"x/rack": "r2"}).obj
    story.handle(ev.NodeChanged(moved))
    assert domains(story)["n2"] == ("r2", "cluster")


def test_without_a_topology_nothing_is_said_of_it_and_nothing_is_logged():
    story = pool(keys=())
    assert set(domains(story).values()) <= {(), ("cluster",)}
    assert story.of(act.LogTopology) == []


@pytest.mark.parametrize("name", ["topology.conf", "topology.yaml"])
def test_a_sites_own_file_is_a_source_and_what_slurmctld_says_comes_before_it(name):
    yaml = (
        "- topology: t\n  cluster_default: true\n  tree:\n    switches:\n"
        "      - {switch: f0, children: 'f[1-2]'}\n"
        "      - {switch: f1, nodes: 'n[1,3]'}\n      - {switch: f2, nodes: 'n[2,4]'}\n"
    )
    conf = SWITCHES.replace("=s", "=f")
    text = yaml if name.endswith("yaml") else conf
    story = pool(keys=())
    story.handle(ev.TopologyRead("", (f"/etc/slurm/{name}", text)))
    assert domains(story)["n3"] == ("f1", "f0")
    story.handle(ev.TopologyRead(SWITCHES, (f"/etc/slurm/{name}", text)))
    assert domains(story)["n3"] == ("s1", "s0")


def test_a_file_that_cannot_be_read_is_told_and_the_labels_are_used():
    story = pool()
    story.handle(ev.TopologyRead("", ("/etc/slurm/topology.yaml", "a: [")))
    assert domains(story)["n1"] == ("r1", "cluster")
    story.tick()
    assert "/etc/slurm/topology.yaml" in story.of(act.LogTopology)[-1].problems[0]


def test_what_is_wrong_with_the_topology_is_logged():
    story = pool(keys=())
    story.handle(ev.TopologyRead(SWITCHES + "SwitchName=s3 Nodes=n4\n"))
    domains(story)
    story.tick()
    assert any("n4" in text for text in story.of(act.LogTopology)[-1].problems)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("accelerator.topograph.run/domain", {}),
        ("x/nvlink", {"accelerator_labels": ("x/nvlink",)}),
    ],
)
def test_accelerator_domains_are_a_dimension_of_their_own_for_wishes(key, settings):
    links = dict(zip(NODES, ("a", "b", "b", "a"), strict=True))
    labels = {n: {"x/rack": RACKS[n], key: links[n]} for n in NODES}
    wish = {keys.TOPOLOGY: f"required:{'accelerator' if not settings else 'nvlink'}"}
    pods = []
    for rank in range(2):
        group = Group("own", "default", "g", size=2, rank=(rank,))
        pods.append(gated(f"g{rank}").but(group=group, annotations=wish))
    story = pool(*pods, labels=labels, **settings)
    assert sorted(asked(story.actions).values()) in (["n1", "n4"], ["n2", "n3"])
