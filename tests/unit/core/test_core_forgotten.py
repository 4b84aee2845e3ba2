"""slurmctld forgets claims in a crash, gives their ids and GPUs away, and brings old ones back."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from slurmbridge.pool.policy import IdentityRule
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
    return Story("n1", "n2").start(pod).run(pod, 10, "n1", "2-3").forget()


def forget(story, at=10.0):
    """slurmctld has restarted and knows nothing of job 10; the second look finds nothing."""
    story.slurm(without=(10,)).boot = T0 + at - 1
    assert only(story.poll(at=at), act.LookJob).job_id == 10
    return story.handle(ev.JobLooked("uid-a", 10, None))


def cover(story, pod, job_id=11, indices="2-3"):
    story.slurm(make_claim_job(job_id, pod, "n1", indices))
    claim = make_claim(job_id, pod, "n1", indices, granted=story.now)
    return story.handle(ev.Covered("uid-a", claim))


def test_a_forgotten_claim_is_covered_with_the_same_gpus_before_anything_else(story, pod):
    found = forget(story)
    assert (found[0].indices, found[0].request.slurm_node) == ((2, 3), "n1")
    assert kinds(found) == ["Cover"]
    assert story.free("n1") == 0


def test_once_covered_the_new_claim_is_written_on_the_pod(story, pod):
    forget(story)
    note = only(cover(story, pod), act.AnnotatePod)
    assert note.annotations == {keys.CLAIM: "11/uid-a", keys.GPUS: "2-3"}
    assert story.phase(pod) == "bound"
    assert story.free("n1") == 6
    story.see(pod.wrote(CLAIM="11/uid-a"))
    assert none(story.pass_time(30), act.AnnotatePod, act.LookJob, act.Cover)


def test_what_could_not_be_written_is_written_again(story, pod):
    forget(story)
    cover(story, pod)
    notes = [a for a in story.pass_time(25) if isinstance(a, act.AnnotatePod)]
    assert {n.annotations[keys.CLAIM] for n in notes} == {"11/uid-a"}
    assert 2 <= len(notes) <= 3


def test_a_cover_that_another_restart_has_undone_before_its_answer_came_is_made_again(story, pod):
    forget(story)
    claim = make_claim(11, pod, "n1", "2-3", granted=T0 + 12)
    story.boot = T0 + 12.5
    story.poll(at=13, began=11.5)
    story.handle(ev.Covered("uid-a", claim))
    assert only(story.poll(at=14), act.LookJob).job_id == 11
    assert only(story.handle(ev.JobLooked("uid-a", 11, None)), act.Cover).indices == (2, 3)


def test_the_same_pod_may_get_the_id_of_its_forgotten_claim_again():
    pod = make_pod("a").gpus(2)
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.handle(ev.UnboundReleased("uid-a", 10))
    assert only(story.handle(ev.PodLooked("uid-a", pod.obj)), act.End).job_id == 10
    story.slurm(without=(10,)).boot = T0 + 2
    story.forget().ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.bind(pod, 10, "n1", "0-1")
    assert none(story.pass_time(20), act.End)
    assert story.phase(pod) == "bound"


def test_while_the_pod_is_being_given_a_new_claim_an_old_one_is_not_ended_again():
    pod = make_pod("a").gpus(2)
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.handle(ev.UnboundReleased("uid-a", 10))
    story.handle(ev.PodLooked("uid-a", pod.obj))
    story.forget().ask(pod, "n1")
    assert none(story.pass_time(20), act.End)


def test_a_refused_cover_evicts_the_pod(story, pod):
    forget(story)
    story.slurm(make_job(12).on("n1", "2-5"))
    story.handle(ev.CoverRefused("uid-a", "indices", "job 12 has GPU 2"))
    evict = only(story.pass_time(3), act.Evict)
    assert "job 12 has GPU 2" in evict.why
    assert story.free("n1") == 0
    assert "uid-a" in story.machine.state.ledgers["n1"].conflicts[0]


def test_a_refused_cover_is_asked_for_again_when_slurmctld_has_restarted_since(story, pod):
    forget(story)
    story.slurm(make_job(12).on("n1", "2-5"))
    story.handle(ev.CoverRefused("uid-a", "indices", "job 12 has GPU 2"))
    story.slurm(without=(12,)).boot = T0 + 11.5
    found = story.poll(at=12)
    assert none(found, act.Evict, act.Tell)
    assert only(found, act.Cover).indices == (2, 3)


def test_a_vanished_claim_without_a_restart_is_looked_at_twice_and_then_lost(story, pod):
    story.slurm(without=(10,)).poll(at=10)
    assert story.handle(ev.JobLooked("uid-a", 10, None)) == []
    assert only(story.poll(at=11), act.LookJob)
    assert kinds(story.handle(ev.JobLooked("uid-a", 10, None))) == ["AnnotatePod", "Tell"]
    assert only(story.pass_time(3), act.Evict).uid == "uid-a"


def test_a_restart_that_only_the_next_reading_tells_of_still_covers(story, pod):
    story.slurm(without=(10,)).poll(at=10)
    story.handle(ev.JobLooked("uid-a", 10, None))
    story.boot = T0 + 9
    story.poll(at=11)
    assert kinds(story.handle(ev.JobLooked("uid-a", 10, None))) == ["Cover"]


def test_a_claim_that_was_seen_after_the_restart_is_not_called_forgotten(story, pod):
    story.boot = T0 + 5
    story.poll(at=6)
    story.slurm(without=(10,)).poll(at=10)
    assert none(story.handle(ev.JobLooked("uid-a", 10, None)), act.Cover)


def test_a_job_id_used_again_by_a_stranger_is_not_the_claim(story, pod):
    stranger = make_job(10).on("n1", "0")
    story.slurm(stranger)
    story.poll(at=10)
    assert only(story.handle(ev.JobLooked("uid-a", 10, stranger.obj)), act.Cover).indices == (2, 3)
    cover(story, pod)
    story.see(pod.over())
    assert {a.job_id for a in story.of(act.End)} == {11}


def test_a_job_id_used_again_by_another_claim_proves_that_the_first_was_forgotten(story, pod):
    other = make_pod("b").gpus(2)
    story.see(other)
    story.ask(other, "n2")
    found = story.grant(other, 10, "n2", "0-1")
    assert only(found, act.Reply).gpus == "0-1"
    assert only(found, act.Cover).uid == "uid-a"
    cover(story, pod)
    story.see(pod.over())
    assert [a.job_id for a in story.of(act.End)] == [11]
    assert story.phase(other) == "held"


def test_a_forgotten_claim_that_nobody_has_bound_yet_is_covered_too(pod):
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "2-3")
    assert only(forget(story), act.Cover).indices == (2, 3)
    assert only(story.ask(pod, "n1"), act.Reply).unavailable
    cover(story, pod)
    assert story.phase(pod) == "held"
    assert only(story.ask(pod, "n1"), act.Reply).job_id == 11


def test_if_it_cannot_be_covered_the_unbound_pod_just_waits_again(pod):
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "2-3")
    forget(story)
    story.handle(ev.CoverRefused("uid-a", "indices", "taken"))
    assert none(story.pass_time(2), act.Evict, act.Cover)
    assert story.phase(pod) == ""


def test_a_pod_bound_with_the_forgotten_claim_while_it_is_covered(pod):
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "2-3")
    forget(story)
    story.bind(pod, 10, "n1", "2-3")
    note = only(cover(story, pod), act.AnnotatePod)
    assert note.annotations[keys.CLAIM] == "11/uid-a"
    assert story.phase(pod) == "bound"


def test_a_cover_without_an_answer_is_looked_for_before_another_is_asked(story, pod):
    forget(story)
    story.slurm(make_claim_job(11, pod, "n1", "2-3"))
    assert kinds(story.handle(ev.ActionFailed("Cover", "uid-a", 0, "timeout"))) == ["PollNow"]
    found = story.poll(at=12)
    assert none(found, act.Cover)
    assert only(found, act.AnnotatePod).annotations[keys.CLAIM] == "11/uid-a"


def test_a_cover_that_was_not_made_is_asked_again_once_a_reading(story, pod):
    forget(story)
    story.handle(ev.ActionFailed("Cover", "uid-a", 0, "timeout"))
    assert story.poll(at=11, began=9.5) == []
    assert kinds(story.poll(at=12)) == ["Cover"]
    assert story.poll(at=13) == []


def test_a_cover_that_is_never_answered_is_asked_again(story, pod):
    forget(story)
    assert none(story.pass_time(50), act.Cover)
    assert only(story.pass_time(15), act.Cover).indices == (2, 3)


def test_a_cover_told_twice_changes_nothing(story, pod):
    forget(story)
    cover(story, pod)
    assert cover(story, pod) == []


def test_a_second_claim_by_a_late_cover_is_given_back(story, pod):
    forget(story)
    cover(story, pod)
    assert only(cover(story, pod, 12), act.End).job_id == 12


def test_a_cover_for_a_pod_that_has_gone_is_given_back(story, pod):
    forget(story)
    story.see(pod.over())
    assert only(cover(story, pod), act.End).job_id == 11


@pytest.mark.parametrize("reason", ["starting", "completing", "fragmented"])
def test_a_refusal_that_will_pass_is_tried_again_for_a_while(story, pod, reason):
    forget(story)
    assert kinds(story.handle(ev.CoverRefused("uid-a", reason, "not yet"))) == ["PollNow"]
    assert kinds(story.poll(at=12)) == ["Cover"]
    story.handle(ev.CoverRefused("uid-a", reason, "not yet"), at=31)
    story.poll(at=32)
    assert story.phase(pod) == "lost"


def test_a_cover_refused_because_an_earlier_one_had_succeeded_unheard_costs_the_pod_nothing(
    story, pod
):
    forget(story)
    assert none(story.pass_time(50), act.Cover)
    assert only(story.pass_time(15), act.Cover)
    story.handle(ev.CoverRefused("uid-a", "indices", "job 11 has them"))
    story.slurm(make_claim_job(11, pod, "n1", "2-3"))
    assert none(story.pass_time(3), act.Evict, act.End)
    assert (story.phase(pod), story.entry(pod).job_id) == ("bound", 11)


def test_a_claim_of_ours_that_came_back_and_stands_in_the_way_is_ended_first(story, pod):
    # u-old's claim 9 held GPUs 2-3, was cancelled, and runs again after the restart.
    old = make_pod("old")
    story.see(old)
    story.gone(old)
    story.slurm(make_claim_job(9, old, "n1", "2-3"))
    forget(story)
    assert [a.job_id for a in story.of(act.End)] == [9]
    assert none(story.handle(ev.CoverRefused("uid-a", "indices", "taken")), act.Tell)
    story.slurm(without=(9,))
    assert kinds(story.poll(at=12)) == ["Cover"]
    cover(story, pod)
    assert story.phase(pod) == "bound"


def test_a_cancelled_claim_that_comes_back_running_is_cancelled_again(story, pod):
    story.see(pod.over())
    story.slurm(without=(10,)).poll(at=6)
    assert story.machine.state.ending == {}
    story.slurm(make_claim_job(10, pod, "n1", "2-3")).boot = T0 + 8
    assert only(story.poll(at=10), act.End).job_id == 10
    assert story.free("n1") == 6


def test_an_end_that_slurm_has_undone_is_asked_again(story, pod):
    story.see(pod.over())
    story.handle(ev.Ended("uid-a", 10))
    found = story.pass_time(14)
    assert [a.job_id for a in found if isinstance(a, act.End)] == [10, 10]


def test_a_claim_that_came_back_beside_the_cover_is_an_extra(story, pod):
    forget(story)
    cover(story, pod, 12)
    story.slurm(make_claim_job(10, pod, "n1", "4-5"))
    assert only(story.pass_time(2), act.End).job_id == 10


def test_a_forgotten_claim_of_a_force_deleted_pod_is_covered_while_its_processes_may_run(
    story, pod
):
    story.gone(pod)
    assert story.phase(pod) == "lingering"
    assert only(forget(story), act.Cover).indices == (2, 3)
    assert story.free("n1") == 0
    assert cover(story, pod) == []
    assert (story.phase(pod), story.free("n1")) == ("lingering", 6)
    assert none(story.pass_time(20), act.End)
    assert {a.job_id for a in story.pass_time(20) if isinstance(a, act.End)} == {11}


def test_a_policy_that_forbids_the_pod_by_now_does_not_stop_the_cover(story, pod):
    rules = make_policy(identities=(IdentityRule(namespaces=("other",)),))
    story.machine.reload(make_settings(rules))
    assert only(forget(story), act.Cover).request.ask.gpu.count == 2


def test_the_same_after_a_restart_of_the_bridge(story, pod):
    story.settings = make_settings(
        make_policy(identities=(IdentityRule(namespaces=("other",)),)), renew_share=0.9
    )
    story.slurm(make_claim_job(10, pod, "n1", "2-3").but(account="old", end=T0 + 600))
    story.again(pod)
    assert story.phase(pod) == "bound"
    assert only(story.pass_time(3), act.Extend).job_id == 10
    story.forget()
    found = forget(story, at=20)
    assert only(found, act.Cover).request.ask.account == "old"


def test_on_a_drained_node_a_pod_waits_for_its_cover_since_nobody_can_take_its_gpus(pod, story):
    story.nodes["n1"].state("IDLE+DRAIN")
    story.slurm(without=(10,)).boot = story.now
    looked = 0
    for _ in range(40):
        story.pass_time(1)
        for look in story.of(act.LookJob):
            story.handle(ev.JobLooked(look.uid, look.job_id, None))
        for _cover in story.of(act.Cover):
            looked += 1
            story.handle(ev.CoverRefused(plain(pod).uid, "node", "Required node not available"))
        assert none(story.actions, act.Evict)
        story.forget()
    assert looked > 1
    assert story.phase(pod) == "covering"
