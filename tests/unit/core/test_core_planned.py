"""The planned way: claimed first, then let through the gate."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core import explain
from slurmbridge.pool import keys
from slurmbridge.pool.nodefit import NodeFit
from tests.support.builders import (
    T0,
    Story,
    make_claim,
    make_claim_job,
    make_job,
    make_kube_node,
    make_pod,
    make_settings,
    none,
    only,
    plain,
)


def gated(name="a", gpus=1, **fields):
    return make_pod(name).gpus(gpus).but(gates=(keys.GATE,), **fields)


def asked(actions):
    return [(a.request.ref.partition("/")[2], a.request.slurm_node) for a in actions
            if isinstance(a, act.Allocate)]  # fmt: skip


def test_a_pod_without_pool_gpus_is_let_out_of_our_gate_until_that_is_seen():
    story = Story("n1").start()
    pod = make_pod("zero").but(gpu=None, gates=(keys.GATE,))
    let_out = only(story.see(pod), act.Lift)
    assert (let_out.name, let_out.kube_node, let_out.gate, let_out.annotations) == (
        "zero", "", keys.GATE, {},
    )  # fmt: skip
    story.handle(ev.ActionFailed("Lift", "uid-zero", 0, "no answer"))
    assert none(story.see(pod), act.Lift)
    assert only(story.pass_time(30), act.Lift).name == "zero"
    story.see(pod.but(gates=("example.org/quota",)))
    assert none(story.pass_time(120), act.Lift)


@pytest.mark.parametrize("end", ["deleted", "going", "not listed"])
def test_a_pod_without_pool_gpus_that_ends_behind_the_gate_is_forgotten(end):
    story = Story("n1").start()
    pod = make_pod("zero").but(gpu=None, gates=(keys.GATE,))
    story.see(pod)
    match end:
        case "deleted":
            story.handle(ev.PodGone(plain(pod)))
        case "going":
            story.see(pod.but(deleting_since=T0))
        case "not listed":
            story.handle(ev.PodsListed(()))
    assert none(story.pass_time(60), act.Lift)


def test_a_gated_pod_is_claimed_then_nominated_and_let_through():
    story = Story("n1").start()
    pod = gated()
    assert asked(story.see(pod)) == [("a", "n1")]
    lifted = only(story.grant(pod, 7, "n1", "0"), act.Lift)
    assert (lifted.kube_node, lifted.gate) == ("n1", keys.GATE)
    assert story.machine.view().held["uid-a"].kube_node == "n1"
    story.handle(ev.Lifted("uid-a"))
    reply = only(story.ask(pod.but(gates=()), "n1"), act.Reply)
    assert (reply.job_id, reply.gpus) == (7, "0")


def test_another_gate_or_another_node_in_bind_is_heeded():
    story = Story("n1", "n2").start()
    assert none(story.see(make_pod("q").but(gates=(keys.GATE, "x/y"))), act.Allocate)
    pod = gated()
    story.see(pod)
    story.grant(pod, 7, story.entry(pod).slurm_node, "0")
    other = {"n1": "n2", "n2": "n1"}[story.entry(pod).kube_node]
    assert only(story.ask(pod, other), act.Reply).reason == "claimed_elsewhere"


def test_a_full_pool_costs_nothing_and_the_reason_is_told_once():
    pods = [gated(f"p{i}") for i in range(50)]
    story = Story("n1").slurm(make_job(1).on("n1", "0-7")).start(*pods).forget()
    story.pass_time(8)
    notes = story.of(act.AnnotatePod)
    assert len(notes) == 50
    assert {a.annotations[keys.REASON] for a in notes} == {
        "gpu_busy: slurmbridge: not enough free GPUs"
    }
    assert none(story.forget().pass_time(120), act.AnnotatePod, act.Allocate, act.LookPod)


def test_when_room_comes_as_many_are_claimed_as_fit_oldest_and_most_urgent_first():
    pods = [gated("young", created=T0 - 1), gated("old", created=T0 - 9)]
    pods += [gated("urgent", priority=5)]
    story = Story("n1").slurm(make_job(1).on("n1", "0-7")).start(*pods)
    story.slurm(make_job(1).on("n1", "0-5")).poll()
    assert story.machine.view_is_due
    assert [name for name, _ in asked(story.tick())] == ["urgent", "old"]


def test_so_many_are_under_way_at_a_time_and_the_next_follow():
    story = Story("n1", settings=make_settings(planned_at_once=2)).start()
    pods = [gated(f"p{i}") for i in range(3)]
    assert sum(len(asked(story.see(p))) for p in pods) == 2
    assert asked(story.grant(pods[0], 7, "n1", "0")) == [], "its gate is on still"
    assert asked(story.handle(ev.Lifted("uid-p0"))) == [("p2", "n1")]


def test_a_gate_that_does_not_come_off_keeps_nobody_else_waiting():
    story = Story("n1", settings=make_settings(planned_at_once=1)).start()
    pods = [gated(f"p{i}") for i in range(2)]
    for pod in pods:
        story.see(pod)
    story.grant(pods[0], 7, "n1", "0")
    failed = story.handle(ev.ActionFailed("Lift", "uid-p0", 0, "no answer"))
    assert asked(failed) == [("p1", "n1")]


def test_refused_by_slurm_the_next_node_is_tried_and_the_first_one_not_at_once():
    story = Story("n1", "n2").start()
    pod = gated()
    (first,) = asked(story.see(pod))
    (second,) = asked(story.handle(ev.AllocateRefused("uid-a", "busy", "busy")))
    assert first[1] != second[1]
    assert asked(story.handle(ev.AllocateRefused("uid-a", "busy", "busy"))) == []
    found = asked(story.pass_time(30))
    # Nobody answers here, so one allocation is under way after the pause.
    assert len(found) == 1


def test_refusals_come_less_and_less_often():
    story = Story("n1").start(gated())
    tries = 0
    for _ in range(120):
        story.now += 1
        for each in story.poll() + story.tick() + (story.actions if not tries else []):
            if isinstance(each, act.Allocate):
                tries += 1
                story.handle(ev.AllocateRefused("uid-a", "busy", "busy"))
    assert 3 <= tries <= 9


def test_a_refusal_that_another_node_does_not_cure_is_told_and_asked_again_after_a_pause_only():
    story = Story("n1", "n2").start()
    pod = gated()
    assert asked(story.see(pod)) != []
    text = "account ml, QOS four: salloc: error: Job violates accounting/QOS policy"
    assert asked(story.handle(ev.AllocateRefused("uid-a", "limit", text))) == []
    told = [a.annotations for a in story.pass_time(5) if isinstance(a, act.AnnotatePod)]
    assert told == []
    assert [name for name, _ in asked(story.actions)] == ["a", "a"]
    story.handle(ev.AllocateRefused("uid-a", "limit", text))
    told = [a.annotations for a in story.pass_time(6) if isinstance(a, act.AnnotatePod)]
    assert told == [{keys.REASON: f"slurm: Slurm refuses the claim: {text}"}]
    waits = explain.explain(story.machine.state, "default", "a")["waits"]
    assert waits == {"text": f"slurm: Slurm refuses the claim: {text}", "nodes": {}}


def test_the_refusals_of_many_that_ask_for_the_same_make_one_pause():
    story = Story("n1").start()
    pods = [gated(f"p{i}") for i in range(6)]
    assert sum(len(asked(story.see(p))) for p in pods) == 6
    for i in range(6):
        refusal = ev.AllocateRefused(f"uid-p{i}", "limit", "no")
        assert asked(story.handle(refusal)) == []
    assert len(asked(story.pass_time(5))) == 6


def test_what_kube_scheduler_cannot_use_is_given_back_and_another_node_claimed():
    story = Story("n1", "n2").start()
    pod = gated()
    story.see(pod)
    node = story.entry(pod).slurm_node
    story.grant(pod, 7, node, "0")
    story.handle(ev.Lifted("uid-a"))
    story.see(pod.but(gates=(), nominated=node))
    actions = story.see(pod.refused())
    assert only(actions, act.End).job_id == 7
    ((_, other),) = asked(actions)
    assert other != node
    lifted = only(story.grant(pod, 8, other, "0"), act.Lift)
    assert (lifted.kube_node, lifted.gate) == (other, "")
    assert keys.WAKE in lifted.annotations


def test_a_pod_that_an_extender_refused_before_it_knew_the_claim_is_woken_and_keeps_it():
    story = Story("n1", "n2").start()
    pod = gated()
    story.see(pod)
    node = story.entry(pod).slurm_node
    story.grant(pod, 7, node, "0")
    story.handle(ev.Lifted("uid-a"))
    story.see(pod.but(gates=(), nominated=node))
    assert none(story.see(pod.refused().but(claim_unseen=True)), act.End)
    woken = only(story.pass_time(3), act.Lift)
    assert (woken.kube_node, woken.gate) == (node, "")
    assert keys.WAKE in woken.annotations


def test_after_three_nodes_that_cannot_be_used_the_pod_is_left_to_the_reactive_way():
    story = Story("n1", "n2", "n3", "n4").start()
    pod = gated()
    story.see(pod)
    story.grant(pod, 7, story.entry(pod).slurm_node, "0")
    story.handle(ev.Lifted("uid-a"))
    pod = pod.but(gates=())
    story.see(pod)
    story.see(pod.refused())
    for job_id in (8, 9):
        story.grant(pod, job_id, story.entry(pod).slurm_node, "0")
        story.handle(ev.Lifted("uid-a"))
        story.pass_time(20)
    assert story.entry(pod) is None
    assert "uid-a" not in story.machine.state.waiting.lifted


@pytest.mark.parametrize("gate", [True, False], ids=["gate still on", "gate off"])
def test_after_a_kill_the_claim_is_found_and_the_pod_goes_on(gate):
    pod = gated() if gate else make_pod("a").but(nominated="n1")
    story = Story("n1").slurm(make_claim_job(7, pod, "n1", "0")).start(pod)
    if gate:
        assert only(story.of(act.Lift), act.Lift).kube_node == "n1"
    else:
        assert keys.WAKE in only(story.of(act.AnnotatePod), act.AnnotatePod).annotations
    assert story.of(act.Allocate) == []
    assert only(story.ask(pod.but(gates=()), "n1"), act.Reply).job_id == 7


def test_a_gate_that_could_not_be_taken_off_is_taken_off_later():
    story = Story("n1").start()
    pod = gated()
    story.see(pod)
    story.grant(pod, 7, "n1", "0")
    story.handle(ev.ActionFailed("Lift", "uid-a", 0, "no answer"))
    assert len([a for a in story.pass_time(4) if isinstance(a, act.Lift)]) == 1
    assert story.phase(pod) == "held"


def test_a_gated_pod_that_is_deleted_gives_its_claim_back():
    story = Story("n1").start()
    pod = gated()
    story.see(pod)
    story.grant(pod, 7, "n1", "0")
    assert only(story.gone(pod), act.End).job_id == 7


def test_an_answer_that_is_lost_is_found_in_the_next_reading():
    story = Story("n1").start()
    pod = gated()
    story.see(pod)
    story.handle(ev.AllocateUnknown("uid-a", 0, "no answer"))
    story.slurm(make_claim_job(7, pod, "n1", "0"))
    story.now += 1
    assert only(story.poll(), act.Lift).kube_node == "n1"


def test_a_cordoned_node_and_one_without_the_labels_are_left_out():
    story = Story("n1", "n2", "n3")
    story.kube_nodes["n1"] = make_kube_node("n1").but(unschedulable=True, labels={"k": "v"})
    story.kube_nodes["n2"] = make_kube_node("n2").but(labels={"k": "v"})
    story.start()
    assert asked(story.see(gated().but(fit=NodeFit((("k", "v"),))))) == [("a", "n2")]


def test_a_pod_that_can_be_served_nowhere_is_told_once():
    story = Story("n1").start()
    pod = gated().wrote(DURATION="soon")
    note = only(story.see(pod), act.AnnotatePod)
    assert "duration" in note.annotations[keys.REASON]
    assert none(story.pass_time(30), act.AnnotatePod)
    assert asked(story.see(gated().wrote(DURATION="1h"))) == [("a", "n1")]


def test_cpus_of_claims_that_no_reading_shows_yet_count():
    story = Story("n1").start()
    pods = [gated(f"p{i}").but(cpus=30) for i in range(3)]
    assert sum(len(asked(story.see(p))) for p in pods) == 2
    for i, pod in enumerate(pods[:2]):
        claim = make_claim(7 + i, pod, "n1", str(i), granted=story.now)
        assert asked(story.handle(ev.Allocated(f"uid-p{i}", claim))) == []


def test_a_pod_whose_claim_had_no_gpus_and_was_seen_in_a_reading_is_planned_again():
    """Its claim was ended by whoever made it, and a reading that began before still shows it."""
    story = Story("n1").start()
    pod = gated(gpus=2)
    assert asked(story.see(pod)) == [("a", "n1")]
    story.handle(ev.AllocateRefused("uid-a", "starting", "runs without GPUs"))
    story.slurm(make_claim_job(10, pod).on_unknown("n1")).poll()
    assert story.phase(pod) == "doubt"
    story.slurm(without=(10,)).forget()
    assert ("a", "n1") in asked(story.pass_time(30))
