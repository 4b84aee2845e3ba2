"""A pod asks for its claim."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from slurmbridge.pool.policy import Granularity
from slurmbridge.pool.record import Reservation
from tests.support.builders import (
    T0,
    Story,
    kinds,
    make_claim,
    make_claim_job,
    make_job,
    make_pod,
    make_policy,
    make_settings,
    none,
    only,
    plain,
)


@pytest.fixture
def pod():
    return make_pod("a").gpus(2)


@pytest.fixture
def story(pod):
    return Story("n1", "n2").start(pod).forget()


def test_the_good_way_of_a_pod(story, pod):
    request = only(story.ask(pod, "n1"), act.Allocate).request
    assert (request.slurm_node, request.ask.gpu.count) == ("n1", 2)
    reply = only(story.grant(pod, 10, "n1", "0-1"), act.Reply)
    assert (reply.job_id, reply.gpus, reply.reason) == (10, "0-1", "")
    assert story.phase(pod) == "held"
    assert story.machine.view().held["uid-a"].kube_node == "n1"
    assert story.bind(pod, 10, "n1", "0-1") == []
    assert story.phase(pod) == "bound"
    assert story.machine.view().held == {}
    assert none(story.pass_time(5), act.End, act.Evict, act.LookJob)
    end = only(story.see(pod.over()), act.End)
    assert (end.job_id, end.claim_id.uid) == (10, "uid-a")
    assert story.free("n1") == 6
    story.slurm(without=(10,)).handle(ev.Ended("uid-a", 10))
    story.poll(at=30)
    assert story.phase(pod) == ""
    assert story.free("n1") == 8
    assert story.of(act.End) == [end]


def test_asking_again_joins_the_one_claim_and_everybody_is_answered_once(story, pod):
    story.ask(pod, "n1")
    assert story.ask(pod, "n1") == []
    replies = story.grant(pod, 10, "n1", "0-1")
    assert kinds(replies) == ["Reply", "Reply"]
    again = only(story.ask(pod, "n1"), act.Reply)
    assert [r.job_id for r in (*replies, again)] == [10, 10, 10]
    assert [r.op for r in (*replies, again)] == [1, 2, 3]


def test_a_bound_pod_that_asks_again_on_its_node_hears_its_claim(story, pod):
    story.run(pod, 10, "n1", "0-1")
    assert only(story.ask(pod, "n1"), act.Reply).job_id == 10


def test_another_node_is_refused_while_there_is_a_claim(story, pod):
    story.ask(pod, "n1")
    assert only(story.ask(pod, "n2"), act.Reply).reason == "claimed_elsewhere"
    story.grant(pod, 10, "n1", "0-1")
    assert only(story.ask(pod, "n2"), act.Reply).reason == "claimed_elsewhere"
    story.bind(pod, 10, "n1", "0-1")
    assert only(story.ask(pod, "n2"), act.Reply).reason == "claimed_elsewhere"


REFUSED = {
    "the node drains": (lambda s: s.nodes["n1"].state("IDLE+DRAIN"), "slurm_state"),
    "the node has a flag that nobody knows": (lambda s: s.nodes["n1"].state("IDLE+ODD"), "slurm_state"),
    "all GPUs are taken": (
        lambda s: s.slurm(make_job(1).on("n1", "0-7")),
        "gpu_busy",
    ),
    "the only free GPU is in a completing job": (
        lambda s: s.slurm(make_job(1).on("n1", "0-5"), make_job(2).state("FAILED+COMPLETING").on("n1", "6-7")),
        "gpu_busy",
    ),
    "Slurm does not tell what is used": (lambda s: s.nodes["n1"].used_unknown(), "gpu_busy"),
    "A12: Slurm knows of no GPU": (lambda s: s.nodes["n1"].but(gpus=()), "gpu_count"),
    "no CPU is free": (lambda s: s.nodes["n1"].but(cpus_used=63), "cpu_busy"),
    "no memory is free": (lambda s: s.nodes["n1"].but(memory_used_mib=499_500), "memory_busy"),
    "a pending job is planned there": (
        lambda s: s.slurm(make_job(1).planned(T0 + 600, "n1")),
        "planned",
    ),
    "a reservation begins before it ends": (
        lambda s: s.reservations.append(Reservation("r", T0 + 600, None, ("n1",))),
        "reserved",
    ),
    "the node left Slurm": (lambda s: s.nodes.pop("n1"), "unknown_node"),
    "E05: Kubernetes offers no GPU of the node": (
        lambda s: s.handle(ev.NodeChanged(s.kube_nodes["n1"].gpus(0).obj)),
        "gpu_busy",
    ),
    "E04: some of its GPUs have died, and the rest is used": (
        lambda s: [
            s.handle(ev.NodeChanged(s.kube_nodes["n1"].gpus(6).obj)),
            s.slurm(make_job(1).on("n1", "0-4")),
        ],
        "gpu_busy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when(name, story, pod):
    change, reason = REFUSED[name]
    change(story)
    story.poll(at=2)
    reply = only(story.ask(pod, "n1"), act.Reply)
    assert (reply.reason, reply.unavailable) == (reason, False)
    assert story.phase(pod) == ""


def test_a_native_job_on_the_node_refuses_where_nodes_are_not_shared(pod):
    story = Story("n1", settings=make_settings(make_policy(granularity=Granularity.NODE)))
    story.slurm(make_job(1).on("n1", "0")).start(pod)
    assert only(story.ask(pod, "n1"), act.Reply).reason == "native_on_node"


def test_a_node_outside_the_pool_is_refused(story, pod):
    assert only(story.ask(pod, "elsewhere"), act.Reply).reason == "unknown_node"


def test_a_pod_that_policy_forbids_is_refused(story):
    pod = make_pod("b").wrote(ACCOUNT="admin")
    story.see(pod)
    assert only(story.ask(pod, "n1"), act.Reply).reason == "identity"


@pytest.mark.parametrize("change", ["over", "deleting"])
def test_a_pod_on_its_way_out_is_refused(story, pod, change):
    story.see(getattr(pod, change)())
    assert only(story.ask(pod, "n1"), act.Reply).reason == "request"


def test_before_both_sides_were_read_and_compared_nothing_is_decided(pod):
    story = Story("n1")
    assert only(story.ask(pod, "n1"), act.Reply).unavailable
    story.poll()
    assert only(story.ask(pod, "n1"), act.Reply).unavailable
    story.start(pod)
    assert kinds(story.ask(pod, "n1")) == ["Allocate"]


def test_a_claim_from_before_the_start_is_found_before_anything_is_granted(pod):
    story = Story("n1", "n2")
    story.slurm(make_claim_job(10, pod, "n2", "0-1")).poll()
    story.handle(ev.PodsListed((pod.obj,)))
    assert only(story.ask(pod, "n1"), act.Reply).unavailable
    story.handle(ev.NodesListed(tuple(n.obj for n in story.kube_nodes.values())))
    assert only(story.ask(pod, "n1"), act.Reply).reason == "claimed_elsewhere"
    assert only(story.ask(pod, "n2"), act.Reply).job_id == 10


def test_no_new_claim_on_a_stale_reading(story, pod):
    reply = only(story.ask(pod, "n1", at=60), act.Reply)
    assert reply.unavailable
    story.poll(at=61)
    assert kinds(story.ask(pod, "n1")) == ["Allocate"]


def test_slurms_refusal_is_handed_on_and_leaves_nothing(story, pod):
    story.ask(pod, "n1")
    reply = only(story.handle(ev.AllocateRefused("uid-a", "priority", "no")), act.Reply)
    assert (reply.reason, reply.text) == ("priority", "no")
    assert story.phase(pod) == ""
    assert story.free("n1") == 8


def test_gpus_are_charged_from_the_moment_of_asking(story, pod):
    story.ask(pod, "n1")
    assert story.free("n1") == 6
    other = make_pod("b").gpus(7)
    story.see(other)
    assert only(story.ask(other, "n1"), act.Reply).reason == "gpu_busy"


def test_a_pod_that_the_watch_does_not_know_yet_is_looked_at(story):
    pod = make_pod("new")
    assert kinds(story.ask(pod, "n1")) == ["LookPod"]
    assert story.ask(pod, "n1") == []
    found = story.handle(ev.PodLooked("uid-new", pod.obj))
    assert kinds(found) == ["Allocate"]
    assert [r.op for r in story.grant(pod, 10, "n1", "0")] == [1, 2]


def test_a_pod_that_is_not_there_gets_no_claim(story):
    pod = make_pod("new")
    story.ask(pod, "n1")
    assert only(story.handle(ev.PodLooked("uid-new", None)), act.Reply).reason == "request"


def test_another_pod_of_the_same_name_is_not_the_one(story):
    pod = make_pod("new")
    story.ask(pod, "n1")
    other = make_pod("new").but(uid="uid-other")
    assert only(story.handle(ev.PodLooked("uid-new", other.obj)), act.Reply).reason == "request"


def test_a_look_that_failed_sends_the_asker_away_to_come_again(story):
    pod = make_pod("new")
    story.ask(pod, "n1")
    reply = only(story.handle(ev.ActionFailed("LookPod", "uid-new", 0, "timeout")), act.Reply)
    assert reply.unavailable
    assert kinds(story.ask(pod, "n1")) == ["LookPod"]


def test_a_list_that_is_older_than_the_look_that_found_a_pod_does_not_make_it_gone(story):
    pod = make_pod("new")
    story.ask(pod, "n1")
    story.handle(ev.PodLooked("uid-new", plain(pod)))
    story.handle(ev.AllocateRefused("uid-new", "gpu_busy", "another was faster"))
    story.handle(ev.PodsListed(()))
    story.see(pod)
    assert only(story.ask(pod, "n1"), act.Allocate).uid == "uid-new"


def test_a_look_that_the_watch_has_overtaken_does_not_bring_a_deleted_pod_back(story):
    pod = make_pod("new")
    story.ask(pod, "n1")
    story.see(pod)
    story.gone(pod)
    assert only(story.handle(ev.PodLooked("uid-new", pod.obj)), act.Reply).reason == "request"
    assert story.machine.state.pods.keys() == {"uid-a"}


def test_a_look_that_the_watch_has_overtaken_does_not_unbind_a_pod(story, pod):
    story.run(pod, 10, "n1", "0-1")
    story.handle(ev.PodLooked("uid-a", make_pod("a").gpus(2).obj))
    assert story.machine.state.pods["uid-a"].node == "n1"


def test_a_pod_deleted_while_its_claim_was_asked_for_gives_it_back(story, pod):
    story.ask(pod, "n1")
    story.gone(pod)
    found = story.grant(pod, 10, "n1", "0-1")
    assert only(found, act.Reply).reason == "ending"
    assert only(found, act.End).job_id == 10


def test_a_grant_that_nobody_waits_for_is_given_back(story):
    claim = make_claim(10, make_pod("x"), "n1", "0")
    assert only(story.handle(ev.Allocated("uid-x", claim)), act.End).job_id == 10


def test_an_answer_told_twice_changes_nothing(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    assert story.handle(ev.Allocated("uid-a", make_claim(10, pod, "n1", "0-1"))) == []
    assert story.phase(pod) == "held"


def test_a_second_claim_by_a_late_answer_is_given_back(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    late = story.handle(ev.Allocated("uid-a", make_claim(11, pod, "n1", "2-3")))
    assert only(late, act.End).job_id == 11
    assert story.entry(pod).job_id == 10


def test_a_claim_on_a_node_that_the_pod_asks_for_no_more_is_given_back(story, pod):
    story.ask(pod, "n1")
    story.handle(ev.AllocateUnknown("uid-a", 0, "timeout"))
    story.poll(at=12)
    assert kinds(story.ask(pod, "n2")) == ["Allocate"]
    claim = make_claim(10, pod, "n1", "0-1", granted=story.now)
    assert only(story.handle(ev.Allocated("uid-a", claim)), act.End).job_id == 10
    assert story.phase(pod) == "asking"
    assert only(story.grant(pod, 11, "n2", "0-1"), act.Reply).job_id == 11


def bound_late(story, pod):
    """Its claim ends while the Binding is under way, it asks again, and then it turns up bound."""
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    job = make_claim_job(10, pod, "n1", "0-1").state("CANCELLED")
    story.slurm(job).poll(at=3)
    story.handle(ev.JobLooked("uid-a", 10, job.obj))
    assert kinds(story.ask(pod, "n1")) == ["Allocate"]
    return story.see(pod.on("n1", 10, "0-1"))


def test_a_pod_bound_late_with_a_claim_that_has_ended_is_charged_with_its_gpus_and_evicted(
    story, pod
):
    assert only(bound_late(story, pod), act.Reply).unavailable
    assert story.entry(pod).gpus.indices == (0, 1)
    late = story.handle(ev.Allocated("uid-a", make_claim(11, pod, "n1", "2-3", granted=T0 + 3)))
    assert only(late, act.End).job_id == 11
    assert only(story.poll(at=5), act.LookJob).job_id == 10
    story.handle(ev.JobLooked("uid-a", 10, story.jobs[10].obj))
    assert story.free("n1") == 0
    assert only(story.pass_time(2), act.Evict).uid == "uid-a"


def test_a_pod_bound_before_we_heard_of_its_grant_is_covered_by_it(story, pod):
    story.ask(pod, "n1")
    story.see(pod.on("n1", 10, "0-1"))
    assert story.free("n1") == 0
    assert none(story.grant(pod, 10, "n1", "0-1"), act.End)
    assert (story.phase(pod), story.free("n1")) == ("bound", 6)


# Doubt: asked, and no clear answer.


def test_a_late_answer_does_not_end_the_claim_of_a_pod_that_has_to_go(story, pod):
    """A reading was faster; nobody knows which GPUs the pod uses until it is gone."""
    story.see(pod)
    story.ask(pod, "n1")
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    story.see(pod.on("n1", 9, "2-3"))
    story.now += 1
    story.poll()
    assert (story.phase(pod), story.entry(pod).job_id) == ("lost", 10)
    claim = make_claim(10, pod, "n1", "0-1", granted=story.now - 0.9)
    assert none(story.handle(ev.Allocated("uid-a", claim)), act.End)


def test_a_doubtful_claim_that_was_made_is_found_and_its_pod_woken(story, pod):
    story.ask(pod, "n1")
    found = story.handle(ev.AllocateUnknown("uid-a", 0, "timeout"))
    assert only(found, act.Reply).unavailable
    assert kinds(found) == ["Reply", "PollNow"]
    assert story.free("n1") == 6
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    found = story.poll(at=3)
    assert "slurmbridge.dev/wake" in only(found, act.AnnotatePod).annotations
    assert only(story.ask(pod, "n1"), act.Reply).gpus == "0-1"


def test_a_doubtful_claim_that_was_not_made_is_given_up_after_a_while(story, pod):
    story.ask(pod, "n1")
    story.handle(ev.AllocateUnknown("uid-a", 0, "timeout"))
    story.poll(at=3)
    assert story.phase(pod) == "doubt"
    assert only(story.ask(pod, "n1"), act.Reply).unavailable
    story.poll(at=12)
    assert story.phase(pod) == ""
    assert kinds(story.ask(pod, "n1")) == ["Allocate"]


def test_a_doubtful_claim_whose_id_is_known_is_found_by_it(story, pod):
    story.ask(pod, "n1")
    story.handle(ev.AllocateUnknown("uid-a", 10, "granted, then silence"))
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    story.poll(at=3)
    assert story.phase(pod) == "held"


def test_a_doubtful_claim_that_has_ended_meanwhile_is_given_up(story, pod):
    story.ask(pod, "n1")
    story.handle(ev.AllocateUnknown("uid-a", 10, "granted, then silence"))
    story.slurm(make_claim_job(10, pod, "n1", "0-1").state("CANCELLED"))
    story.poll(at=20)
    assert story.phase(pod) == ""


def test_a_doubtful_claim_whose_pod_is_deleted_does_not_stay(story, pod):
    story.ask(pod, "n1")
    story.handle(ev.AllocateUnknown("uid-a", 0, "timeout"))
    story.gone(pod)
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    assert only(story.poll(at=3), act.End).job_id == 10


def test_a_second_claim_made_by_a_doubtful_ask_is_ended_once_the_first_is_seen(story, pod):
    story.ask(pod, "n1")
    story.handle(ev.AllocateUnknown("uid-a", 0, "timeout"))
    story.poll(at=12)
    story.run(pod, 11, "n1", "2-3")
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    assert only(story.pass_time(3), act.End).job_id == 10
    assert story.entry(pod).job_id == 11


def test_an_extra_claim_stays_while_the_pods_own_is_not_seen(story, pod):
    story.run(pod, 11, "n1", "2-3")
    story.slurm(make_claim_job(10, pod, "n1", "0-1"), without=(11,))
    assert none(story.pass_time(1), act.End)


def test_an_answer_that_never_comes_counts_as_doubt(story, pod):
    story.ask(pod, "n1")
    assert only(story.tick(at=62), act.Reply).unavailable
    assert story.phase(pod) == "doubt"


def test_an_allocate_that_broke_counts_as_doubt(story, pod):
    story.ask(pod, "n1")
    found = story.handle(ev.ActionFailed("Allocate", "uid-a", 0, "bug"))
    assert only(found, act.Reply).unavailable
    assert story.phase(pod) == "doubt"


def test_a_grant_that_a_newer_reading_contradicts_is_not_handed_out(story, pod):
    story.ask(pod, "n1")
    claim = make_claim(10, pod, "n1", "0-1")
    story.boot = T0 + 2
    story.poll(at=4)
    found = story.handle(ev.Allocated("uid-a", claim))
    assert only(found, act.Reply).unavailable
    assert story.phase(pod) == "doubt"


# GPUs that Slurm gives away though a pod uses them.


def test_gpus_that_a_pod_without_a_claim_may_use_are_not_handed_out(story, pod):
    other = make_pod("b").gpus(2)
    story.run(other, 10, "n1", "0-1")
    story.ask(pod, "n1")
    # slurmctld restarts, forgets job 10 and gives its GPUs and its id to the next claim.
    story.slurm(without=(10,)).boot = T0 + 5
    found = story.grant(pod, 10, "n1", "0-1")
    assert only(found, act.Reply).reason == "gpu_busy"
    assert only(found, act.End).claim_id.uid == "uid-a"
    assert only(found, act.Cover).indices == (0, 1)
    assert story.phase(other) == "covering"


def test_no_claim_is_made_beside_a_pod_without_one(story, pod):
    stray = make_pod("s").on("n1")
    story.see(stray)
    assert story.free("n1") == 0
    assert only(story.ask(pod, "n1"), act.Reply).reason == "gpu_busy"
    assert kinds(story.ask(pod, "n2")) == ["Allocate"]


def test_a_held_claim_is_not_promised_again_when_a_pod_turns_up_on_its_gpus(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    # Promised job 9 by another leader, forgotten by slurmctld, and bound only now.
    story.see(make_pod("late").on("n1", 9, "0"))
    assert only(story.ask(pod, "n1"), act.Reply).unavailable


def test_a_pod_that_an_extender_asks_for_is_not_planned_a_second_time():
    pod = make_pod("p").but(gates=(keys.GATE,))
    story = Story("n1").start(pod)
    story.handle(ev.AllocateRefused("uid-p", "busy", "busy"))
    story.machine.state.waiting.lifted.add("uid-p")  # by an earlier claim, which is lost
    story.see(pod.but(gates=()))
    assert kinds(story.ask(pod, "n1")) == ["Allocate"]
    story.grant(pod, 10, "n1", "0")
    assert none(story.pass_time(5), act.Allocate)
    assert story.entry(pod).job_id == 10


# Held claims.


def test_a_claim_that_is_not_bound_is_ended_only_after_a_look(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.poll(at=50)
    assert none(story.tick(at=59), act.LookPod)
    story.poll(at=62)
    assert kinds(story.tick(at=63)) == ["LookPod", "AnnotateNode", "AnnotateNode"]
    assert only(story.handle(ev.PodLooked("uid-a", pod.obj)), act.End).job_id == 10


def test_a_claim_whose_pod_turns_out_to_be_bound_stays(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.poll(at=62)
    story.tick(at=63)
    pod.on("n1", 10, "0-1")
    assert story.handle(ev.PodLooked("uid-a", pod.obj)) == []
    assert story.phase(pod) == "bound"


def test_asking_again_during_the_look_keeps_the_claim(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.poll(at=62)
    story.tick(at=63)
    story.ask(pod, "n1")
    assert none(story.handle(ev.PodLooked("uid-a", pod.obj)), act.End)
    assert story.phase(pod) == "held"


def test_a_refused_binding_is_looked_into_before_the_claim_ends(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    assert kinds(story.handle(ev.UnboundReleased("uid-a", 10))) == ["LookPod"]
    assert only(story.handle(ev.PodLooked("uid-a", pod.obj)), act.End).job_id == 10


def test_a_look_that_finds_no_pod_leaves_it_to_the_watch_to_tell_how_it_ended(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.handle(ev.UnboundReleased("uid-a", 10))
    assert story.handle(ev.PodLooked("uid-a", None)) == []
    assert story.phase(pod) == "held"
    story.gone(make_pod("a").gpus(2).on("n1", 10, "0-1"))
    assert story.phase(pod) == "lingering"


def test_a_refused_binding_means_nothing_while_another_extender_may_bind(story, pod):
    story.ask(pod, "n1")
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    assert story.handle(ev.UnboundReleased("uid-a", 10)) == []
    assert kinds(story.handle(ev.UnboundReleased("uid-a", 10))) == ["LookPod"]


def test_a_binding_refused_because_another_was_quicker_ends_nothing(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.handle(ev.UnboundReleased("uid-a", 10))
    pod.on("n1", 10, "0-1")
    assert story.handle(ev.PodLooked("uid-a", pod.obj)) == []
    assert story.phase(pod) == "bound"


def test_a_release_of_another_claim_means_nothing(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    assert story.handle(ev.UnboundReleased("uid-a", 9)) == []


def test_a_held_claim_is_ended_when_its_pod_is_deleted(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    assert only(story.see(pod.deleting()), act.End).job_id == 10


def test_a_pod_bound_elsewhere_loses_the_claim_and_is_covered_there(story, pod):
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    assert only(story.see(pod.on("n2")), act.End).job_id == 10
    assert story.free("n2") == 0
    story.slurm(without=(10,))
    assert only(story.poll(at=4), act.Cover).request.slurm_node == "n2"


# Sites that queue.


def test_a_site_with_defer_queues_and_the_pod_is_woken_when_it_runs(pod):
    story = Story("n1")
    story.scheduler = "defer,bf_interval=5"
    story.start(pod).forget()
    assert kinds(story.ask(pod, "n1")) == ["Queue"]
    found = story.handle(ev.Queued("uid-a", 10))
    assert only(found, act.Reply).unavailable
    assert story.machine.view().held["uid-a"].kube_node == "n1"
    story.slurm(make_claim_job(10, pod).state("PENDING"))
    assert none(story.pass_time(3), act.LookJob, act.End)
    assert only(story.ask(pod, "n1"), act.Reply).unavailable
    story.slurm(make_claim_job(10, pod, "n1", "4-5"))
    assert "slurmbridge.dev/wake" in only(story.poll(at=9), act.AnnotatePod).annotations
    assert only(story.ask(pod, "n1"), act.Reply).gpus == "4-5"


def test_a_look_that_saw_a_queued_claim_run_before_a_reading_saw_its_end_holds_nothing(pod):
    story = Story("n1")
    story.scheduler = "defer"
    story.start(pod).ask(pod, "n1")
    story.slurm(make_claim_job(10, pod).state("PENDING")).handle(ev.Queued("uid-a", 10))
    story.slurm(make_claim_job(10, pod, "n1", "0-1").state("CANCELLED")).pass_time(1)
    running = plain(make_claim_job(10, pod, "n1", "0-1"))
    story.handle(ev.JobLooked("uid-a", 10, running))
    assert story.phase(pod) == "queued"
    ended = plain(story.jobs[10])
    story.pass_time(3)
    assert only(story.of(act.LookJob)[1:], act.LookJob).job_id == 10
    story.handle(ev.JobLooked("uid-a", 10, ended))
    assert story.phase(pod) == ""


def test_a_queued_claim_goes_with_its_pod(pod):
    story = Story("n1").start(pod.wrote(MODE="queued")).forget()
    assert kinds(story.ask(pod, "n1")) == ["Queue"]
    story.handle(ev.Queued("uid-a", 10))
    assert only(story.gone(pod), act.End).job_id == 10


def test_a_queued_claim_that_waits_long_is_kept_while_its_pod_waits(pod):
    story = Story("n1").start(pod.wrote(MODE="queued")).forget()
    story.ask(pod, "n1")
    story.handle(ev.Queued("uid-a", 10))
    story.slurm(make_claim_job(10, pod).state("PENDING"))
    found = story.pass_time(70)
    assert only(found, act.LookPod)
    assert none(story.handle(ev.PodLooked("uid-a", pod.obj)), act.End)
    assert story.phase(pod) == "queued"
