"""Claims in Slurm that the book does not know, and pods on nodes that have none."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from slurmbridge.pool.claim import ClaimId, write_comment
from tests.support.builders import (
    OWNER,
    Story,
    make_claim,
    make_claim_job,
    make_job,
    make_pod,
    make_policy,
    make_settings,
    none,
    only,
)


@pytest.fixture
def pod():
    return make_pod("a").gpus(2)


# The bridge starts again.


def test_after_a_restart_bound_pods_have_their_claims_as_before(pod):
    story = Story("n1").start(pod).run(pod, 10, "n1", "0-1").forget()
    story.again(pod)
    assert story.phase(pod) == "bound"
    assert none(story.actions, act.AnnotatePod, act.End)
    assert only(story.see(pod.over()), act.End).job_id == 10


def test_after_a_restart_a_claim_that_waits_to_be_bound_is_held(pod):
    story = Story("n1").slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod)
    assert only(story.ask(pod, "n1"), act.Reply).gpus == "0-1"


def test_an_old_extenders_refused_binding_does_not_end_an_adopted_claim_at_once(pod):
    story = Story("n1").slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod)
    assert story.handle(ev.UnboundReleased("uid-a", 10)) == []


def test_a_cover_that_was_not_written_down_before_the_crash_is_written_now(pod):
    pod.on("n1", 10, "0-1")
    story = Story("n1").slurm(make_claim_job(12, pod, "n1", "0-1")).start(pod)
    assert only(story.actions, act.AnnotatePod).annotations[keys.CLAIM] == "12/uid-a"


def test_of_two_claims_the_one_that_the_pod_was_bound_with_is_kept(pod):
    pod.on("n1", 11, "2-3")
    jobs = (make_claim_job(10, pod, "n1", "0-1"), make_claim_job(11, pod, "n1", "2-3"))
    story = Story("n1").slurm(*jobs).start(pod)
    story.pass_time(2)
    assert story.entry(pod).job_id == 11
    assert only(story.actions, act.End).job_id == 10


def test_of_two_claims_of_an_unbound_pod_the_first_running_one_is_kept(pod):
    jobs = (
        make_claim_job(9, pod).state("PENDING"),
        make_claim_job(10, pod, "n1", "0-1"),
        make_claim_job(11, pod, "n1", "2-3"),
    )
    story = Story("n1").slurm(*jobs).start(pod)
    story.pass_time(2)
    assert story.entry(pod).job_id == 10
    assert {a.job_id for a in story.of(act.End)} == {9}
    story.pass_time(30)
    assert {a.job_id for a in story.of(act.End)} == {9, 11}


def test_a_binding_with_the_other_of_two_claims_decides_which_is_kept(pod):
    jobs = (make_claim_job(10, pod, "n1", "0-1"), make_claim_job(11, pod, "n1", "2-3"))
    story = Story("n1").slurm(*jobs).start(pod)
    assert story.entry(pod).job_id == 10
    story.see(pod.on("n1", 11, "2-3"))
    assert (story.entry(pod).job_id, story.phase(pod)) == (11, "bound")
    assert {a.job_id for a in story.pass_time(2) if isinstance(a, act.End)} == {10}


def test_a_pod_whose_claim_and_annotations_name_different_gpus_is_evicted_and_both_stay(pod):
    pod.on("n1", 9, "4-5")
    story = Story("n1").slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod)
    assert story.phase(pod) == "lost"
    assert story.entry(pod).gpus.indices == (0, 1, 4, 5)
    story.pass_time(5)
    assert only(story.actions, act.Evict).uid == "uid-a"
    assert none(story.actions, act.End)
    assert only(story.see(pod.over("Failed")), act.End).job_id == 10


def test_a_claim_that_ended_while_nobody_looked_evicts_its_pod(pod):
    pod.on("n1", 10, "0-1")
    job = make_claim_job(10, pod, "n1", "0-1").state("CANCELLED")
    story = Story("n1").slurm(job).start(pod)
    assert story.free("n1") == 6
    assert only(story.poll(), act.LookJob).job_id == 10
    story.handle(ev.JobLooked("uid-a", 10, job.obj))
    assert only(story.pass_time(2), act.Evict).uid == "uid-a"
    assert none(story.actions, act.Cover)


def test_a_claim_that_was_forgotten_while_nobody_looked_is_covered(pod):
    pod.on("n1", 10, "2-3")
    story = Story("n1").start(pod)
    assert story.free("n1") == 0
    assert none(story.actions, act.Cover)  # the first reading may be older than the Binding
    assert only(story.poll(), act.Cover).indices == (2, 3)


def test_a_claim_that_was_over_and_runs_again_in_an_older_state_of_slurmctld_is_renewed(pod):
    pod.on("n1", 10, "0-1")
    job = make_claim_job(10, pod, "n1", "0-1")
    story = Story("n1").slurm(job.state("CANCELLED")).start(pod)
    story.boot += 100
    story.slurm(make_claim_job(10, pod, "n1", "0-1").but(end=story.now + 600))
    story.pass_time(2)
    assert story.phase(pod) == "bound"
    assert only(story.of(act.Extend), act.Extend).job_id == 10


def test_a_suspended_claim_of_a_bound_pod_is_its_claim_still(pod):
    pod.on("n1", 10, "0-1")
    job = make_claim_job(10, pod, "n1", "0-1").state("SUSPENDED")
    story = Story("n1").slurm(job).start(pod)
    story.poll()
    story.handle(ev.JobLooked("uid-a", 10, job.obj))
    assert only(story.pass_time(2), act.Evict).uid == "uid-a"
    assert none(story.actions, act.End)


def test_a_claim_of_a_pod_that_is_over_is_ended(pod):
    pod.on("n1", 10, "0-1").over()
    story = Story("n1").slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod)
    assert only(story.actions, act.End).job_id == 10


def test_a_claim_on_another_node_than_the_pod_is_ended_and_the_pod_covered_where_it_is(pod):
    pod.on("n2")
    story = Story("n1", "n2").slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod)
    assert only(story.pass_time(2), act.Cover).request.slurm_node == "n2"
    assert none(story.actions, act.End), "it may have been bound there before"
    story.handle(ev.Covered("uid-a", make_claim(11, pod, "n2", "0-1", granted=story.now)))
    story.slurm(make_claim_job(11, pod, "n2", "0-1"))
    assert {a.job_id for a in story.pass_time(30) if isinstance(a, act.End)} == {10}


def test_a_placeholder_of_a_bound_pod_is_no_claim(pod):
    pod.on("n1", 9, "0-1")
    story = Story("n1").slurm(make_claim_job(10, pod).state("PENDING")).start(pod)
    assert only(story.actions, act.End).job_id == 10
    assert only(story.slurm(without=(10,)).poll(), act.Cover).indices == (0, 1)


def test_a_claim_whose_gpus_are_not_read_yet_is_left_for_the_next_reading(pod):
    story = Story("n1").slurm(make_claim_job(10, pod).on_unknown("n1")).start(pod)
    assert story.phase(pod) == "doubt"
    assert none(story.actions, act.End)
    story.slurm(make_claim_job(10, pod, "n1", "0-1")).poll()
    assert story.phase(pod) == "held"


def test_a_held_claim_on_gpus_that_another_pod_may_use_is_not_adopted(pod):
    other = make_pod("b").gpus(2).on("n1", 9, "0-1")
    story = Story("n1").slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod, other)
    assert story.phase(pod) == ""
    assert story.phase(other) == "covering"
    assert none(story.pass_time(55), act.End), "somebody may be binding with it"
    assert {a.claim_id.uid for a in story.pass_time(10) if isinstance(a, act.End)} == {"uid-a"}


# Claims without a pod.


def orphaned(pod, **more):
    story = Story("n1").slurm(make_claim_job(10, pod, "n1", "0-1").but(**more)).start()
    found = story.pass_time(6)
    look = only(found, act.LookPod)
    assert (look.uid, look.namespace, look.name) == ("uid-a", "default", "a")
    assert none(found, act.End)
    return story.forget()


def test_an_orphan_is_ended_only_after_the_api_server_has_said_that_there_is_no_pod(pod):
    story = orphaned(pod)
    story.handle(ev.PodLooked("uid-a", None))
    # It may have been deleted by force a moment ago: its processes get their time.
    assert none(story.pass_time(28), act.End)
    assert {a.job_id for a in story.pass_time(5) if isinstance(a, act.End)} == {10}


def test_a_look_without_an_answer_ends_no_orphan(pod):
    story = orphaned(pod)
    story.handle(ev.ActionFailed("LookPod", "uid-a", 0, "timeout"))
    found = story.pass_time(60)
    assert none(found, act.End)
    assert len([a for a in found if isinstance(a, act.LookPod)]) == 12


def test_an_orphan_whose_pod_is_found_is_adopted(pod):
    story = orphaned(pod)
    story.handle(ev.PodLooked("uid-a", pod.on("n1", 10, "0-1").obj))
    story.pass_time(1)
    assert story.phase(pod) == "bound"


def test_an_orphan_on_a_silent_node_is_kept(pod):
    story = orphaned(pod)
    story.handle(ev.NodeChanged(story.kube_nodes["n1"].not_ready().obj))
    story.handle(ev.PodLooked("uid-a", None))
    found = story.pass_time(300)
    assert none(found, act.End)
    assert only(found, act.Tell).reason == "ClaimKept"


def test_an_orphan_whose_pod_we_saw_deleted_unbound_is_ended_at_once(pod):
    story = Story("n1").start(pod)
    story.gone(pod)
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    assert only(story.poll(), act.End).job_id == 10


def test_a_suspended_orphan_is_not_forgotten(pod):
    story = Story("n1").start(pod)
    story.gone(pod)
    story.slurm(make_claim_job(10, pod, "n1", "0-1").state("SUSPENDED"))
    assert only(story.poll(), act.End).job_id == 10


def test_a_placeholder_without_a_pod_is_ended_at_once(pod):
    story = Story("n1").slurm(make_claim_job(10, pod).state("PENDING")).start()
    story.pass_time(6)
    story.handle(ev.PodLooked("uid-a", None))
    assert only(story.poll(), act.End).job_id == 10


# What is not ours.


FOREIGN = {
    "another user's job with our name and comment": lambda p: make_claim_job(
        10, p, "n1", "0-1"
    ).but(user_id=1001),
    "a claim of another Kubernetes cluster on the same Slurm": lambda p: make_claim_job(
        10, p, "n1", "0-1"
    ).but(name="slurmbridge-red", comment=write_comment(ClaimId("red", "uid-a"), "default/a")),
    "a job of ours by another name": lambda p: make_job(10).on("n1", "0-1").but(user_id=OWNER),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_is_never_touched(name, pod):
    story = Story("n1").slurm(FOREIGN[name](pod)).start(pod)
    found = story.actions + story.pass_time(120)
    assert none(found, act.End, act.LookPod, act.LookJob, act.Extend)
    assert story.phase(pod) == ""
    assert story.free("n1") == 6


def test_two_clusters_on_one_slurm_charge_each_other_as_natives(pod):
    red = make_claim_job(9, pod, "n1", "0-3").but(
        name="slurmbridge-red", comment=write_comment(ClaimId("red", "uid-a"), "default/a")
    )
    story = Story("n1").slurm(red, make_claim_job(10, pod, "n1", "4-5")).start(pod)
    assert story.entry(pod).job_id == 10
    assert story.machine.view().nodes["n1"].native_jobs == 1


def test_a_forged_claim_under_the_id_of_a_pods_own_is_not_its_claim(pod):
    story = Story("n1").start(pod).run(pod, 10, "n1", "0-1").forget()
    forged = make_claim_job(10, pod, "n1", "0-1").but(user_id=1001)
    story.slurm(forged)
    assert only(story.pass_time(1), act.LookJob).job_id == 10
    assert only(story.handle(ev.JobLooked("uid-a", 10, forged.obj)), act.Cover).indices == (0, 1)


# Strays.


def stray(policy="cover", **fields):
    settings = make_settings(make_policy(stray=policy))
    story = Story("n1", settings=settings).start()
    pod = make_pod("s").gpus(2).on("n1").but(**fields)
    story.see(pod)
    return story, pod


def test_a21_e07_a_pod_bound_past_us_is_charged_at_once_and_covered(pod):
    story, pod = stray()
    assert story.free("n1") == 0
    cover = only(story.pass_time(1), act.Cover)
    assert (cover.indices, cover.request.ask.gpu.count) == (None, 2)
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    claim = make_claim(10, pod, "n1", "0-1", granted=story.now)
    note = only(story.handle(ev.Covered("uid-s", claim)), act.AnnotatePod)
    assert note.annotations == {keys.CLAIM: "10/uid-s", keys.GPUS: "0-1"}
    assert (story.phase(pod), story.free("n1")) == ("bound", 6)


def test_a_reading_from_before_its_binding_makes_nobody_a_stray():
    story, _ = stray()
    assert none(story.poll(began=0.5), act.Cover)
    assert only(story.pass_time(1), act.Cover)


def test_strays_that_cannot_be_covered_are_told_and_stay_charged_and_are_tried_again():
    story, _ = stray()
    story.pass_time(1)
    story.handle(ev.CoverRefused("uid-s", "busy", "no GPU is free"))
    tell = only(story.pass_time(1), act.Tell)
    assert (tell.reason, tell.warning) == ("Stray", True)
    found = story.pass_time(25)
    assert none(found, act.Evict, act.Cover)
    assert story.free("n1") == 0
    assert only(story.pass_time(10), act.Cover).uid == "uid-s"
    story.handle(ev.CoverRefused("uid-s", "busy", "no GPU is free"))
    assert none(story.pass_time(1), act.Tell)


def test_strays_are_reported_where_policy_says_so():
    story, _ = stray("report")
    assert only(story.actions, act.Tell).reason == "Stray"
    assert none(story.pass_time(120), act.Cover, act.Evict)
    assert story.free("n1") == 0


def test_strays_are_evicted_where_policy_says_so():
    story, _ = stray("evict")
    assert only(story.pass_time(3), act.Evict).uid == "uid-s"


def test_a_stray_that_goes_frees_its_gpus():
    story, pod = stray("report")
    story.see(pod.over())
    story.pass_time(1)
    assert story.free("n1") == 8


def test_a_pod_that_only_says_that_it_has_a_claim_is_a_stray():
    settings = make_settings(make_policy(stray="report"))
    story = Story("n1", settings=settings).start()
    pod = make_pod("s").on("n1").wrote(CLAIM="10/uid-other", GPUS="0-7")
    story.see(pod)
    assert story.entry(pod).stray
    assert story.entry(pod).gpus.indices is None


@pytest.mark.parametrize(
    "claim", ["", "x/uid-s", "10", "\u0661/uid-s", "-1/uid-s", "10/uid-s/more"]
)
def test_annotations_that_are_no_claim_are_not_believed(claim):
    story, pod = stray(annotations={keys.CLAIM: claim, keys.GPUS: "0-1"})
    assert story.entry(pod).stray


def test_indices_that_cannot_be_read_are_any():
    story, pod = stray(annotations={keys.CLAIM: "10/uid-s", keys.GPUS: "0-99999999"})
    assert not story.entry(pod).stray
    assert only(story.pass_time(1), act.Cover).indices is None


def test_a_stray_whose_request_cannot_be_read_blocks_its_node():
    story, _ = stray(gpu=None, fault="two kinds of GPU")
    assert only(story.actions, act.Tell).reason == "Stray"
    assert story.free("n1") == 0


def test_a_stray_on_a_node_that_joins_the_pool_later_is_found():
    story = Story("n1").start()
    pod = make_pod("s").on("n9")
    story.see(pod)
    assert story.phase(pod) == ""
    story.nodes["n9"] = story.nodes["n1"].but(name="n9")
    story.nodes["n1"] = Story("n1").nodes["n1"]
    story.handle(ev.NodeChanged(story.kube_nodes["n1"].but(name="n9", uid="n9").obj))
    story.poll()
    assert story.phase(pod) == "covering"


def test_a_second_claim_found_while_a_stray_is_covered_is_taken_if_it_fits():
    story, pod = stray()
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    found = story.pass_time(1)
    assert none(found, act.Cover, act.End)
    assert story.phase(pod) == "bound"


def test_gpus_that_slurm_gave_a_stray_but_another_pod_may_use_are_given_back():
    story, pod = stray()
    other = make_pod("b").on("n1", 9, "0")
    story.see(other)
    story.pass_time(1)
    claim = make_claim(10, pod, "n1", "0-1", granted=story.now)
    assert only(story.handle(ev.Covered("uid-s", claim)), act.End).job_id == 10
    assert story.phase(pod) == "lost"


def test_nothing_is_done_before_the_first_comparison(pod):
    story = Story("n1")
    story.see(pod.on("n1"))
    story.poll()
    assert story.tick(at=100) == []
    assert story.machine.state.book == {}
    assert story.actions == []


def test_a_claim_of_which_slurm_never_tells_the_gpus_is_given_up_and_the_pod_asks_anew():
    """Granted while the node had not registered (22.05): it runs with `GRES=gpu:0(IDX:)`."""
    pod = make_pod("a").gpus(2)
    story = Story("n1", "n2").start(pod)
    story.ask(pod, "n1")
    story.handle(ev.AllocateUnknown("uid-a", 10, "job 10: still RUNNING"))
    story.slurm(make_claim_job(10, pod).on_unknown("n1"))
    assert none(story.pass_time(50), act.End)
    assert only(story.pass_time(12), act.End).job_id == 10
    story.handle(ev.Ended("uid-a", 10))
    story.slurm(without=(10,)).poll()
    assert only(story.ask(pod, "n2"), act.Allocate).request.slurm_node == "n2"


def test_after_a_restart_of_ours_too():
    pod = make_pod("a").gpus(2)
    story = Story("n1", "n2").slurm(make_claim_job(10, pod).on_unknown("n1")).start(pod)
    assert none(story.pass_time(50), act.End)
    assert only(story.pass_time(15), act.End).job_id == 10
