"""The members of a gang are bound together: until all can be, none is, and the gang moves."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from slurmbridge.pool.nodefit import NodeFit, Taint, Toleration
from tests.support.builders import make_job, none, only
from tests.unit.core.test_core_gang import RACKS, asked, member, pool


class Gang:
    """A gang of two with a claim each, its gates off; kube-scheduler is next."""

    def __init__(self, wish="", jobs=(), **settings):
        self.pods = [member(0, wish=wish), member(1, wish=wish)]
        self.story = pool(*self.pods, jobs=jobs, **settings)
        self.next_job = 10
        self.claim(asked(self.story.actions))

    def claim(self, nodes):
        """Slurm grants all; the gates come off, or are off already."""
        story = self.story
        story.actions[:] = [a for a in story.actions if not isinstance(a, act.Lift)]
        for pod in self.pods:
            self.next_job += 1
            story.grant(pod, self.next_job, nodes[pod.obj.uid], "0-7")
            pod.job = self.next_job
        lifts = {a.uid: a.kube_node for a in story.of(act.Lift)}
        assert lifts == nodes
        for pod in self.pods:
            story.handle(ev.Lifted(pod.obj.uid))
            story.see(pod.but(gates=(), nominated=nodes[pod.obj.uid], waiting_on_us=False))
        self.nodes = [nodes[pod.obj.uid] for pod in self.pods]
        story.forget()

    def ask(self, i):
        return [a for a in self.story.ask(self.pods[i], self.nodes[i]) if isinstance(a, act.Reply)]

    def refuse(self, i):
        """kube-scheduler cannot use the node."""
        return self.story.see(self.pods[i].refused())

    def refuse_all(self):
        """It can use none of the nodes; what is asked for then."""
        self.story.forget()
        self.refuse(0)
        self.refuse(1)
        self.story.slurm(without=tuple(pod.job for pod in self.pods)).pass_time(3)
        return asked(self.story.actions)


def test_nobody_is_bound_before_all_were_asked_for_and_then_all_are_at_once():
    gang = Gang()
    assert gang.ask(0) == []
    assert [(a.op, a.reason) for a in gang.ask(1)] == [(1, ""), (2, "")]


def test_an_asker_is_sent_away_in_time_and_let_in_when_it_comes_again():
    gang = Gang()
    assert gang.ask(0) == []
    told = [a for a in gang.story.pass_time(2, step=0.5) if isinstance(a, act.Reply)]
    assert [(a.op, a.reason, a.unavailable) for a in told] == [(1, "no_plan", False)]
    # kube-scheduler has shown that it can use the first one's node: it need not show it again.
    assert [(a.op, a.reason) for a in gang.ask(1)] == [(2, "")]
    assert [(a.op, a.reason) for a in gang.ask(0)] == [(3, "")]


def test_a_gang_whose_node_cannot_be_used_moves_as_a_whole():
    gang = Gang(wish="required:rack")
    (rack,) = {RACKS[node] for node in gang.nodes}
    assert gang.ask(0) == []
    ended = {a.job_id for a in gang.refuse(1) if isinstance(a, act.End)}
    assert ended == {11, 12}
    assert only(gang.story.of(act.Reply), act.Reply).reason == "no_plan"
    gang.story.slurm(without=(11, 12)).pass_time(2)
    found = asked(gang.story.actions)
    assert {RACKS[node] for node in found.values()} == {"r1", "r2"} - {rack}
    # Woken, with nominations of the new nodes, though their gates are off.
    gang.claim(found)
    assert gang.ask(1) == []
    assert [a.reason for a in gang.ask(0)] == ["", ""]


def stuck():
    """Neither member can use any of the two nodes that the gang may have."""
    gang = Gang(wish="required:rack", jobs=(make_job(3).on("n3", "0-7"),))
    first = gang.nodes
    gang.claim(gang.refuse_all())
    assert gang.nodes == first[::-1]
    return gang


def test_each_member_tries_the_others_node_before_all_give_up_and_hold_nothing():
    gang = stuck()
    assert gang.refuse_all() == {}
    assert {a.job_id for a in gang.story.of(act.End)} == {13, 14}
    gang.story.pass_time(30)
    told = {a.uid: a.annotations.get(keys.REASON) for a in gang.story.of(act.AnnotatePod)}
    assert set(told) == {"uid-g0", "uid-g1"}
    assert "Slurm's queue" in told["uid-g0"]  # for the other rack, when that is free
    assert asked(gang.story.actions) == {}


def test_nodes_that_could_not_be_used_are_tried_again_after_a_while():
    gang = stuck()
    gang.refuse_all()
    assert asked(gang.story.pass_time(100)) == {}
    assert set(asked(gang.story.pass_time(40)).values()) == {"n1", "n2"}


def test_where_there_is_another_place_nobody_tries_what_one_could_not_use():
    gang = Gang()
    first = set(gang.nodes)
    assert not first & set(gang.refuse_all().values())


def test_once_a_member_may_be_bound_only_the_other_one_moves():
    gang = Gang()
    gang.ask(0)
    gang.ask(1)
    gang.story.see(gang.pods[0].on(gang.nodes[0], 11, "0-7"))
    # Its Binding was refused, and now its node cannot be used any more.
    gang.story.handle(ev.UnboundReleased("uid-g1", 12))
    assert {a.job_id for a in gang.refuse(1) if isinstance(a, act.End)} == {12}


def test_a_member_that_is_deleted_after_the_gates_are_off_takes_the_claims_with_it():
    gang = Gang()
    gang.ask(0)
    gang.story.gone(gang.pods[1])
    gang.story.pass_time(2)
    assert {a.job_id for a in gang.story.of(act.End)} == {11, 12}


def behind(gates):
    pods = [member(0), member(1)]
    pods[1].but(gates=gates)
    return pods


def test_a_member_behind_a_gate_of_others_keeps_the_gang_back():
    pods = behind((keys.GATE, "x/quota"))
    story = pool(*pods)
    story.pass_time(12)
    assert asked(story.actions) == {}
    told = {a.annotations[keys.REASON] for a in story.of(act.AnnotatePod)}
    assert told == {"group: g1 is behind the gate x/quota"}
    assert set(asked(story.see(pods[1].but(gates=(keys.GATE,))))) == {"uid-g0", "uid-g1"}


@pytest.mark.parametrize("early", [True, False])
def test_a_member_without_our_gate_is_claimed_and_woken_with_the_others(early):
    pods = behind(("x/quota",) if early else ())
    story = pool(*pods)
    if early:
        assert asked(story.actions) == {}
        story.see(pods[1].but(gates=()))
    nodes = asked(story.actions)
    assert set(nodes) == {"uid-g0", "uid-g1"}
    # It does not get in by the reactive way meanwhile.
    assert only(story.ask(pods[1], "n4"), act.Reply).reason in ("no_plan", "claimed_elsewhere")
    assert none(story.grant(pods[1], 8, nodes["uid-g1"], "0-7"), act.Lift)
    lifted = [a for a in story.grant(pods[0], 7, nodes["uid-g0"], "0-7") if isinstance(a, act.Lift)]
    assert {a.uid: a.gate for a in lifted} == {"uid-g0": keys.GATE, "uid-g1": ""}
    assert keys.WAKE in next(a.annotations for a in lifted if a.uid == "uid-g1")


def test_without_room_for_all_a_member_without_our_gate_does_not_start_it_in_part():
    pods = behind(())
    story = pool(*pods, jobs=tuple(make_job(i).on(f"n{i}", "0-7") for i in (1, 2, 3)))
    story.pass_time(12)
    assert asked(story.actions) == {}
    assert only(story.ask(pods[1], "n4"), act.Reply).reason == "no_plan"


def test_after_a_kill_a_gang_whose_gates_are_all_off_is_bound_together_too():
    gang = Gang()
    story = gang.story.again(*gang.pods)
    for pod in gang.pods:
        story.machine.state.book[pod.obj.uid].promised = 0
    story.forget()
    assert gang.ask(0) == []
    assert len(gang.ask(1)) == 2


def test_what_a_pod_does_not_tolerate_is_heeded_from_the_start_and_when_it_comes():
    pods = [member(0, wish="required:rack"), member(1, wish="required:rack")]
    story = pool(*pods[:1])
    taint = (Taint("x/broken", "", "NoSchedule"),)
    for name in ("n1", "n3"):
        story.handle(ev.NodeChanged(story.kube_nodes[name].but(taints=taint).obj))
    assert asked(story.see(pods[1])) == {}
    bears = NodeFit(tolerations=(Toleration("x/broken", "Exists"),))
    found = asked(story.see(pods[0].but(fit=bears)))
    assert (found["uid-g0"] in ("n1", "n3"), found["uid-g1"] in ("n2", "n4")) == (True, True)
