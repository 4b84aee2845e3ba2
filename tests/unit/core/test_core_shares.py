"""What pods may hold of a node group, as they come and go."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core.explain import status
from slurmbridge.pool.record import Partition
from slurmbridge.pool.share import NodeGroup, Side
from tests.support.builders import (
    Story,
    make_job,
    make_kube_node,
    make_pod,
    make_settings,
    make_snapshot,
    none,
    only,
)

NAMES = ("n1", "n2", "n3")


def story(*groups, names=NAMES):
    return Story(*names, settings=make_settings(groups=groups)).start().forget()


def capped(ceiling, nodes="n[1-2]"):
    return NodeGroup(name="g", nodes=nodes, kubernetes=Side(ceiling=ceiling))


def asks(told, name, gpus, node):
    pod = make_pod(name).gpus(gpus)
    told.see(pod)
    return pod, told.ask(pod, node)


def blocked(told, node):
    return told.machine.view().nodes[node].blocked


def test_pods_get_what_the_ceiling_leaves_and_no_more_from_the_moment_of_asking():
    told = story(capped(5))
    asks(told, "a", 3, "n1")
    assert [told.free(n) for n in NAMES] == [2, 2, 8]
    _, found = asks(told, "b", 3, "n2")
    assert only(found, act.Reply).reason == "gpu_busy"
    asks(told, "c", 2, "n2")
    assert [blocked(told, n) for n in NAMES] == ["ceiling", "ceiling", ""]
    _, found = asks(told, "d", 1, "n1")
    assert only(found, act.Reply).reason == "ceiling"
    assert only(asks(told, "e", 8, "n3")[1], act.Allocate)


def test_room_comes_back_when_a_pod_ends_and_not_before_slurm_says_so():
    told = story(capped(2))
    pod = make_pod("a").gpus(2)
    told.run(pod, 10, "n1", "0-1")
    told.see(pod.over())
    assert blocked(told, "n2") == "ceiling"
    told.slurm(without=(10,)).pass_time(1)
    assert (blocked(told, "n2"), told.free("n2")) == ("", 2)


def test_a_floor_of_slurm_is_never_given_to_pods_whoever_uses_it():
    told = story(NodeGroup(name="g", nodes="n[1-2]", slurm=Side(floor="75%")))
    told.slurm(make_job(9).on("n1", "0-7")).poll()
    assert told.free("n2") == 4


def test_native_jobs_take_nothing_of_what_pods_may_have():
    told = story(capped(4))
    told.slurm(make_job(9).on("n1", "0-7")).poll()
    assert told.free("n2") == 4


@pytest.mark.parametrize("ceiling", [16, "100%", None, 999])
def test_a_bound_that_is_none_changes_nothing(ceiling):
    told = story(capped(ceiling))
    assert [told.free(n) for n in NAMES] == [8, 8, 8]


def test_a_ceiling_of_nothing_keeps_pods_out():
    told = story(capped(0))
    assert [blocked(told, n) for n in NAMES] == ["ceiling", "ceiling", ""]


def test_what_keeps_a_node_out_otherwise_is_told_first():
    told = story(capped(0))
    told.nodes["n1"].state("IDLE+DRAIN")
    told.poll()
    assert blocked(told, "n1") == "DRAIN"


def test_pods_without_a_claim_count_and_are_covered_whatever_the_ceiling_says():
    told = story(capped(1))
    told.see(make_pod("s").gpus(2).on("n1"))
    assert blocked(told, "n2") == "ceiling"
    assert only(told.pass_time(2), act.Cover).uid == "uid-s"


def test_a_new_leader_counts_the_claims_that_it_finds():
    told = story(capped(2))
    pod = make_pod("a").gpus(2)
    told.run(pod, 10, "n1", "0-1")
    told.again(pod)
    assert blocked(told, "n2") == "ceiling"


def test_groups_by_label_and_by_partition():
    label = NodeGroup(name="l", selector={"rack": "r1"}, kubernetes=Side(ceiling=1))
    told = story(label)
    node = make_kube_node("n2").but(labels={"rack": "r1"}).obj
    told.handle(ev.NodeChanged(node))
    assert [told.free(n) for n in NAMES] == [8, 1, 8]
    told.handle(ev.NodeChanged(make_kube_node("n2").obj))
    assert [told.free(n) for n in NAMES] == [8, 8, 8]
    part = story(NodeGroup(name="p", partition="big", kubernetes=Side(ceiling=1)))
    assert part.free("n3") == 8
    snapshot = make_snapshot(*part.nodes.values(), began=part.now + 1)
    part.now += 1
    big = {"big": Partition(name="big", state="UP", nodes=("n3",))}
    part.handle(ev.Polled(type(snapshot)(**{**_fields(snapshot), "partitions": big})))
    assert [part.free(n) for n in NAMES] == [8, 8, 1]


def _fields(snapshot):
    return {name: getattr(snapshot, name) for name in snapshot.__struct_fields__}


def test_a_node_belongs_to_the_first_group_that_names_it():
    other = NodeGroup(name="h", selector={}, partition="", nodes="n[2-3]")
    told = story(capped(1, "n[1-2]"), other)
    shown = {g["name"]: g["nodes"] for g in status(told.machine.state)["groups"]}
    assert shown == {"g": 2, "h": 1}


def test_gpus_that_are_added_to_a_node_count_for_shares():
    told = story(capped("50%", "n1"))
    assert told.free("n1") == 4
    told.kube_nodes["n1"].gpus(16)
    told.handle(ev.NodeChanged(told.kube_nodes["n1"].obj))
    told.nodes["n1"].gpus(16)
    told.poll()
    assert told.free("n1") == 8


def test_a_changed_configuration_holds_at_once():
    told = story(capped(1))
    told.machine.reload(make_settings(groups=(capped(7),)))
    assert told.free("n1") == 7
    told.machine.reload(make_settings())
    assert told.free("n1") == 8
    assert status(told.machine.state)["groups"] == []


def test_a_ceiling_that_was_lowered_evicts_nobody_and_is_told():
    told = story(capped(4))
    pod = make_pod("a").gpus(4)
    told.run(pod, 10, "n1", "0-3")
    told.machine.reload(make_settings(groups=(capped(1),)))
    assert none(told.pass_time(30), act.Evict, act.End)
    (group,) = status(told.machine.state)["groups"]
    assert (group["pods"], group["podsMost"], group["over"]) == (4, 1, ["kubernetes"])


def test_what_slurm_has_to_keep_is_watched():
    group = NodeGroup(name="g", nodes="n[1-2]", kubernetes=Side(floor=10), slurm=Side(ceiling=12))
    told = story(group)
    told.slurm(make_job(9).on("n1", "0-5")).poll()
    assert status(told.machine.state)["groups"][0]["over"] == []
    told.slurm(make_job(10).on("n2", "0")).poll()
    (shown,) = status(told.machine.state)["groups"]
    assert (shown["native"], shown["nativeMost"], shown["over"]) == (7, 6, ["slurm"])


def test_the_planned_way_keeps_to_it_too():
    told = story(capped(5, "n[1-3]"))
    for i in range(9):
        told.see(make_pod(f"p{i}").gpus(1).but(gates=("slurmbridge.dev/claim",)))
    told.pass_time(3)
    assert len(told.of(act.Allocate)) == 5


def test_only_views_that_change_are_made_again():
    told = story(capped(12, "n[1-3]"))
    before = told.machine.view().nodes
    asks(told, "a", 1, "n1")
    after = told.machine.view().nodes
    assert [n for n in NAMES if after[n] is not before[n]] == ["n1"]
