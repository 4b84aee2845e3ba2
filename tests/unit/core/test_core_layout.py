"""Where members go: segments, kinds of members, seats of those that are replaced."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core.room import wishes_of
from slurmbridge.pool import keys
from slurmbridge.pool.group import Group
from slurmbridge.pool.nodefit import NodeFit
from slurmbridge.pool.policy import IdentityRule
from slurmbridge.pool.record import Partition, Reservation
from slurmbridge.topology.gang import SegmentWish, Wish
from tests.support.builders import (
    T0,
    Story,
    make_job,
    make_kube_node,
    make_node,
    make_pod,
    make_policy,
    make_settings,
)


def member(i, size, gpus=8, *, kind="", notes=None, selector=None, name="g"):
    made = Group("own", "default", name, size=size, rank=(i,))
    pod = make_pod(f"{name}{i}").gpus(gpus, kind)
    wanted = tuple((selector or {}).items())
    return pod.but(gates=(keys.GATE,), group=made, annotations=notes or {}, fit=NodeFit(wanted))


def pool(racks, *pods, jobs=(), types=None, labels=None, **settings):
    """racks: node -> rack; types: node -> GPU type; labels: node -> further labels."""
    settings = {"topology_labels": ("x/rack",), "gangs_as_one": False} | settings
    settings = make_settings(settings.pop("policy", None), **settings)
    story = Story(*racks, settings=settings)
    for name, rack in racks.items():
        more = (labels or {}).get(name, {})
        story.kube_nodes[name] = make_kube_node(name).but(labels={"x/rack": rack} | more)
        if types:
            story.nodes[name] = make_node(name).gpus(8, types[name])
    return story.slurm(*jobs).start(*pods)


def asked(actions):
    return {a.uid: a.request.slurm_node for a in actions if isinstance(a, act.Allocate)}


def racks(*sizes):
    return {f"r{r}n{i}": f"r{r}" for r, size in enumerate(sizes) for i in range(size)}


def grant_all(story, pods):
    nodes = asked(story.actions)
    for number, pod in enumerate(pods, 10):
        story.grant(pod, number, nodes[pod.obj.uid], "0-7")
    return nodes


def test_each_segment_is_inside_one_rack_where_the_gang_as_a_whole_would_be_spread_otherwise():
    # Without segments 6 pods on racks of 4 and 4 would be 4 + 2.
    notes = {keys.SEGMENT: "3"}
    pods = [member(i, 6, notes=notes) for i in range(6)]
    nodes = asked(pool(racks(4, 4), *pods).actions)
    by_rank = [nodes[f"uid-g{i}"][:2] for i in range(6)]
    assert by_rank in (["r0"] * 3 + ["r1"] * 3, ["r1"] * 3 + ["r0"] * 3)


def test_a_segment_that_has_no_room_keeps_the_gang_waiting_with_its_level_named():
    notes = {keys.SEGMENT: "3:rack"}
    pods = [member(i, 6, notes=notes) for i in range(6)]
    story = pool(racks(4, 2), *pods)
    story.pass_time(12)
    assert asked(story.actions) == {}
    (told, *_) = [a.annotations[keys.REASON] for a in story.of(act.AnnotatePod)]
    assert told.startswith("topology: ")
    assert "lacks room for" in told


@pytest.mark.parametrize(
    ("note", "told"),
    [
        ({keys.SEGMENT: "0"}, "annotation: slurmbridge.dev/segment: expected"),
        ({keys.SEGMENT: "two"}, "annotation: slurmbridge.dev/segment: expected"),
        ({keys.SEGMENT: "2:"}, "annotation: slurmbridge.dev/segment: expected"),
        ({keys.SEGMENT: "2:row"}, f"annotation: {keys.SEGMENT}: no level row in the topology"),
        ({keys.SEGMENT: "3"}, f"annotation: {keys.SEGMENT}: 4 pods are not a whole number"),
        ({keys.TOPOLOGY: "close"}, "annotation: slurmbridge.dev/topology: expected"),
        ({keys.TOPOLOGY: "preferred:rack@soon"}, "annotation: slurmbridge.dev/topology: expected"),
        ({keys.TOPOLOGY: "required:rack@5m"}, "annotation: slurmbridge.dev/topology: expected"),
    ],
)
def test_a_wish_that_cannot_be_read_or_served_is_told(note, told):
    story = pool(racks(4, 4), *[member(i, 4, notes=note) for i in range(4)])
    story.pass_time(12)
    assert asked(story.actions) == {}
    reasons = [a.annotations[keys.REASON] for a in story.of(act.AnnotatePod)]
    assert reasons[0].startswith(told)


def test_wishes_are_those_of_the_first_member_that_says_something():
    pods = [
        member(0, 2).obj,
        member(1, 2, notes={keys.TOPOLOGY: "preferred:rack@90s", keys.SEGMENT: "2:rack"}).obj,
    ]
    wishes = wishes_of(pods)
    assert wishes.topology == Wish("preferred", "rack", 90)
    assert wishes.segment == SegmentWish(2, "rack")


def test_a_preferred_level_climbs_after_the_time_in_its_annotation_not_after_the_sites():
    notes = {keys.TOPOLOGY: "preferred:rack@20s"}
    story = pool(racks(2, 2), *[member(i, 3, notes=notes) for i in range(3)], climb_s=3600)
    assert asked(story.pass_time(18)) == {}
    assert len(asked(story.pass_time(15))) == 3


def test_members_of_two_gpu_types_go_each_to_nodes_of_its_type_in_the_lowest_domain_of_both():
    where = {"a1": "r0", "a2": "r0", "h1": "r1", "a3": "r1", "h2": "r2"}
    types = {n: {"a": "a100", "h": "h100"}[n[0]] for n in where}
    pods = [member(0, 2, 2, kind="a100"), member(1, 2, 8, kind="h100")]
    story = pool(where, *pods, types=types)
    assert asked(story.actions) == {"uid-g0": "a3", "uid-g1": "h1"}


def test_a_gang_of_two_types_lacks_what_its_type_lacks():
    where = {"a1": "r0", "a2": "r0", "h1": "r0"}
    types = {n: {"a": "a100", "h": "h100"}[n[0]] for n in where}
    pods = [member(0, 3, kind="a100"), *(member(i, 3, kind="h100") for i in (1, 2))]
    story = pool(where, *pods, types=types)
    story.pass_time(12)
    assert asked(story.actions) == {}
    (told, *_) = [a.annotations[keys.REASON] for a in story.of(act.AnnotatePod)]
    assert "lacks room for 1 pod (8 GPUs)" in told


def test_a_member_of_any_type_and_one_of_a_type_share_what_is_there():
    where = {"a1": "r0", "h1": "r0"}
    pods = [member(0, 2), member(1, 2, kind="a100")]
    story = pool(where, *pods, types={"a1": "a100", "h1": "h100"})
    assert asked(story.actions) == {"uid-g0": "h1", "uid-g1": "a1"}


def test_members_with_different_node_selectors_go_each_to_its_own_nodes():
    labels = {"r0n0": {"role": "lead"}, "r0n1": {"role": "work"}, "r1n0": {"role": "work"}}
    pods = [
        member(0, 2, 1, selector={"role": "lead"}),
        member(1, 2, 8, selector={"role": "work"}),
    ]
    story = pool(racks(2, 1), *pods, labels=labels)
    assert asked(story.actions) == {"uid-g0": "r0n0", "uid-g1": "r0n1"}


def test_a_replaced_member_gets_the_place_of_its_rank_back():
    pods = [member(i, 3) for i in range(3)]
    story = pool(racks(8), *pods, jobs=[make_job(5).on("r0n0", "0-7")])
    nodes = grant_all(story, pods)
    for number, pod in enumerate(pods, 10):
        story.see(pod.but(gates=()).on(nodes[pod.obj.uid], number, "0-7"))
    story.pass_time(2)
    old = nodes["uid-g1"]
    story.gone(pods[1].but(phase="Failed"))
    story.slurm(without=(5, 11))  # the first node of the rack is free now too
    story.pass_time(3)
    # The new pod has another name and UID, as one of a Job has, and the same rank.
    new = member(1, 3).but(uid="uid-new", name="g1-x7k2p")
    story.see(new)
    assert asked(story.pass_time(2) + story.actions)["uid-new"] == old


def test_a_replaced_member_whose_place_is_taken_comes_near_its_own_segment():
    notes = {keys.SEGMENT: "2:rack"}
    pods = [member(i, 4, notes=notes) for i in range(4)]
    story = pool(racks(3, 3), *pods)
    nodes = grant_all(story, pods)
    for number, pod in enumerate(pods, 10):
        story.see(pod.but(gates=()).on(nodes[pod.obj.uid], number, "0-7"))
    story.gone(pods[3].but(phase="Failed"))
    story.slurm(make_job(50).on(nodes["uid-g3"], "0-7"), without=(13,))
    story.pass_time(3)
    new = member(3, 4, notes=notes).but(uid="uid-new")
    story.see(new)
    found = asked(story.pass_time(2) + story.actions)["uid-new"]
    assert found[:2] == nodes["uid-g2"][:2]
    assert found != nodes["uid-g3"]


def test_members_go_only_to_nodes_of_their_partition_and_where_these_change_to_others():
    settings = {"policy": make_policy(partition="kube")}
    story = pool(racks(2, 2), **settings)
    everywhere = Partition("main", "UP", tuple(racks(2, 2)))
    story.partitions = [Partition("kube", "UP", ("r1n0", "r1n1")), everywhere]
    story.poll()
    pods = [member(i, 2) for i in range(2)]
    for pod in pods:
        story.see(pod)
    assert set(asked(story.actions).values()) == {"r1n0", "r1n1"}
    story.partitions = [Partition("kube", "UP", ("r0n0", "r1n1")), everywhere]
    story.poll()
    single = make_pod("single").gpus(8).but(gates=(keys.GATE,))
    assert asked(story.see(single)) == {"uid-single": "r0n0"}


def test_a_single_pod_is_told_that_the_nodes_of_its_partition_are_none_of_the_pool():
    story = pool(racks(1), policy=make_policy(partition="kube"))
    story.partitions = [Partition("kube", "UP", ("x",)), Partition("main", "UP", ("r0n0",))]
    story.poll()
    story.see(make_pod("a").gpus(8).but(gates=(keys.GATE,)))
    story.pass_time(10)
    told = story.of(act.AnnotatePod)[-1].annotations[keys.REASON]
    assert told == "outside_partition: slurmbridge: not in the Slurm partition asked for"


def test_a_member_in_a_reservation_and_one_outside_go_each_to_their_nodes():
    rule = IdentityRule(namespaces=("*",), reservations=("mine",))
    story = pool(racks(2), policy=make_policy(identities=(rule,)))
    story.reservations.append(Reservation("mine", T0 - 60, T0 + 1e6, ("r0n0",), frozenset()))
    story.poll()
    pods = [member(0, 2, notes={keys.RESERVATION: "mine"}), member(1, 2, gpus=4)]
    for pod in pods:
        story.see(pod)
    assert asked(story.actions) == {"uid-g0": "r0n0", "uid-g1": "r0n1"}


LINKS = dict(zip(racks(4, 4), ("a", "b", "a", "b", "b", "a", "c", "c"), strict=True))


def linked(*pods, **settings):
    key = "accelerator.topograph.run/domain"
    return pool(racks(4, 4), *pods, labels={n: {key: a} for n, a in LINKS.items()}, **settings)


@pytest.mark.parametrize("wish", ["required:rack", "preferred:rack@1h"])
def test_a_wish_for_a_rack_and_segments_of_nvlink_domains_that_cut_across_both_hold(wish):
    notes = {keys.TOPOLOGY: wish, keys.SEGMENT: "2:accelerator"}
    pods = [member(i, 4, notes=notes) for i in range(4)]
    story = linked(*pods)
    nodes = [asked(story.actions)[pod.obj.uid] for pod in pods]
    assert len({racks(4, 4)[node] for node in nodes}) == 1
    assert LINKS[nodes[0]] == LINKS[nodes[1]]
    assert LINKS[nodes[2]] == LINKS[nodes[3]]


def test_where_both_cannot_hold_the_level_is_told():
    notes = {keys.TOPOLOGY: "required:rack", keys.SEGMENT: "2:accelerator"}
    story = linked(*[member(i, 6, gpus=4, notes=notes) for i in range(6)], jobs=(
        make_job(1).on("r0n0", "0-7"), make_job(2).on("r0n1", "0-7"), make_job(3).on("r1n0", "0-7"),
        make_job(4).on("r1n1", "0-3"), make_job(5).on("r1n2", "0-3"), make_job(6).on("r1n3", "0-3"),
    ))  # fmt: skip
    story.pass_time(12)
    assert asked(story.actions) == {}
    told = story.of(act.AnnotatePod)[0].annotations[keys.REASON]
    assert "no rack holds it" in told


def test_a_member_that_is_replaced_stays_in_the_rack_and_in_its_nvlink_domain():
    notes = {keys.TOPOLOGY: "required:rack", keys.SEGMENT: "2:accelerator"}
    pods = [member(i, 2, notes=notes) for i in range(2)]
    story = linked(*pods)
    nodes = grant_all(story, pods)
    mine = nodes["uid-g1"]
    for number, pod in enumerate(pods, 10):
        story.see(pod.but(gates=()).on(nodes[pod.obj.uid], number, "0-7"))
    story.gone(pods[1].on(mine, 11, "0-7").over())
    story.slurm(make_job(99).on(mine, "0-7"), without=(11,)).forget()
    again = member(1, 2, notes=notes).but(uid="uid-again")
    story.see(again)
    story.pass_time(5)
    assert (
        asked(story.actions) == {}
    )  # the other nodes of its domain are in the other rack, or busy
