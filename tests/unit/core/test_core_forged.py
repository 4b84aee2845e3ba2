"""Annotations that a pod's owner wrote himself: what Slurm does not say is believed only of a Slurm
that may have forgotten it."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.pool.policy import IdentityRule
from tests.support.builders import (
    BOOT,
    T0,
    Story,
    make_claim_job,
    make_pod,
    make_policy,
    make_settings,
    none,
    only,
)

ELSEWHERE = IdentityRule(namespaces=("team-*",))


def forged(policy="cover", boot=BOOT, identities=(), gpus="0-1"):
    """A pod bound past us whose owner has written a claim on it that never was."""
    settings = make_settings(make_policy(stray=policy, identities=identities))
    story = Story("n1", settings=settings)
    story.boot = boot
    story.start()
    pod = make_pod("s").gpus(2).on("n1", 77, gpus)
    story.see(pod)
    return story, pod


def test_until_a_reading_has_told_nothing_is_done_and_its_gpus_are_charged():
    story, _ = forged("evict")
    assert none(story.poll(began=0.5), act.Cover, act.Evict)
    assert story.free("n1") == 0


def test_it_is_reported_where_strays_are():
    story, _ = forged("report")
    found = story.pass_time(60)
    assert only(found, act.Tell).reason == "Stray"
    assert none(found, act.Cover, act.Evict)


def test_it_is_evicted_where_strays_are():
    story, _ = forged("evict")
    assert only(story.pass_time(5), act.Evict).uid == "uid-s"


def test_it_is_covered_where_strays_are():
    story, _ = forged("cover")
    assert only(story.pass_time(2), act.Cover).indices == (0, 1)


def test_it_gets_no_claim_that_its_namespace_may_not_have():
    story, _ = forged("cover", identities=(ELSEWHERE,))
    found = story.pass_time(5)
    assert none(found, act.Cover)
    assert only(found, act.Evict).uid == "uid-s"


@pytest.mark.parametrize("policy", ["cover", "report", "evict"])
def test_a_slurmctld_that_has_started_since_may_have_forgotten_it(policy):
    story, _ = forged(policy, boot=T0 - 1)
    found = story.pass_time(3)
    assert only(found, act.Cover).indices == (0, 1)
    assert none(found, act.Evict, act.Tell)


@pytest.mark.parametrize("policy", ["cover", "report", "evict"])
def test_a_claim_that_slurm_holds_needs_no_belief(policy):
    settings = make_settings(make_policy(stray=policy))
    pod = make_pod("s").gpus(2).on("n1", 77, "0-1")
    story = Story("n1", settings=settings).slurm(make_claim_job(77, pod, "n1", "0-1")).start(pod)
    assert none(story.pass_time(30), act.Cover, act.Evict, act.Tell)
    assert story.phase(pod) == "bound"


@pytest.mark.parametrize("gpus", ["0-7", "3", "", "0-99999999", "x; reboot"])
def test_more_or_fewer_gpus_than_it_asks_for_are_not_believed(gpus):
    story, pod = forged(gpus=gpus)
    assert story.entry(pod).gpus.indices is None
    assert only(story.pass_time(2), act.Cover).indices is None


def test_the_id_of_anothers_claim_takes_nothing_from_him():
    other = make_pod("other").gpus(2)
    story = Story("n1", settings=make_settings(make_policy(stray="evict"))).start(other)
    story.run(other, 77, "n1", "0-1")
    thief = make_pod("thief").gpus(2).on("n1", 77, "0-1")
    story.see(thief)
    found = story.pass_time(5)
    assert [a.uid for a in found if isinstance(a, act.Evict)] == ["uid-thief"]
    assert none(found, act.End)
    assert story.entry(other).job_id == 77


@pytest.mark.parametrize("claim", ["1" * 5000 + "/uid-s", "x/uid-s", "/uid-s", "77/"])
def test_what_is_no_claim_ends_nothing_and_is_a_stray(claim):
    story = Story("n1", settings=make_settings(make_policy(stray="cover"))).start()
    story.see(make_pod("s").gpus(2).on("n1", 77, "0-1").wrote(CLAIM=claim))
    story.pass_time(2)
    assert story.phase(make_pod("s")) == "covering"


def test_indices_that_a_pod_was_never_given_end_no_claim_of_others():
    forger, other = make_pod("forger").gpus(1), make_pod("other").gpus(2)
    story = Story("n1").start(forger).run(forger, 10, "n1", "0")
    forger.wrote(CLAIM="999/uid-forger", GPUS="0-7")
    story.slurm(make_claim_job(11, other, "n1", "1-2"))
    story.forget().again(forger, other)
    assert none(story.pass_time(5), act.End)
    assert story.entry(forger).gpus.indices == (0,)
