"""Slurm ends a claim first: a second look, one eviction, and the GPUs stay charged."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core.settings import Eviction
from slurmbridge.pool import keys
from slurmbridge.pool.group import Group
from tests.support.builders import (
    T0,
    Story,
    kinds,
    make_claim,
    make_claim_job,
    make_pod,
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
    return Story("n1").start(pod).run(pod, 10, "n1", "0-1").forget()


def lose(story, pod, state="CANCELLED", job_id=10):
    """The reading no longer shows the claim running, and the second look says why."""
    job = make_claim_job(job_id, pod, "n1", "0-1").state(state)
    story.slurm(job)
    story.now += 1
    assert only(story.poll(), act.LookJob).job_id == job_id
    return story.handle(ev.JobLooked(pod.obj.uid, job_id, job.obj))


@pytest.mark.parametrize(
    "state",
    [
        "CANCELLED",
        "TIMEOUT",
        "PREEMPTED",
        "NODE_FAIL",
        "CANCELLED+COMPLETING",
        "SUSPENDED",
        "FAILED",
    ],
)
def test_a_claim_that_slurm_ended_evicts_its_pod_once(story, pod, state):
    told = lose(story, pod, state)
    assert kinds(told) == ["AnnotatePod", "Tell"]
    assert state.partition("+")[0] in told[0].annotations[keys.REASON]
    evict = only(story.pass_time(5), act.Evict)
    assert (evict.name, evict.grace_s) == ("a", 30)
    story.handle(ev.Evicted("uid-a"))
    story.see(pod.deleting())
    assert none(story.pass_time(60), act.Evict)


def test_its_gpus_stay_charged_until_the_pod_is_gone(story, pod):
    lose(story, pod)
    story.slurm(without=(10,)).pass_time(3)
    assert story.free("n1") == 0
    story.see(pod.deleting())
    story.pass_time(20)
    assert story.free("n1") == 0
    story.see(pod.over("Failed"))
    story.pass_time(2)
    assert story.free("n1") == 8
    assert story.phase(pod) == ""


def test_a_suspended_claim_is_not_said_to_have_ended(story, pod):
    told = lose(story, pod, "SUSPENDED")
    why = "Slurm has suspended the claim (job 10: SUSPENDED)"
    assert (told[0].annotations[keys.REASON], told[1].message) == (f"claim lost: {why}", why)


def test_a_suspended_claim_that_is_resumed_before_the_eviction_keeps_its_pod(story, pod):
    lose(story, pod, "SUSPENDED")
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    assert none(story.pass_time(5), act.Evict, act.End)
    assert story.phase(pod) == "bound"


def test_what_is_left_of_the_job_is_ended_with_the_pod(story, pod):
    lose(story, pod, "SUSPENDED")
    story.pass_time(3)
    assert none(story.actions, act.End)
    assert only(story.see(pod.over("Failed")), act.End).job_id == 10


def test_a_second_look_that_shows_it_running_evicts_nobody(story, pod):
    story.slurm(without=(10,)).poll(at=9)
    job = make_claim_job(10, pod, "n1", "0-1")
    assert story.handle(ev.JobLooked("uid-a", 10, job.obj)) == []
    assert story.phase(pod) == "bound"
    story.slurm(job)
    assert none(story.pass_time(60), act.Evict, act.LookJob)


@pytest.mark.parametrize("flag", ["SIGNALING", "RESIZING", "STOPPED", "CONFIGURING", "ODD"])
def test_a_flag_on_a_running_claim_takes_nothing_from_it(story, pod, flag):
    story.slurm(make_claim_job(10, pod, "n1", "0-1").state(f"RUNNING+{flag}"))
    assert none(story.pass_time(5), act.LookJob, act.Evict)


def test_a_look_that_was_not_answered_is_repeated_and_decides_nothing(story, pod):
    story.slurm(make_claim_job(10, pod, "n1", "0-1").state("CANCELLED"))
    story.poll(at=9)
    story.handle(ev.ActionFailed("LookJob", "uid-a", 10, "timeout"))
    found = story.pass_time(7)
    assert 2 <= len([a for a in found if isinstance(a, act.LookJob)]) <= 4
    assert none(found, act.Evict)


def test_a_look_at_another_job_says_nothing(story, pod):
    story.slurm(make_claim_job(10, pod, "n1", "0-1").state("CANCELLED")).poll(at=9)
    job = make_claim_job(9, pod, "n1", "0-1").state("CANCELLED")
    assert story.handle(ev.JobLooked("uid-a", 9, job.obj)) == []


def test_a_reading_older_than_the_grant_contradicts_nothing(pod):
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.now = T0 + 5
    story.grant(pod, 10, "n1", "0-1")
    story.bind(pod, 10, "n1", "0-1")
    story.slurm(without=(10,))
    assert none(story.poll(at=6, began=4), act.LookJob)
    assert only(story.poll(at=7), act.LookJob).job_id == 10


def test_an_older_reading_that_comes_in_late_is_not_taken(story, pod):
    story.slurm(without=(10,))
    assert story.poll(at=20, began=-5) == []
    assert story.machine.state.snapshot.began > T0


def test_a_listing_that_failed_ends_nothing(story, pod):
    for second in range(10, 40):
        assert story.handle(ev.PollFailed("connection refused"), at=second) == []
        assert none(story.tick(), act.Evict, act.End)
    assert story.phase(pod) == "bound"
    assert story.machine.state.poll_failed == "connection refused"


def test_a_lost_claim_of_an_unbound_pod_is_just_given_up(pod):
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    lose(story, pod)
    story.pass_time(1)
    assert none(story.actions, act.Evict)
    assert story.phase(pod) == ""
    assert kinds(story.ask(pod, "n1")) == ["Allocate"]


def test_notice_of_preemption_starts_the_pods_grace_while_slurm_holds_its_gpus(story, pod):
    job = make_claim_job(10, pod, "n1", "0-1").but(preempted_at=T0 + 5)
    story.slurm(job)
    found = story.pass_time(3)
    assert "preempts" in only(found, act.Evict).why
    assert none(found, act.End)
    assert only(story.see(pod.over("Failed")), act.End).job_id == 10


def test_claims_that_run_again_before_the_evictions_are_kept():
    story, pods = crowd(11)
    lose_all(story, pods, "SUSPENDED")
    assert story.machine.state.breaker_since is not None  # and nobody was evicted
    for index, pod in enumerate(pods):
        story.slurm(make_claim_job(10 + index, pod, "n1", str(index)))
    found = story.pass_time(2)
    assert {story.phase(p) for p in pods} == {"bound"}
    assert none(found, act.Evict)
    assert story.machine.state.breaker_since is None


def test_the_reason_is_taken_off_again_when_it_was_not_so():
    story, pods = crowd(11)
    lose_all(story, pods, "SUSPENDED")
    for index, pod in enumerate(pods):
        story.see(pod.wrote(REASON="claim lost: ..."))
        story.slurm(make_claim_job(10 + index, pod, "n1", str(index)))
    found = story.pass_time(1)
    notes = [a.annotations for a in found if isinstance(a, act.AnnotatePod)]
    assert notes == [{keys.REASON: None}] * 11


# The breaker.


def crowd(count, **eviction):
    """So many pods of one GPU on one big node."""
    story = Story("n1", settings=make_settings(eviction=Eviction(**eviction)))
    story.nodes["n1"].gpus(count)
    story.kube_nodes["n1"].gpus(count)
    pods = [make_pod(f"p{i}") for i in range(count)]
    for index, pod in enumerate(pods):
        story.slurm(make_claim_job(10 + index, pod, "n1", str(index)))
        pod.on("n1", 10 + index, str(index))
    story.start(*pods)
    story.pass_time(2)
    assert {story.phase(p) for p in pods} == {"bound"}
    return story.forget(), pods


def lose_all(story, pods, state="NODE_FAIL"):
    """One reading shows none of them running, and the looks are answered one by one."""
    jobs = [make_claim_job(10 + i, p, "n1", str(i)).state(state) for i, p in enumerate(pods)]
    story.slurm(*jobs)
    story.now += 1
    story.poll()
    for pod, job in zip(pods, jobs, strict=True):
        story.handle(ev.JobLooked(pod.obj.uid, job.obj.id, job.obj))
    story.pass_time(5)


def test_a_few_losses_at_once_are_believed():
    story, pods = crowd(20)
    lose_all(story, pods[:5])
    assert len(story.of(act.Evict)) == 5


def test_mass_loss_opens_the_breaker_before_the_first_eviction():
    story, pods = crowd(20)
    lose_all(story, pods)
    assert story.of(act.Evict) == []
    assert story.machine.state.breaker_since is not None
    assert len(story.of(act.LookJob)) == 20


def test_confirming_evicts_within_the_budget_per_minute():
    story, pods = crowd(20, per_minute=5)
    lose_all(story, pods)
    assert len([a for a in story.handle(ev.BreakerAnswered(True)) if isinstance(a, act.Evict)]) == 5
    for pod in pods[:5]:
        story.see(pod.deleting())
    assert len([a for a in story.pass_time(50) if isinstance(a, act.Evict)]) == 0
    assert len([a for a in story.pass_time(20) if isinstance(a, act.Evict)]) == 5


def test_dismissing_finds_every_claim_that_is_there():
    story, pods = crowd(20)
    lose_all(story, pods)
    for index, pod in enumerate(pods):
        story.slurm(make_claim_job(10 + index, pod, "n1", str(index)))
    assert none(story.handle(ev.BreakerAnswered(False)), act.Evict)
    assert none(story.pass_time(5), act.Evict)
    assert {story.phase(p) for p in pods} == {"bound"}
    assert story.machine.state.breaker_since is None


def test_dismissed_losses_that_are_still_so_open_the_breaker_again():
    story, pods = crowd(20)
    lose_all(story, pods)
    story.handle(ev.BreakerAnswered(False))
    story.now += 1
    found = story.poll()
    for index, pod in enumerate(pods):
        job = make_claim_job(10 + index, pod, "n1", str(index)).state("NODE_FAIL")
        story.handle(ev.JobLooked(pod.obj.uid, 10 + index, job.obj))
    assert none(found + story.pass_time(3), act.Evict)
    assert story.machine.state.breaker_since is not None


@pytest.mark.parametrize("is_shown", [True, False], ids=["ended", "forgotten"])
def test_a_bridge_that_begins_while_the_breaker_is_open_evicts_nobody_without_a_persons_word(
    is_shown,
):
    story, pods = crowd(20)
    lose_all(story, pods)
    story.slurm(without=() if is_shown else tuple(range(10, 30)))
    found = list(story.again(*pods).actions)
    for index, pod in enumerate(pods):
        job = story.jobs.get(10 + index)
        found += story.handle(ev.JobLooked(pod.obj.uid, 10 + index, job))
    found += story.pass_time(90)
    assert none(found, act.Evict, act.End)
    assert story.free("n1") == 0
    assert story.machine.state.breaker_since is not None


def test_the_breaker_closes_when_the_lost_pods_are_gone():
    story, pods = crowd(20)
    lose_all(story, pods)
    for pod in pods:
        story.see(pod.over("Failed"))
    story.pass_time(2)
    assert story.machine.state.breaker_since is None


def test_a_reading_that_shows_no_claim_at_all_evicts_nobody():
    story, pods = crowd(20)
    story.slurm(without=tuple(range(10, 30)))
    assert none(story.pass_time(60), act.Evict, act.End)
    assert {story.phase(p) for p in pods} == {"bound"}
    assert story.free("n1") == 0


def test_however_many_claims_are_missing_slurm_is_asked_about_so_many_at_a_time():
    story, _ = crowd(300)
    story.slurm(without=tuple(range(10, 310)))
    story.now += 1
    assert len([a for a in story.poll() if isinstance(a, act.LookJob)]) == 200


def test_a_static_pod_cannot_be_evicted_and_stays_charged(story, pod):
    story.see(pod.but(is_static=True))
    lose(story, pod)
    assert none(story.pass_time(30), act.Evict)
    assert story.phase(pod) == "lost"
    assert story.free("n1") == 0


def test_an_eviction_that_failed_is_tried_again(story, pod):
    lose(story, pod)
    story.pass_time(1)
    story.handle(ev.ActionFailed("Evict", "uid-a", 0, "timeout"))
    assert only(story.pass_time(22), act.Evict).uid == "uid-a"


# Renewal.


def minutes_left(story, actions):
    return round((only(actions, act.Extend).ends - story.now) / 60)


def test_a_rolling_claim_is_renewed_when_half_of_it_is_over(story, pod):
    story.slurm(make_claim_job(10, pod, "n1", "0-1").but(end=T0 + 31 * 60))
    assert none(story.poll(at=30), act.Extend)
    extend = only(story.poll(at=62), act.Extend)
    assert (extend.job_id, extend.ends) == (10, T0 + 62 + 60 * 60)
    assert none(story.poll(at=80), act.Extend)
    assert only(story.poll(at=95), act.Extend)
    story.handle(ev.Extended("uid-a", 10, T0 + 3600))
    assert story.entry(pod).claim.ends == T0 + 3600


def test_a_claim_with_a_duration_of_its_own_is_not_renewed():
    pod = make_pod("a").wrote(DURATION="5m")
    story = Story("n1").start(pod).run(pod, 10, "n1", "0")
    story.slurm(make_claim_job(10, pod, "n1", "0").but(end=T0 + 60))
    assert none(story.pass_time(20), act.Extend, act.Evict)


def test_a_pod_whose_own_time_is_over_gets_its_grace_while_slurm_holds_the_gpus():
    pod = make_pod("a").but(active_deadline_s=3600, grace_s=600)
    story = Story("n1").start(pod).run(pod, 10, "n1", "0").forget()
    story.slurm(make_claim_job(10, pod, "n1", "0").but(end=story.now + 615))
    assert none(story.pass_time(9), act.Evict)
    evict = only(story.pass_time(5), act.Evict)
    assert "the time that the pod has named is over" in evict.why
    story.see(pod.deleting(story.now))
    assert minutes_left(story, story.pass_time(3)) == 11
    assert story.phase(pod) == "lost"


def test_one_whose_time_limit_somebody_raises_in_slurm_stays():
    pod = make_pod("a").wrote(DURATION="10m").but(is_static=True)
    story = Story("n1").start(pod).run(pod, 10, "n1", "0").forget()
    story.slurm(make_claim_job(10, pod, "n1", "0").but(end=story.now + 30))
    story.pass_time(3)
    assert story.phase(pod) == "lost"
    story.slurm(make_claim_job(10, pod, "n1", "0").but(end=story.now + 3000))
    story.pass_time(3)
    assert story.phase(pod) == "bound"


def test_a_pod_that_is_deleted_in_its_last_minute_has_its_claim_to_the_end_of_its_grace():
    pod = make_pod("a").but(active_deadline_s=3600, grace_s=600)
    story = Story("n1").start(pod).run(pod, 10, "n1", "0").forget()
    story.slurm(make_claim_job(10, pod, "n1", "0").but(end=story.now + 650))
    story.see(pod.deleting(story.now))
    assert none(story.pass_time(100), act.Extend), "it has what it needs"
    story.slurm(make_claim_job(10, pod, "n1", "0").but(end=story.now + 500))
    assert minutes_left(story, story.pass_time(20)) == 11


def test_a_claim_with_an_end_of_its_own_is_renewed_while_it_is_kept_for_a_pod_that_is_gone():
    pod = make_pod("a").wrote(DURATION="10m")
    story = Story("n1").start(pod).run(pod, 10, "n1", "0").forget()
    story.kube_nodes["n1"].not_ready()
    story.handle(ev.NodeChanged(plain(story.kube_nodes["n1"])))
    story.slurm(make_claim_job(10, pod, "n1", "0").but(end=story.now + 320))
    story.gone(pod)
    assert none(story.pass_time(15), act.Extend)
    assert minutes_left(story, story.pass_time(10)) == 10
    assert story.phase(pod) == "lingering"


def gangs_with_a_loss():
    """Two gangs of two, each member with a claim of its own; one of each is lost at once."""
    story = Story("n1", settings=make_settings(eviction=Eviction(at_least=1, share=0.01)))
    pods = []
    for k in range(2):
        group = Group("own", "default", f"g{k}", size=2)
        for i in range(2):
            index = 2 * k + i
            pod = make_pod(f"p{index}").but(group=group).on("n1", 10 + index, str(index))
            pod.wrote(TOGETHER=f"uid-p{2 * k}")
            story.slurm(make_claim_job(10 + index, pod, "n1", str(index)).but(end=T0 + 3600))
            pods.append(pod)
    story.start(*pods).pass_time(2)
    for index in (0, 2):
        story.jobs[10 + index].state("CANCELLED")
    for look in [a for a in story.forget().pass_time(1) if isinstance(a, act.LookJob)]:
        story.handle(ev.JobLooked(look.uid, look.job_id, plain(story.jobs[look.job_id])))
    story.pass_time(1)
    return story, pods


def test_while_the_breaker_is_open_a_gangs_healthy_claims_are_renewed():
    story, pods = gangs_with_a_loss()
    assert story.machine.state.breaker_since is not None
    assert {story.phase(p) for p in pods} == {"lost"}
    story.now = T0 + 1801
    story.pass_time(2)
    assert {a.job_id for a in story.of(act.Extend)} == {11, 13}
    assert none(story.actions, act.Evict)


@pytest.mark.parametrize("is_seen", [True, False])
def test_pods_that_reach_their_own_end_together_open_no_breaker(is_seen):
    """A Job of many pods with one duration; seen coming, or found when Slurm has ended them."""
    pods = [make_pod(f"p{i}").wrote(DURATION="10m") for i in range(12)]
    others = [make_pod(f"o{i}") for i in range(8)]
    story = Story("n1", "n2", "n3").start()
    for i, pod in enumerate([*pods, *others]):
        story.run(pod, 100 + i, f"n{1 + i // 8}", str(i % 8))
    story.forget()
    for i in range(12):
        job = story.jobs[100 + i]
        if is_seen:
            job.but(end=story.now + 36)
        else:
            job.state("TIMEOUT")
    for _ in range(10):
        for look in [a for a in story.pass_time(1) if isinstance(a, act.LookJob)]:
            story.handle(ev.JobLooked(look.uid, look.job_id, plain(story.jobs[look.job_id])))
    assert {a.uid for a in story.of(act.Evict)} == {plain(p).uid for p in pods}
    assert story.machine.state.breaker_since is None
    for pod in pods:
        story.see(pod.over("Failed"))
    story.jobs[115].state("CANCELLED")
    for look in [a for a in story.pass_time(1) if isinstance(a, act.LookJob)]:
        story.handle(ev.JobLooked(look.uid, look.job_id, plain(story.jobs[look.job_id])))
    assert "uid-o3" in {a.uid for a in story.pass_time(2) if isinstance(a, act.Evict)}


def test_dismissed_losses_that_are_so_are_made_good_where_the_gpus_are_free():
    story, pods = crowd(20)
    lose_all(story, pods)
    story.slurm(without=tuple(range(10, 30)))
    story.handle(ev.BreakerAnswered(False))
    found = story.pass_time(1)
    covers = [a for a in found if isinstance(a, act.Cover)]
    assert [a.indices for a in covers] == [(i,) for i in range(20)]
    for index, pod in enumerate(pods[:19]):
        story.slurm(make_claim_job(100 + index, pod, "n1", str(index)))
        claim = make_claim(100 + index, pod, "n1", str(index), granted=story.now)
        story.handle(ev.Covered(pod.obj.uid, claim))
    assert {story.phase(p) for p in pods[:19]} == {"bound"}
    # Where a native job was faster, the pod has to go; a person says so.
    story.handle(ev.CoverRefused(pods[19].obj.uid, "indices", "others have them"))
    assert none(story.pass_time(30), act.Evict)
    assert only(story.handle(ev.BreakerAnswered(True)), act.Evict).uid == "uid-p19"


def test_what_was_confirmed_goes_and_the_next_mass_loss_is_another_one():
    story, pods = crowd(40, per_minute=100, at_least=4, share=0.1)
    lose_all(story, pods[:20])
    story.handle(ev.BreakerAnswered(True))
    for pod in pods[:20]:
        story.see(pod.over("Failed"))
    assert story.machine.state.breaker_since is None
    story.forget()
    jobs = [make_claim_job(10 + i, pods[i], "n1", str(i)).state("NODE_FAIL") for i in range(20, 40)]
    story.slurm(*jobs)
    story.pass_time(1)
    for index, job in enumerate(jobs, 20):
        story.handle(ev.JobLooked(pods[index].obj.uid, job.obj.id, job.obj))
    story.pass_time(20)
    assert story.of(act.Evict) == []
    assert story.machine.state.breaker_since is not None


def test_a_new_claim_on_the_gpus_of_a_pod_bound_with_an_ended_one_is_its_claim():
    """It was promised its claim, which Slurm ended; another was being made as it was bound."""
    pod = make_pod("a").gpus(2)
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.slurm(make_claim_job(9, pod, "n1", "0-1").state("CANCELLED"))
    story.poll()
    story.bind(pod, 9, "n1", "0-1")
    assert story.phase(pod) == "bound"
    story.grant(pod, 10, "n1", "0-1")
    story.now += 1
    story.pass_time(5)
    assert none(story.actions, act.End, act.Evict)
    assert (story.phase(pod), story.entry(pod).job_id) == ("bound", 10)
