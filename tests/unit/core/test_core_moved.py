"""A claim runs on, and Slurm holds other GPUs for it than those that its pod was given."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core import evict
from tests.support.builders import Story, make_claim_job, make_pod, none, only, use


def moved(story, job):
    """A reading and a second look show the claim like that."""
    story.slurm(job)
    story.now += 1
    assert only(story.poll(), act.LookJob).job_id == 10
    assert none(story.actions, act.Evict), "a reading alone moves nobody"
    return story.handle(ev.JobLooked("uid-a", 10, job.obj))


@pytest.mark.parametrize(("node", "indices"), [("n1", "2-3"), ("n1", "1-2"), ("n2", "0-1")])
def test_the_pod_goes_and_what_it_uses_is_nobodys_until_then(story, pod, node, indices):
    moved(story, make_claim_job(10, pod, node, indices))
    assert story.phase(pod) == "lost"
    assert only(story.pass_time(1), act.Evict).uid == "uid-a"
    assert story.free("n1") == 0, "Slurm gives its GPUs to whomever it likes"
    story.slurm(make_claim_job(10, pod, node, indices)).pass_time(5)
    assert story.phase(pod) == "lost"


def test_a_look_that_shows_it_where_it_was_settles_a_reading_that_was_wrong(story, pod):
    story.slurm(make_claim_job(10, pod, "n1", "2-3"))
    story.now += 1
    only(story.poll(), act.LookJob)
    story.slurm(make_claim_job(10, pod, "n1", "0-1"))
    story.handle(ev.JobLooked("uid-a", 10, make_claim_job(10, pod, "n1", "0-1").obj))
    assert story.phase(pod) == "bound"
    assert none(story.pass_time(30), act.Evict)


@pytest.mark.parametrize(
    "gpus", [None, {}, {"n1": use(None, 2)}, {"n1": use("")}, {"n1": use("0")}]
)
def test_what_slurm_does_not_tell_in_full_takes_nothing_from_it(story, pod, gpus):
    story.slurm(make_claim_job(10, pod, "n1", "0-1").but(gpus=gpus))
    story.now += 1
    assert none(story.poll(), act.LookJob)
    assert none(story.pass_time(30), act.Evict)
    assert story.phase(pod) == "bound"


def test_single_pods_that_are_lost_cost_no_look_at_the_others(monkeypatch):
    pods = [make_pod(f"p{i}").gpus(1) for i in range(16)]
    story = Story("n1", "n2").start(*pods)
    for i, pod in enumerate(pods):
        story.run(pod, 10 + i, f"n{1 + i // 8}", str(i % 8))
    looked = []
    monkeypatch.setattr(evict, "_are_together", lambda *pair: looked.append(pair))
    for i, pod in enumerate(pods):
        story.slurm(make_claim_job(10 + i, pod, f"n{1 + i // 8}", str(i % 8)).state("CANCELLED"))
    story.now += 1
    story.poll()
    for i, pod in enumerate(pods):
        story.handle(ev.JobLooked(pod.obj.uid, 10 + i, story.jobs[10 + i].obj))
    assert {story.phase(pod) for pod in pods} == {"lost"}
    assert looked == []
