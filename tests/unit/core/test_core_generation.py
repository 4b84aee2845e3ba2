"""Generations of the topology: built beside the events, one at a time, and only when they differ."""

from __future__ import annotations

import networkx as nx
import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core import publish
from slurmbridge.pool import keys
from slurmbridge.pool.group import Group
from slurmbridge.topology.generation import Sources, fitted, keys_in_use, labels_in_use, make
from tests.support.builders import Story, make_kube_node, make_node, make_pod, make_settings

RACKS = {"n1": "r1", "n2": "r1", "n3": "r2", "n4": "r2"}


def member(i, size=2, wish="required:rack"):
    group = Group("own", "default", "g", size=size, rank=(i,))
    pod = make_pod(f"g{i}").gpus(8).but(gates=(keys.GATE,), group=group)
    return pod.but(annotations={keys.TOPOLOGY: wish})


def pool(*pods, builds=True, **settings):
    settings = {"topology_labels": ("x/rack",), "gangs_as_one": False} | settings
    story = Story(*RACKS, settings=make_settings(**settings))
    story.builds = builds
    for name, rack in RACKS.items():
        story.kube_nodes[name] = labelled(name, rack)
    return story.start(*pods)


def labelled(name, rack, **others):
    return make_kube_node(name).but(labels={"x/rack": rack, **others})


def change(story, node):
    return story.handle(ev.NodeChanged(node.obj))


def asked(actions):
    return {a.uid: a.request.slurm_node for a in actions if isinstance(a, act.Allocate)}


def wanted(story):
    return story.of(act.BuildTopology)


def answer(story):
    sources = wanted(story)[-1].sources
    return story.handle(ev.TopologyBuilt(sources, make(sources)))


def test_the_first_generation_is_built_once_and_nothing_is_planned_before_it_is_there():
    story = pool(member(0), member(1), make_pod("a").gpus(1).but(gates=(keys.GATE,)), builds=False)
    story.pass_time(20)
    assert len(wanted(story)) == 1
    assert asked(story.actions) == {}
    told = {a.annotations[keys.REASON] for a in story.of(act.AnnotatePod)}
    assert told == {"topology: where the nodes stand is not known yet"}
    found = asked(answer(story))
    assert set(found) == {"uid-g0", "uid-g1", "uid-a"}
    assert {RACKS[found[uid]] for uid in ("uid-g0", "uid-g1")} in ({"r1"}, {"r2"})


def test_before_slurm_and_the_sites_file_have_been_read_no_generation_is_built():
    story = Story("n1")
    for event in (ev.PodsListed(()), ev.NodesListed((make_kube_node("n1").obj,))):
        story.handle(event)
    story.poll()
    assert wanted(story) == []
    story.handle(ev.TopologyRead("SwitchName=s Nodes=n1\n"))
    assert wanted(story)[-1].sources.text.startswith("SwitchName")


def test_a_label_that_says_nothing_of_places_builds_nothing():
    story = pool().forget()
    for i in range(5):
        change(story, labelled("n2", "r1", **{"example.com/heartbeat": str(i)}))
        story.handle(ev.NodesListed(tuple(n.obj for n in story.kube_nodes.values())))
        story.pass_time(2)
    assert wanted(story) == []
    change(story, labelled("n2", "r2"))
    assert len(wanted(story)) == 1


@pytest.mark.parametrize("key", ["fabric.topograph.run/tier-0", "accelerator.topograph.run/domain"])
def test_topographs_labels_are_in_use_without_being_named(key):
    story = pool().forget()
    change(story, labelled("n2", "r1", **{key: "s1"}))
    assert len(wanted(story)) == 1


def test_what_changes_and_is_as_before_when_the_answer_comes_builds_nothing_more():
    story = pool().forget()
    story.builds = False
    change(story, labelled("n2", "r2"))
    change(story, labelled("n2", "r1"))
    change(story, labelled("n2", "r2"))
    answer(story)
    story.pass_time(5)
    assert len(wanted(story)) == 1


def test_until_the_next_generation_is_there_the_last_one_goes_on():
    story = pool(builds=True).forget()
    story.builds = False
    change(story, labelled("n2", "r2"))
    change(story, labelled("n3", "r1"))
    story.see(member(0))
    assert {RACKS[n] for n in asked(story.see(member(1))).values()} in ({"r1"}, {"r2"})
    domains = {n: v.domains for n, v in publish.view(story.machine.state).nodes.items()}
    assert domains["n2"] == ("r1", "cluster")
    assert len(wanted(story)) == 1
    answer(story)
    assert len(wanted(story)) == 2  # the first one was of one change
    answer(story)
    domains = {n: v.domains for n, v in publish.view(story.machine.state).nodes.items()}
    assert (domains["n2"], domains["n3"]) == (("r2", "cluster"), ("r1", "cluster"))


def test_a_node_that_the_last_generation_does_not_know_takes_no_part_in_what_spans_nodes():
    story = pool(member(0, wish="none", size=5)).forget()
    story.builds = False
    story.nodes["n5"], story.kube_nodes["n5"] = make_node("n5"), labelled("n5", "r2")
    change(story, story.kube_nodes["n5"])
    story.poll()
    for i in range(1, 5):
        story.see(member(i, wish="none", size=5))
    story.pass_time(5)
    assert asked(story.actions) == {}
    assert len(asked(answer(story)) or asked(story.pass_time(2))) == 5


def test_an_answer_that_never_comes_is_asked_for_again():
    story = pool(builds=False)
    story.handle(ev.ActionFailed("BuildTopology", "", 0, "it broke"))
    story.pass_time(50)
    assert len(wanted(story)) == 1
    story.pass_time(20)
    assert len(wanted(story)) == 2


def test_an_answer_of_older_sources_does_not_stay():
    story = pool(builds=False)
    old = wanted(story)[-1].sources
    story.pass_time(61)
    change(story, labelled("n2", "r2"))
    story.pass_time(61)
    answer(story)
    story.handle(ev.TopologyBuilt(old, make(old)))
    answer(story)
    domains = {n: v.domains for n, v in publish.view(story.machine.state).nodes.items()}
    assert domains["n2"] == ("r2", "cluster")


def test_no_event_builds_a_graph(monkeypatch):
    """Whatever changes: NetworkX is for those who answer `BuildTopology`."""
    story = pool(builds=False)
    built = ev.TopologyBuilt(wanted(story)[-1].sources, make(wanted(story)[-1].sources))

    def never(*_):
        raise AssertionError("a graph inside an event")

    monkeypatch.setattr(nx.DiGraph, "__init__", never)
    with pytest.raises(AssertionError):
        make(built.sources)
    story.handle(built)
    change(story, labelled("n2", "r2"))
    story.handle(ev.TopologyRead("SwitchName=s Nodes=n[1-4]\n"))
    story.nodes["n5"], story.kube_nodes["n5"] = make_node("n5"), labelled("n5", "r2")
    change(story, story.kube_nodes["n5"])
    for i in range(2):
        story.see(member(i))
    story.pass_time(5)
    assert len(asked(story.actions)) == 2
    assert story.machine.view().nodes["n1"].domains == ("r1", "cluster")
    story.handle(ev.NodeGone(story.kube_nodes.pop("n4").obj))
    story.pass_time(5)


def test_labels_in_use_are_those_of_the_settings_and_topographs():
    labels = {
        "x/rack": "r1",
        "kubernetes.io/hostname": "n1",
        "fabric.topograph.run/tier-1": "s",
        "accelerator.topograph.run/domain": "a",
        "x/nvlink": "b",
    }
    own = labels_in_use(labels, keys_in_use(("x/zone", "x/rack"), ()))
    assert [key for key, _ in own] == [
        "accelerator.topograph.run/domain",
        "fabric.topograph.run/tier-1",
        "x/rack",
    ]
    named = labels_in_use(labels, keys_in_use(("x/rack",), ("x/nvlink",)))
    assert ("x/nvlink", "b") in named
    assert "accelerator.topograph.run/domain" not in dict(named)


def test_a_generation_is_fitted_to_other_rows_and_new_nodes_stand_alone():
    names, links = ("a", "b", "c", "d"), {"a": "x", "b": "y", "c": "x", "d": "y"}
    racks = {"a": "r1", "b": "r1", "c": "r2", "d": "r2"}
    labels = tuple((("l", links[n]), ("rack", racks[n])) for n in names)
    made = make(Sources(names, labels, ("rack",), ("l",)))
    other = fitted(made.record, ("d", "new", "a", "c"))
    assert [other.path(row) for row in range(4)] == [
        ("r2", "cluster"),
        ("new", "new"),
        ("r1", "cluster"),
        ("r2", "cluster"),
    ]
    assert [other.nodes[row] for row in other.row.tolist()] == ["a", "c", "d", "new"]
    assert other.side is not None
    assert [other.side.path(row)[0] for row in range(4)] == ["y", "new", "x", "x"]
    same = fitted(made.record, names)
    assert same.row.tolist() == made.index.row.tolist()
