"""Steps of the host's clock: no timer of ours follows them, and Slurm's times are still met."""

from __future__ import annotations

import msgspec
import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from tests.support.builders import T0, Story, make_claim_job, make_pod, make_snapshot, none, only

HOUR = 3600.0


def step(story: Story, seconds: float) -> None:
    """The host's clock is set; the steady one goes on."""
    story.machine.handle(ev.Ticked(), story.now, seconds)


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_a_step_ends_no_lingering_claim_early_or_late(story, pod, seconds):
    story.gone(pod)
    step(story, seconds)
    assert none(story.pass_time(25), act.End)
    ended = [a.job_id for a in story.pass_time(20) if isinstance(a, act.End)]
    assert set(ended) == {10}


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_a_step_makes_no_reading_older_and_refuses_no_later_one(story, seconds):
    step(story, seconds)
    assert not story.machine.state.is_stale
    before = story.machine.state.snapshot
    story.now += 1
    story.poll()
    assert story.machine.state.snapshot is not before


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_a_view_is_dated_by_the_clock_that_slurm_is_compared_with(story, seconds):
    read = story.machine.state.snapshot.began
    step(story, seconds)
    assert story.machine.view().as_of == read + seconds


@pytest.mark.parametrize("seconds", [HOUR, -HOUR, 1e6])
def test_pods_reach_their_own_end_and_claims_are_renewed_by_the_clock_of_slurmctld(seconds):
    pods = [make_pod("a").wrote(DURATION="20m"), make_pod("b")]
    story = Story("n1").start().run(pods[0], 10, "n1", "0").run(pods[1], 11, "n1", "1")
    ends = {10: story.now + 60, 11: story.now + 1900}
    story.slurm(*(make_claim_job(i, p, "n1", str(i - 10)) for i, p in zip(ends, pods, strict=True)))
    for job_id, end in ends.items():
        story.jobs[job_id].but(end=end)
    step(story.forget(), seconds)

    def read():
        story.now += 1
        told = make_snapshot(*story.nodes.values(), *story.jobs.values(), began=story.now)
        config = msgspec.structs.replace(told.config, told_at=story.now)
        story.handle(ev.Polled(msgspec.structs.replace(told, config=config)))

    read()
    assert none(story.actions, act.Extend, act.Evict)
    story.now += 30
    read()
    assert [a.uid for a in story.of(act.Evict)] == ["uid-a"]
    story.now = ends[11] - 1790
    read()
    assert [a.job_id for a in story.of(act.Extend)] == [11]


def lasting(story: Story, pod, end: float):
    """A reading that tells slurmctld's time, while the claim ends then."""
    story.slurm(make_claim_job(10, pod, "n1", "0").but(end=end))
    told = make_snapshot(*story.nodes.values(), *story.jobs.values(), began=story.now)
    config = msgspec.structs.replace(told.config, told_at=told.ended)
    return story.handle(ev.Polled(msgspec.structs.replace(told, config=config)))


@pytest.mark.parametrize("seconds", [0.0, HOUR, -HOUR])
def test_a_renewal_says_its_end_by_the_clock_of_slurmctld(seconds):
    pod = make_pod("a")
    story = Story("n1").start(pod).run(pod, 10, "n1", "0").forget()
    step(story, seconds)
    story.now += 1
    ends = only(lasting(story, pod, story.now + 600), act.Extend).ends
    assert ends == pytest.approx(story.now + HOUR, abs=1)


@pytest.mark.parametrize("seconds", [0.0, HOUR, -HOUR])
def test_a_claim_lasts_to_the_end_of_its_pods_grace_whatever_the_clocks_say(seconds):
    pod = make_pod("a").but(active_deadline_s=3600, grace_s=600)
    story = Story("n1").start(pod).run(pod, 10, "n1", "0").forget()
    step(story, seconds)
    story.see(pod.deleting(story.now))
    end = story.now + 100
    for _ in range(600):
        story.now += 1
        for action in lasting(story, pod, end):
            if isinstance(action, act.Extend):
                assert action.ends > end
                end = action.ends
        assert end > story.now
    assert end < story.now + 1300


def test_jitter_between_two_clocks_is_no_step(story):
    step(story, 0.1)
    assert story.machine.state.ahead_s == 0.0


def test_a_claim_is_renewed_by_the_clock_of_the_host(story, pod):
    """Slurm's clock is right; ours was half an hour behind and is set right: it ends soon."""
    story.slurm(make_claim_job(10, pod, "n1", "0-1").but(end=T0 + HOUR))
    assert none(story.poll(at=30), act.Extend)
    step(story, HOUR / 2)
    assert only(story.poll(at=31), act.Extend).job_id == 10


def test_what_another_cluster_does_not_know_of_is_no_loss(story):
    known = story.machine.state.snapshot
    other = msgspec.structs.replace(known.config, cluster="another")
    story.now += 1
    empty = msgspec.structs.replace(known, began=story.now, config=other, jobs={})
    assert story.handle(ev.Polled(empty)) == []
    assert story.machine.state.snapshot is known
    assert story.machine.state.poll_failed.startswith("another cluster answers: another")
