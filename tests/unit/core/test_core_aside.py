"""The core fails over one object: that one is set aside, and everything else goes on."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import agents, aside, explain
from slurmbridge.core import event as ev
from slurmbridge.core import state as core_state
from slurmbridge.core.machine import Machine
from slurmbridge.pool import keys
from slurmbridge.pool.claim import ClaimId, group_uid, write_comment
from slurmbridge.pool.group import Group
from slurmbridge.pool.noderecord import NodeReport
from tests.support.builders import (
    CLUSTER,
    OWNER,
    Story,
    make_claim_job,
    make_job,
    make_pod,
    make_settings,
    none,
    only,
    plain,
)
from tests.support.core_world import Poison


def poisoned(pod):
    """A pod over whose annotations the core fails."""
    return pod.but(annotations=Poison(plain(pod).annotations))


class FaultyStory(Story):
    """As `Story`; after a fault with one object the machine begins anew without it."""

    def __init__(self, *nodes, **how):
        super().__init__(*nodes, **how)
        self.here = {}
        self.faults = 0

    def handle(self, event, at=None):
        if isinstance(event, ev.PodsListed):
            self.here = {p.uid: p for p in event.pods}
        elif isinstance(event, ev.PodChanged):
            self.here[event.pod.uid] = event.pod
        elif isinstance(event, ev.PodGone):
            self.here.pop(event.pod.uid, None)
        try:
            return super().handle(event, at)
        except (ZeroDivisionError, LookupError) as error:
            found = self.machine.blame(error)
            if found is None:
                raise
        self.faults += 1
        moment = self.machine.state.moment
        self.machine = Machine(self.settings, "t", moment, (*self.machine.aside, found))
        before = len(self.actions)
        self.start(*self.here.values())
        return self.actions[before:]

    @property
    def aside(self):
        return [(a.kind, a.key) for a in self.machine.aside]


@pytest.fixture
def pod():
    return make_pod("a").gpus(2)


@pytest.fixture
def story(pod):
    """A pod with a claim of two GPUs on n1, over which the core fails from now on."""
    story = FaultyStory("n1", "n2").start(pod)
    story.run(pod, 10, "n1", "0-1").forget()
    story.see(poisoned(pod))
    story.pass_time(12)
    assert story.aside == [("pod", "uid-a")]
    return story


def test_the_others_are_served_while_one_is_set_aside(story):
    other = make_pod("b").gpus(6)
    story.see(other)
    assert only(story.ask(other, "n1"), act.Allocate)
    story.grant(other, 11, "n1", "2-7")
    assert story.phase(other) == "held"
    assert story.faults == 1


def test_the_claim_of_a_pod_that_is_set_aside_is_kept_and_renewed(story, pod):
    story.slurm(make_claim_job(10, pod, "n1", "0-1").but(end=story.now + 600))
    assert {a.job_id for a in story.pass_time(60) if isinstance(a, act.Extend)} == {10}
    assert none(story.pass_time(400), act.End, act.Evict)
    assert story.free("n1") == 6


def test_while_it_has_no_claim_nothing_is_offered_beside_it(story):
    story.slurm(without=(10,))
    story.pass_time(2)
    assert story.free("n1") == 0
    assert story.free("n2") == 8
    assert none(story.actions, act.Cover, act.Evict)


def test_no_gang_waits_in_slurms_queue_for_its_node_while_it_has_no_claim(story):
    story.slurm(make_job(900).on("n2", "0-7"), without=(10,))
    story.pass_time(2)
    for rank in range(2):
        group = Group("own", "default", "g", size=2, rank=(rank,))
        story.see(make_pod(f"g{rank}").gpus(4).but(gates=(keys.GATE,), group=group))
    story.pass_time(4)
    assert only(story.of(act.QueueGroup), act.QueueGroup).request.exclude == "n1"


def test_it_is_told_once_and_shown(story):
    told = [t for t in story.of(act.Tell) if t.reason == "SetAside"]
    assert len(told) == 1
    assert (told[0].name, told[0].warning) == ("a", True)
    assert "poisoned" in told[0].message
    status = explain.status(story.machine.state)
    assert [(a["kind"], a["ref"]) for a in status["setAside"]] == [("pod", "default/a")]
    assert status["claims"]["aside"] == 1
    assert "set aside" in explain.explain(story.machine.state, "default", "a")["waits"]["text"]


def test_whoever_asks_for_it_is_sent_away_and_asks_again(story, pod):
    assert only(story.ask(pod, "n1"), act.Reply).unavailable


def test_once_it_is_gone_its_claim_ends_as_any_other_and_it_is_no_longer_set_aside(story, pod):
    story.gone(poisoned(pod.on("n1", 10, "0-1")))
    assert story.aside == []
    assert none(story.pass_time(25), act.End)
    assert {e.job_id for e in story.pass_time(20) if isinstance(e, act.End)} == {10}


def test_what_vanishes_unseen_keeps_its_claim_as_long_as_any_other(story):
    story.handle(ev.PodsListed(()))
    assert story.aside == []
    assert none(story.pass_time(25), act.End)


def test_a_pod_that_was_not_bound_yet_may_be_bound_with_the_claim_that_it_was_promised(pod):
    story = FaultyStory("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.again(poisoned(pod))
    story.pass_time(300)
    assert story.faults == 1
    assert none(story.actions, act.End)
    story.see(poisoned(pod.on("n1", 10, "0-1")))
    story.pass_time(2)
    assert story.free("n1") == 6


def test_a_gang_is_set_aside_as_a_whole_with_the_claim_that_it_shares():
    group = Group("own", "default", "g", size=2)
    pods = [make_pod(f"g{i}").gpus(2).but(group=group) for i in range(2)]
    uid = group_uid(group.key)
    job = make_job(10).but(
        name=ClaimId(CLUSTER, uid, "group").job_name,
        comment=write_comment(ClaimId(CLUSTER, uid, "group"), "default/g"),
        user_id=OWNER,
    )
    bound = [pod.on("n1", 10, f"{2 * i}-{2 * i + 1}") for i, pod in enumerate(pods)]
    story = FaultyStory("n1", settings=make_settings(gangs_as_one=True))
    story.slurm(job.on("n1", "0-3")).start(bound[0], poisoned(bound[1]))
    story.pass_time(300)
    assert story.aside == [("gang", uid)]
    assert none(story.actions, act.End, act.Evict)
    assert story.free("n1") == 4
    story.gone(bound[0])
    story.pass_time(300)
    assert none(story.actions, act.End), "one of them is still there"
    story.gone(bound[1])
    assert story.aside == []
    assert {e.job_id for e in story.pass_time(60) if isinstance(e, act.End)} == {10}


def test_members_that_replace_all_others_unseen_are_of_the_same_gang():
    group = Group("own", "default", "g", size=2)
    first, second = (
        [make_pod(f"{name}{i}").but(group=group) for i in range(2)] for name in ("old", "new")
    )
    story = FaultyStory("n1").start(poisoned(first[0].on("n1")), first[1])
    assert [kind for kind, _ in story.aside] == ["gang"]
    story.handle(ev.PodsListed(tuple(plain(pod) for pod in second)))
    assert [kind for kind, _ in story.aside] == ["gang"]
    for pod in second:
        story.gone(pod)
    story.pass_time(60)
    assert story.aside == []
    assert not story.machine.state.book


def test_what_fails_again_when_the_pod_is_gone_keeps_its_claim_until_a_person_looks(
    story, pod, monkeypatch
):
    monkeypatch.setattr("slurmbridge.core.sweep.live_claims", lambda state, uid: {}[uid])
    story.gone(poisoned(pod))
    assert story.aside == []
    story.pass_time(300)
    assert story.aside == [("pod", "uid-a")]
    assert none(story.actions, act.End)
    assert story.faults == 2
    assert story.free("n1") == 6


def test_a_native_job_that_the_core_fails_over_holds_all_of_its_node(monkeypatch):
    claim_of = core_state.claim_of

    def fail(job, cluster, owner):
        return {}[job.comment] if job.comment == "poison" else claim_of(job, cluster, owner)

    monkeypatch.setattr(core_state, "claim_of", fail)
    story = FaultyStory("n1", "n2")
    story.slurm(make_job(7).but(comment="poison").on("n1", "0")).start()
    assert story.aside == [("job", "7")]
    assert (story.free("n1"), story.free("n2")) == (0, 8)
    story.slurm(without=(7,))
    story.pass_time(2)
    assert story.aside == []
    assert story.free("n1") == 8


def test_a_node_whose_agents_report_the_core_fails_over_takes_no_pods(monkeypatch):
    def fail(state, event):
        return {}[event.node]

    monkeypatch.setattr(agents, "on_reported", fail)
    story = FaultyStory("n1", settings=make_settings(agents_required=True)).start()
    report = NodeReport("n1", registered=True, is_whole=True)
    for sequence in (1, 2):
        story.handle(ev.AgentReported("n1", "r", sequence, 0.0, 0, report))
    assert story.aside == [("agent", "n1")]
    assert not story.machine.view().nodes["n1"].agent


def test_a_fault_that_is_about_no_object_ends_the_term(monkeypatch):
    monkeypatch.setattr("slurmbridge.core.machine.wake.run", lambda state: {}["all"])
    with pytest.raises(LookupError):
        FaultyStory("n1").start(make_pod("a"))


def test_a_fault_that_comes_again_with_what_is_set_aside_ends_the_term(story, monkeypatch):
    monkeypatch.setattr("slurmbridge.core.holdout.asked_gpus", lambda pod: {}[pod.uid])
    story.slurm(without=(10,))
    with pytest.raises(LookupError):
        story.pass_time(2)


def test_no_more_than_a_few_objects_are_set_aside():
    pods = [poisoned(make_pod(f"p{i}").on("n1")) for i in range(aside.MOST + 1)]
    with pytest.raises(ZeroDivisionError):
        FaultyStory("n1").start(*pods)
