"""A gang's claim that is found running after a kill: nobody's before the agents have spoken."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core import spare
from slurmbridge.pool import keys
from slurmbridge.pool.claim import ClaimId, group_uid, write_comment
from slurmbridge.pool.group import Group
from slurmbridge.pool.noderecord import NodePod, NodeReport
from slurmbridge.pool.share import NodeGroup, Side
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

NODES = ("n1", "n2", "n3", "n4")
UID = group_uid("own/default/g/")
EIGHT = tuple(range(8))
OLD = {"n3": (("uid-g0", EIGHT),), "n4": (("uid-g1", EIGHT),)}
"""Processes of the two members that lived in the claim."""


class GangStory(Story):
    """A gang's claim, job 70, runs on n3 and n4; n1 and n2 are native. Agents are needed."""

    def __init__(self, *, agents=True, free=(), **how):
        settings = make_settings(agents_required=agents, **how)
        super().__init__(*NODES, settings=settings)
        self._sequence = 0
        self.slurm(claim(70, "n3", "n4"))
        for name in {"n1", "n2"} - set(free):
            self.slurm(make_job(900 + int(name[1:])).on(name, "0-7"))

    def hear(self, node, *pods, after=None):
        """An agent sees these pods (UID, GPUs), in a look that began now."""
        self._sequence += 1
        seen = tuple(NodePod(uid, "default/x", gpus=gpus, processes=1) for uid, gpus in pods)
        moment = self.machine.state.moment if after is None else after
        report = NodeReport(node, registered=True, is_whole=True, pods=seen)
        return self.handle(ev.AgentReported(node, "r1", self._sequence, 0.0, moment, report))

    def go_on(self, seconds, on=None, silent=()):
        """Readings, ticks, and what the agents see meanwhile."""
        found = []
        for _ in range(int(seconds)):
            self.now += 1
            for name in set(NODES) - set(silent):
                found += self.hear(name, *(on or {}).get(name, ()))
            found += self.poll() + self.tick()
        return found


def claim(job_id, *nodes):
    job = make_job(job_id).but(
        name=f"slurmbridge-{CLUSTER}",
        comment=write_comment(ClaimId(CLUSTER, UID, "group"), "default/g"),
        user_id=OWNER,
    )
    for name in nodes:
        job.on(name, "0-7")
    return job


def member(i, uid=""):
    made = Group("own", "default", "g", size=2, rank=(i,))
    pod = make_pod(f"g{i}").gpus(8).but(gates=(keys.GATE,), group=made)
    return pod.but(uid=uid or f"uid-g{i}")


def bound(i, node, job_id=70):
    return member(i).but(gates=()).on(node, job_id, "0-7")


def lifted(actions):
    return {a.uid: a.kube_node for a in actions if isinstance(a, act.Lift)}


def test_a_gang_made_again_gets_nothing_of_it_while_processes_of_the_last_one_are_seen():
    story = GangStory().start(member(0, "new0"), member(1, "new1"))
    assert none(story.actions + story.go_on(20, OLD), act.Lift, act.End, act.AllocateGroup)
    assert none(story.go_on(5, {"n4": OLD["n4"]}), act.Lift, act.End)
    assert set(lifted(story.go_on(2))) == {"new0", "new1"}
    assert none(story.actions, act.End, act.AllocateGroup, act.QueueGroup)


def test_it_waits_for_agents_that_say_nothing_and_tells_so():
    story = GangStory().start(member(0, "new0"), member(1, "new1"))
    assert none(story.go_on(20, silent=("n4",)), act.Lift, act.End)
    told = {a.annotations[keys.REASON] for a in story.of(act.AnnotatePod)}
    assert told == {"slurm: something may be left in its claim, job 70, on n4"}


def test_a_look_that_began_before_the_claim_was_found_does_not_count():
    story = GangStory().start(member(0, "new0"), member(1, "new1"))
    for name in ("n3", "n4"):
        story.hear(name, after=1)
    assert none(story.poll() + story.tick(), act.Lift)
    assert set(lifted(story.go_on(1))) == {"new0", "new1"}


def test_after_a_while_the_gang_goes_elsewhere_and_the_claim_ends_when_nothing_is_left_in_it():
    story = GangStory(free=("n1", "n2")).start(member(0, "new0"), member(1, "new1"))
    assert none(story.go_on(29, OLD), act.Allocate, act.AllocateGroup)
    asked = [a for a in story.go_on(4, OLD) if isinstance(a, act.Allocate)]
    assert {a.request.slurm_node for a in asked} == {"n1", "n2"}
    for a in asked:
        node = a.request.slurm_node
        story.grant(member(0, a.uid), int(node[1:]), node, "0-7")
    assert none(story.go_on(60, OLD), act.End)
    end = only(story.go_on(3), act.End)
    assert (end.job_id, end.claim_id.uid) == (70, UID)


@pytest.mark.parametrize("agents", [True, False])
def test_one_that_replaces_a_member_gets_the_share_when_nothing_is_left_in_it(agents):
    story = GangStory(agents=agents).start(bound(0, "n3"), member(1, "new1"))
    alive = {"n3": OLD["n3"]}
    if agents:
        # The first member's own processes are of no matter, those of the second one are.
        assert none(story.actions + story.go_on(25, OLD), act.Lift)
        assert lifted(story.go_on(2, alive)) == {"new1": "n4"}
    else:
        assert none(story.actions + story.go_on(25), act.Lift)
        assert lifted(story.go_on(10)) == {"new1": "n4"}


@pytest.mark.parametrize("agents", [True, False])
def test_a_gang_that_was_let_go_in_part_keeps_its_claim_though_there_is_room_elsewhere(agents):
    lost = member(0).but(gates=()).wrote(SHARE="70/n3/0-7")
    story = GangStory(agents=agents, free=("n1", "n2")).start(lost, member(1))
    found = story.actions + story.go_on(2 if agents else 32)
    assert none(found, act.Allocate, act.AllocateGroup, act.QueueGroup, act.End)
    assert lifted(found)["uid-g1"] == "n4"


def test_one_that_waits_too_long_for_its_share_goes_elsewhere():
    story = GangStory(free=("n1",)).start(bound(0, "n3"), member(1, "new1"))
    assert none(story.actions + story.go_on(29, OLD), act.Allocate)
    assert only(story.go_on(4, OLD), act.Allocate).request.slurm_node == "n1"


def test_a_share_on_a_node_that_is_clear_is_given_while_another_node_is_not():
    story = GangStory().start(member(0, "new0"), bound(1, "n4"))
    # Something stands on n4 besides its member: of no matter for n3.
    strange = {"n4": (*OLD["n4"], ("other", (3,)))}
    assert lifted(story.go_on(3, strange)) == {"new0": "n3"}


def test_it_is_not_ended_with_its_last_member_while_an_unknown_one_may_be_left():
    story = GangStory().start(bound(0, "n3"))
    story.go_on(3, OLD)
    assert story.phase(bound(0, "n3")) == "bound"
    story.forget().see(bound(0, "n3").over())
    assert none(story.actions + story.go_on(90, {"n4": OLD["n4"]}), act.End)
    told = only(story.actions, act.Tell)
    assert (told.reason, told.name) == ("ClaimKept", "n4")
    assert only(story.go_on(3), act.End).job_id == 70


def test_it_is_not_ended_since_its_gang_does_not_live_in_it_while_one_may_be_left():
    story = GangStory().start(member(0, "new0"))
    assert none(story.go_on(120, OLD), act.End)
    # Only then it is kept for the gang, for a while.
    assert none(story.go_on(20), act.End)
    assert {a.job_id for a in story.go_on(20) if isinstance(a, act.End)} == {70}


def test_what_its_gang_cannot_use_is_not_ended_while_one_may_be_left():
    group = NodeGroup(name="g", nodes="n[1-4]", kubernetes=Side(ceiling=8))
    story = GangStory(groups=(group,)).start(member(0, "new0"), member(1, "new1"))
    assert none(story.actions + story.go_on(20, OLD), act.End, act.Lift)
    story.kube_nodes["n4"].not_ready()
    story.handle(ev.NodeChanged(plain(story.kube_nodes["n4"])))
    assert only(story.go_on(3), act.End).job_id == 70


def test_one_whose_gpus_slurm_does_not_tell_ends_when_nothing_unknown_is_left_on_its_node():
    """Seen of a slurmctld that had just started: `GRES=gpu:0(IDX:)` for good, the node unknown."""
    other = make_pod("other").gpus(1).on("n3", 80, "7")
    story = GangStory().slurm(claim(70).on_unknown("n3"), make_claim_job(80, other, "n3", "7"))
    story.start(other)
    own = ("uid-other", (7,))
    assert story.phase(other) == "bound"
    assert none(story.go_on(60, {"n3": (("uid-g0", (0,)), own)}), act.End)
    told = only(story.actions, act.Tell)
    assert (told.reason, told.name) == ("ClaimKept", "n3")
    assert only(story.go_on(2, {"n3": (own,)}), act.End).job_id == 70


def test_one_whose_gpus_slurm_does_not_tell_is_not_kept_for_ever_for_a_gang_that_is_not_complete():
    story = GangStory().slurm(claim(70).on_unknown("n3")).start(member(0, "new0"))
    assert none(story.go_on(25, silent=("n3",)), act.End)
    assert {a.job_id for a in story.go_on(40) if isinstance(a, act.End)} == {70}


def test_of_two_that_are_found_the_other_one_waits_for_the_agents_too():
    story = GangStory().slurm(claim(71, "n1"), without=(901,)).start(bound(0, "n3"))
    left = {**OLD, "n1": (("uid-g1", EIGHT),)}
    assert none(story.actions + story.go_on(60, left), act.End)
    assert only(story.go_on(3, OLD), act.End).job_id == 71


def two_claims(*pods, agents=True):
    """As GangStory, with a second claim of the gang, job 71, on n1 and n2; 70 is an older try."""
    story = GangStory(agents=agents, free=("n1", "n2")).slurm(claim(71, "n1", "n2"))
    return story.start(*pods)


@pytest.mark.parametrize("agents", [True, False])
def test_of_two_that_are_found_it_is_the_one_that_its_members_were_bound_with(agents):
    """Slurm did not tell the GPUs of the first, it was given up, and the bridge has died since."""
    story = two_claims(bound(0, "n1", 71), bound(1, "n2", 71), agents=agents)
    assert [story.phase(bound(i, "n1")) for i in (0, 1)] == ["bound", "bound"]
    alive = {"n1": (("uid-g0", EIGHT),), "n2": (("uid-g1", EIGHT),)}
    assert {a.job_id for a in story.go_on(120, alive) if isinstance(a, act.End)} == {70}
    assert none(story.actions, act.Cover, act.Evict)


def test_of_two_that_are_found_it_is_the_one_that_its_members_were_let_go_with():
    lost = [member(i).but(gates=()).wrote(SHARE=f"71/n{i + 1}/0-7") for i in (0, 1)]
    story = two_claims(*lost)
    assert {uid: e.job_id for uid, e in story.machine.state.book.items()} == {
        "uid-g0": 71,
        "uid-g1": 71,
    }
    assert {a.job_id for a in story.go_on(5) if isinstance(a, act.End)} == {70}


def test_members_that_were_bound_with_either_of_two_live_on_in_both():
    story = two_claims(bound(0, "n3", 70), bound(1, "n2", 71))
    alive = {"n3": (("uid-g0", EIGHT),), "n2": (("uid-g1", EIGHT),)}
    found = story.actions + story.go_on(120, alive)
    assert {uid: e.job_id for uid, e in story.machine.state.book.items()} == {
        "uid-g0": 70,
        "uid-g1": 71,
    }
    assert none(found, act.End, act.Cover, act.Evict)


def test_a_place_that_was_found_waiting_is_given_out_at_once_when_it_starts():
    story = GangStory()
    story.slurm(claim(70).state("PENDING"))
    story.start(member(0), member(1))
    story.go_on(3)
    story.slurm(claim(70, "n3", "n4"))
    story.handle(ev.JobLooked(UID, 70, plain(story.jobs[70])))
    assert set(lifted(story.actions)) == {"uid-g0", "uid-g1"}


@pytest.mark.parametrize("size", [16, 64])
def test_after_a_kill_it_is_asked_of_each_pod_once_what_it_says_however_many_there_are(
    size, monkeypatch
):
    asked = []
    read = spare.written_claim
    monkeypatch.setattr(spare, "written_claim", lambda pod: asked.append(pod.uid) or read(pod))
    names = [f"n{i}" for i in range(size // 8)]
    pods = [
        make_pod(f"g{i}").but(group=Group("own", "default", "g", size=size, rank=(i,)))
        for i in range(size)
    ]
    for i, pod in enumerate(pods):
        pod.on(names[i // 8], 70, str(i % 8))
    story = Story(*names).slurm(claim(70, *names)).start(*pods)
    assert {story.phase(pod) for pod in pods} == {"bound"}
    assert len(asked) == size
