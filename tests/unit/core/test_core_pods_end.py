"""The end of a pod: its claim is given back when its processes are gone, and not before."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from tests.support.builders import (
    T0,
    Story,
    make_claim_job,
    make_pod,
    make_settings,
    none,
    only,
    plain,
)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_e12_a_pod_that_is_over_gives_its_claim_back_at_once(story, pod, phase):
    assert only(story.see(pod.over(phase)), act.End).job_id == 10


def test_e12_a_pod_of_unknown_phase_keeps_it(story, pod):
    assert none(story.see(pod.but(phase="Unknown")) + story.pass_time(100), act.End)


def test_a03_a_terminating_pod_keeps_its_claim_through_its_grace(story, pod):
    story.see(pod.but(grace_s=600).deleting())
    assert none(story.pass_time(590), act.End)
    assert story.free("n1") == 6
    assert only(story.see(pod.over("Failed")), act.End).job_id == 10


def test_the_end_of_the_object_after_the_end_of_the_pod_changes_nothing(story, pod):
    story.see(pod.over())
    assert story.gone(pod) == []
    assert len(story.of(act.End)) == 1


def test_a_claim_stays_charged_until_a_reading_after_its_end_no_longer_shows_it(story, pod):
    story.see(pod.over(), at=10)
    story.slurm(without=(10,)).poll(at=10.5, began=9.9)
    assert story.free("n1") == 6
    story.poll(at=11)
    assert story.free("n1") == 8


def test_a_claim_whose_epilog_runs_stays_charged_and_is_not_cancelled_again(story, pod):
    story.see(pod.over(), at=10)
    story.handle(ev.Ended("uid-a", 10))
    story.slurm(make_claim_job(10, pod).state("CANCELLED+COMPLETING").on_unknown("n1"))
    story.nodes["n1"].state("MIXED+COMPLETING")
    assert none(story.pass_time(60), act.End)
    assert story.free("n1") == 0


def test_a_claim_that_did_not_end_is_ended_again(story, pod):
    story.see(pod.over(), at=10)
    story.handle(ev.ActionFailed("End", "uid-a", 10, "timeout"))
    assert [a.job_id for a in story.pass_time(12) if isinstance(a, act.End)] == [10, 10]


def test_a_pod_may_ask_again_while_its_last_claim_is_ending(pod):
    story = Story("n1", "n2").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.handle(ev.UnboundReleased("uid-a", 10))
    story.handle(ev.PodLooked("uid-a", pod.obj))
    assert only(story.ask(pod, "n2"), act.Allocate).request.slurm_node == "n2"
    story.grant(pod, 11, "n2", "0-1")
    assert story.free("n1") == 6
    assert none(story.pass_time(3), act.LookJob)


# Deleted by force.


def test_a_force_deleted_pod_keeps_its_claim_while_its_processes_may_run(story, pod):
    story.gone(pod)
    assert story.phase(pod) == "lingering"
    assert none(story.pass_time(28), act.End)
    assert story.free("n1") == 6
    assert {a.job_id for a in story.pass_time(4) if isinstance(a, act.End)} == {10}


def test_a_reboot_that_is_told_after_its_deletion_may_have_been_before_it(pod):
    """It may have been started again since, and its kubelet be stopping it."""
    story = Story("n1")
    story.kube_nodes["n1"].but(boot_id="boot-1")
    story.start(pod).run(pod, 10, "n1", "0-1").forget()
    story.gone(pod)
    story.handle(ev.NodeChanged(plain(story.kube_nodes["n1"].but(boot_id="boot-2"))))
    assert none(story.pass_time(29), act.End)
    assert only(story.pass_time(3), act.End).job_id == 10


def test_a_long_grace_is_waited_for(story, pod):
    story.see(pod.but(grace_s=120))
    story.gone(pod)
    assert none(story.pass_time(110), act.End)
    assert {a.job_id for a in story.pass_time(15) if isinstance(a, act.End)} == {10}


def test_a_pod_re_created_under_the_same_name_is_another_pod(story, pod):
    story.gone(pod)
    again = make_pod("a").gpus(2).but(uid="uid-a2")
    story.see(again)
    assert only(story.ask(again, "n1"), act.Allocate).uid == "uid-a2"
    story.grant(again, 11, "n1", "2-3")
    assert story.phase(pod) == "lingering"
    assert story.free("n1") == 4


def test_a04_on_a_silent_node_the_claim_is_kept_and_people_are_told_once(story, pod):
    story.handle(ev.NodeChanged(story.kube_nodes["n1"].not_ready().obj))
    story.gone(pod)
    found = story.pass_time(600)
    assert none(found, act.End)
    told = [a.reason for a in found if isinstance(a, act.Tell)]
    assert told.count("ClaimKept") == 1


def test_when_the_node_is_back_its_kubelet_gets_time_to_stop_the_pod(story, pod):
    story.handle(ev.NodeChanged(story.kube_nodes["n1"].not_ready().obj))
    story.gone(pod)
    story.pass_time(100)
    story.handle(ev.NodeChanged(story.kube_nodes["n1"].but(ready=True).obj))
    assert none(story.pass_time(29), act.End)
    assert story.pass_time(3)
    assert story.of(act.End)[0].job_id == 10


def test_a_list_of_nodes_tells_as_well_that_a_node_is_back(story, pod):
    story.handle(ev.NodeChanged(story.kube_nodes["n1"].not_ready().obj))
    story.gone(pod)
    story.now += 31  # no tick has seen the silence
    story.kube_nodes["n1"].but(ready=True)
    story.handle(ev.NodesListed(tuple(n.obj for n in story.kube_nodes.values())))
    assert none(story.pass_time(29), act.End)


def test_a04_when_the_node_is_deleted_the_claim_is_given_back(story, pod):
    story.handle(ev.NodeChanged(story.kube_nodes["n1"].not_ready().obj))
    story.gone(pod)
    story.pass_time(100)
    story.handle(ev.NodeGone(story.kube_nodes["n1"].obj))
    story.pass_time(32)
    assert {a.job_id for a in story.of(act.End)} == {10}


def test_a_lost_claim_of_a_force_deleted_pod_still_charges_its_gpus(story, pod):
    story.gone(pod)
    job = make_claim_job(10, pod, "n1", "0-1").state("CANCELLED")
    story.slurm(job).poll(at=10)
    story.handle(ev.JobLooked("uid-a", 10, job.obj))
    assert story.free("n1") == 0
    assert none(story.pass_time(15), act.LookJob, act.Evict)
    story.pass_time(20)
    assert (story.phase(pod), story.free("n1")) == ("", 8)


def test_a_force_deleted_pod_whose_claim_was_just_granted_keeps_it_for_a_while(pod):
    # The Binding was quicker than the grant's way to us, and the deletion too.
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    bound = make_pod("a").gpus(2).on("n1", 10, "0-1")
    story.see(bound)
    story.gone(bound)
    found = story.grant(pod, 10, "n1", "0-1")
    assert none(found, act.End)
    assert story.phase(pod) == "lingering"


# Missing from a list.


def miss(story, *pods):
    """A list without these pods, and nobody finds them by their names either."""
    story.handle(ev.PodsListed(()))
    story.now += 1
    for look in [a for a in story.tick() if isinstance(a, act.LookPod)]:
        story.handle(ev.PodLooked(look.uid, None))


def test_a_pod_that_neither_a_list_nor_a_look_shows_is_gone(story, pod):
    miss(story, pod)
    assert story.phase(pod) == "lingering"
    story.pass_time(32)
    assert {a.job_id for a in story.of(act.End)} == {10}


def test_an_unbound_pod_that_was_promised_a_claim_may_have_run_unseen(pod):
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    miss(story, pod)
    assert story.phase(pod) == "lingering"


def test_a_list_that_lacks_a_running_pod_ends_nothing_and_the_next_one_shows_it_again(story, pod):
    story.handle(ev.PodsListed(()))
    assert story.phase(pod) == "bound"
    story.now += 1
    look = only(story.tick(), act.LookPod)
    story.handle(ev.PodsListed((plain(pod),)))
    story.handle(ev.PodLooked(look.uid, None))
    assert story.phase(pod) == "bound"
    assert none(story.pass_time(60), act.End, act.LookPod)


def test_a_pod_that_a_list_lacks_and_a_look_finds_stays(story, pod):
    story.handle(ev.PodsListed(()))
    story.now += 1
    look = only(story.tick(), act.LookPod)
    story.handle(ev.PodLooked(look.uid, plain(pod)))
    assert story.phase(pod) == "bound"
    assert none(story.pass_time(60), act.End, act.LookPod)


def test_a_look_that_nobody_answers_is_asked_again_and_ends_nothing(story, pod):
    story.handle(ev.PodsListed(()))
    assert none(story.pass_time(60), act.End)
    assert {a.uid for a in story.of(act.LookPod)} == {"uid-a"}
    assert 4 <= len(story.of(act.LookPod)) <= 7


def test_a_pod_that_was_taken_for_gone_and_is_listed_again_lives_in_its_claim(story, pod):
    """An API server whose state was set back shows pods again that it has deleted."""
    miss(story, pod)
    assert story.phase(pod) == "lingering"
    story.now += 1
    story.handle(ev.PodsListed((plain(pod),)))
    assert story.phase(pod) == "bound"
    assert none(story.pass_time(60), act.End, act.Evict, act.Cover)


def test_one_whose_claim_was_given_back_meanwhile_is_covered_again(story, pod):
    miss(story, pod)
    story.pass_time(32)
    assert story.phase(pod) == ""
    story.slurm(without=(10,))
    story.handle(ev.PodsListed((plain(pod),)))
    story.pass_time(2)
    assert only(story.actions, act.Cover).indices == (0, 1)


def many(count=16):
    """As many pods, each with a GPU."""
    pods = [make_pod(f"p{i}").gpus(1) for i in range(count)]
    story = Story("n1", "n2").start(*pods)
    for i, pod in enumerate(pods):
        story.run(pod, 100 + i, f"n{1 + i // 8}", str(i % 8))
    return story.forget(), pods


def test_a_list_without_most_pods_and_nodes_opens_the_breaker_and_ends_nothing():
    story, pods = many()
    story.handle(ev.NodesListed(()))
    miss(story, *pods)
    assert story.machine.state.breaker_since is not None
    for _ in range(60):
        for look in [a for a in story.pass_time(1) if isinstance(a, act.LookPod)]:
            story.handle(ev.PodLooked(look.uid, None))
    assert none(story.actions, act.End, act.Evict)
    assert {story.phase(p) for p in pods} == {"bound"}
    story.handle(ev.PodsListed(tuple(plain(p) for p in pods)))
    story.tick()
    assert story.machine.state.breaker_since is None


@pytest.mark.parametrize("confirm", [True, False])
def test_then_a_person_says_whether_they_are_gone(confirm):
    story, pods = many()
    miss(story, *pods)
    story.handle(ev.BreakerAnswered(confirm=confirm))
    for _ in range(60):
        for look in [a for a in story.pass_time(1) if isinstance(a, act.LookPod)]:
            story.handle(ev.PodLooked(look.uid, None))
    assert len({a.job_id for a in story.of(act.End)}) == (16 if confirm else 0)


def test_a_list_of_nodes_that_lacks_one_with_pods_is_no_fence():
    pods = [make_pod(f"p{i}").gpus(1) for i in range(2)]
    story = Story("n1", settings=make_settings(agents_required=True)).start(*pods)
    for i, pod in enumerate(pods):
        story.slurm(make_claim_job(10 + i, pod, "n1", str(i)))
        story.see(pod.on("n1", 10 + i, str(i)))
    story.pass_time(2)
    story.handle(ev.NodesListed(()))
    story.gone(pods[0])
    assert none(story.pass_time(100), act.End)
    story.see(pods[1].deleting(story.now))
    assert {a.job_id for a in story.pass_time(2) if isinstance(a, act.End)} == {10}


def test_a_watch_that_saw_it_deleted_unbound_is_proof(pod):
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    assert only(story.gone(pod), act.End).job_id == 10


def test_pods_without_gpus_are_nobodys_business(story):
    web = make_pod("web").but(gpu=None).on("n1")
    story.see(web)
    story.gone(web)
    assert story.machine.state.pods.keys() == {"uid-a"}
    assert story.machine.state.gone == {}


def test_what_is_remembered_of_deleted_pods_is_forgotten_in_time(story, pod):
    story.gone(pod)
    story.pass_time(700, step=10)
    assert story.machine.state.gone == {}
    assert all(t > T0 for t in story.machine.state.told.values())
