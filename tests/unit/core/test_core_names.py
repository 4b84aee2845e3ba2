"""Names of nodes that change, or tell nothing any more, while pods run there."""

from __future__ import annotations

import msgspec
import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from slurmbridge.pool.claim import ClaimId, group_ref, group_uid, write_comment
from slurmbridge.pool.group import Group
from slurmbridge.pool.noderecord import NodePod, NodeReport
from tests.support.builders import (
    CLUSTER,
    OWNER,
    T0,
    Story,
    make_claim,
    make_claim_job,
    make_job,
    make_kube_node,
    make_pod,
    make_settings,
    none,
    plain,
    use,
)


@pytest.fixture
def pod():
    return make_pod("a").gpus(2)


def without_its_label(story):
    story.kube_nodes["n1"].but(labels={})


def with_a_twin(story):
    story.kube_nodes["N1.x"] = make_kube_node("N1.x").but(labels={"pool": "yes"})


def with_the_label_of_another(story):
    story.kube_nodes.pop("n2")
    story.kube_nodes["n1"].but(labels={"pool": "yes", "slurm": "n2"})


def deleted(story):
    story.kube_nodes.pop("n1")


def several(story):
    story.settings = msgspec.structs.replace(story.settings, names=(("n1", "n[1-2]"),))


CHANGES = [without_its_label, with_a_twin, with_the_label_of_another, deleted, several]


def pool():
    """Two nodes, in the pool by a label."""
    story = Story(
        "n1", "n2", settings=make_settings(selector=(("pool", "yes"),), slurm_node_label="slurm")
    )
    for node in story.kube_nodes.values():
        node.but(labels={"pool": "yes"})
    return story


@pytest.mark.parametrize("change", CHANGES)
def test_a_new_leader_keeps_and_renews_the_claim_of_a_pod_whose_node_is(change, pod):
    story = pool().start(pod).run(pod, 10, "n1", "0-1")
    change(story)
    story.forget().again(pod)
    story.pass_time(60)
    assert story.phase(pod) == "bound"
    assert story.entry(pod).slurm_node == "n1"
    assert none(story.actions, act.End, act.Evict, act.Cover, act.Extend)
    story.jobs[10].but(end=story.now + 60)
    story.pass_time(2)
    assert [a.job_id for a in story.of(act.Extend)] == [10]


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_with_agents_and_in_the_end_the_claim_is_given_back(change, pod):
    story = pool()
    story.settings = make_settings(
        agents_required=True, selector=(("pool", "yes"),), slurm_node_label="slurm"
    )
    pod.on("n1", 10, "0-1")
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    change(story)
    story.again(pod)

    def tell(number, *pods):
        report = NodeReport("n1", registered=True, is_whole=True, pods=pods)
        moment = story.machine.state.moment
        story.handle(ev.AgentReported("n1", "r", number, 0.0, moment, report))

    tell(1, NodePod("uid-a", "default/a", 10, (0, 1), 3))
    story.pass_time(60)
    assert story.phase(pod) == "bound"
    story.see(pod.over())
    story.pass_time(2)
    assert none(story.actions, act.End)
    tell(2)
    story.pass_time(31)
    assert {a.job_id for a in story.of(act.End)} == {10}


@pytest.mark.parametrize("change", CHANGES)
def test_members_of_a_gangs_claim_are_found_in_their_shares_and_it_is_renewed(change):
    group = Group("own", "default", "g", size=2)
    uid = group_uid(group.key)
    members = [
        make_pod(f"p{i}").gpus(4).but(group=group).on(node, 10, "0-3").wrote(SHARE=f"10/{node}/0-3")
        for i, node in enumerate(("n1", "n3"))
    ]
    claim_id = ClaimId(CLUSTER, uid, "group")
    job = make_job(10).but(
        name=claim_id.job_name,
        comment=write_comment(claim_id, group_ref("default", "g")),
        user_id=OWNER,
        nodes=("n1", "n3"),
        gpus={"n1": use("0-3"), "n3": use("0-3")},
        end=T0 + 600,
    )
    story = Story("n1", "n2", "n3", settings=pool().settings).slurm(job)
    for node in story.kube_nodes.values():
        node.but(labels={"pool": "yes"})
    change(story)
    story.again(*members)
    assert [story.phase(p) for p in members] == ["bound", "bound"]
    assert [story.entry(p).slurm_node for p in members] == ["n1", "n3"]
    story.pass_time(60)
    assert none(story.actions, act.End, act.Evict, act.Cover)
    assert [a.job_id for a in story.of(act.Extend)][:1] == [10]


def test_a_pod_whose_claim_was_over_already_is_told_and_evicted_there_too(pod):
    story = pool().start(pod).run(pod, 10, "n1", "0-1")
    without_its_label(story)
    story.jobs[10].state("CANCELLED")
    story.forget().again(pod)
    story.poll()
    story.handle(ev.JobLooked("uid-a", 10, plain(story.jobs[10])))
    story.pass_time(2)
    assert [a.uid for a in story.of(act.Evict)] == ["uid-a"]


def test_a_claim_on_another_node_than_the_pods_is_no_claim_of_its(pod):
    """The pod went to a node outside of the pool, past us; the claim's node is known."""
    story = pool()
    story.kube_nodes["other"] = make_kube_node("other").but(labels={})
    story.slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod.on("other"))
    story.pass_time(32)
    assert {a.job_id for a in story.of(act.End)} == {10}


def test_an_id_that_slurm_has_used_twice_moves_no_pod_to_another_node(pod):
    """It was bound on n1 with job 10, which Slurm forgot; the next claim on n2 was 10 again."""
    story = pool().slurm(make_claim_job(10, pod, "n2", "0-1")).start(pod.on("n1", 10, "0-1"))
    story.pass_time(2)
    story.handle(ev.Covered("uid-a", make_claim(11, pod, "n1", "0-1", granted=story.now)))
    story.slurm(make_claim_job(11, pod, "n1", "0-1")).pass_time(32)
    assert {a.job_id for a in story.of(act.End)} == {10}
    assert story.entry(pod).slurm_node == "n1"
    assert keys.CLAIM in plain(pod).annotations


# A name that changes while the leader stays.


def test_a_node_that_becomes_another_slurm_node_takes_no_pods_until_its_own_have_gone(pod):
    story = pool()
    story.kube_nodes["n1"].but(labels={"pool": "yes", "slurm": "n1"})
    story.kube_nodes.pop("n2")
    story.start(pod).run(pod, 10, "n1", "0-1")
    story.kube_nodes["n1"].but(labels={"pool": "yes", "slurm": "n2"})
    story.handle(ev.NodeChanged(plain(story.kube_nodes["n1"])))
    story.pass_time(3)
    assert story.free("n1") == 0
    blocked = story.machine.view().nodes["n1"].blocked
    assert blocked == "renamed while its pods have claims on Slurm node n1"
    assert story.phase(pod) == "bound"
    story.see(pod.over())
    story.slurm(without=(10,))
    story.pass_time(3)
    assert story.free("n1") == 8
    assert story.machine.view().nodes["n1"].slurm_node == "n2"


def test_nor_does_another_node_that_takes_the_name_of_the_first(pod):
    story = pool()
    story.start(pod).run(pod, 10, "n1", "0-1")
    for node, name in (("n1", "n2"), ("n2", "n1")):
        story.kube_nodes[node].but(labels={"pool": "yes", "slurm": name})
    for node in story.kube_nodes.values():
        story.handle(ev.NodeChanged(plain(node)))
    story.pass_time(3)
    assert (story.free("n1"), story.free("n2")) == (0, 0)
    blocked = story.machine.view().nodes["n2"].blocked
    assert blocked == "renamed while there are claims of pods of Kubernetes node n1"


@pytest.mark.parametrize("grace_s", [30, 600])
@pytest.mark.parametrize("end", ["deleted by force", "Failed"])
def test_the_deletion_of_a_node_object_ends_no_claim_at_once(pod, grace_s, end):
    """PodGC sets its pods to Failed and takes them away, while their processes may run on."""
    story = Story("n1").start(pod).run(pod, 10, "n1", "0-1").forget()
    story.handle(ev.NodeGone(plain(story.kube_nodes.pop("n1"))))
    pod.but(grace_s=grace_s)
    if end == "Failed":
        story.see(pod.over("Failed"))
    story.gone(pod)
    story.pass_time(grace_s - 1)
    assert story.phase(pod) == "lingering"
    assert none(story.actions, act.End)
    story.pass_time(3)
    assert {a.job_id for a in story.of(act.End)} == {10}
