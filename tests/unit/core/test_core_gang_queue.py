"""Gangs in Slurm's own queue: one job for all, and each member its share of it."""

from __future__ import annotations

import msgspec
import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core.explain import breaker, explain
from slurmbridge.core.settings import Eviction
from slurmbridge.pool import keys
from slurmbridge.pool.claim import ClaimId, group_uid, write_comment
from slurmbridge.pool.group import Group
from slurmbridge.pool.noderecord import NodeGpu, NodeReport
from slurmbridge.pool.policy import IdentityRule
from slurmbridge.pool.record import Partition, Reservation
from slurmbridge.pool.share import NodeGroup, Side
from tests.support.builders import (
    CLUSTER,
    OWNER,
    T0,
    Story,
    make_claim_job,
    make_job,
    make_kube_node,
    make_pod,
    make_policy,
    make_settings,
    none,
    only,
    plain,
)

RACKS = {"n1": "r1", "n2": "r1", "n3": "r2", "n4": "r2"}
SETTINGS = {"topology_labels": ("x/rack",)}
UID = group_uid("own/default/g/")


def member(i, size=2, gpus=8, wish="", **notes):
    made = Group("own", "default", "g", size=size, rank=(i,))
    notes |= {"TOPOLOGY": wish} if wish else {}
    return make_pod(f"g{i}").gpus(gpus).but(gates=(keys.GATE,), group=made).wrote(**notes)


def natives(*nodes):
    return [make_job(900 + int(n[1:])).on(n, "0-7") for n in nodes]


def pool(*pods, busy=("n1", "n2", "n3"), **settings):
    story = Story(
        *RACKS, settings=make_settings(settings.pop("policy", None), **SETTINGS | settings)
    )
    for name, rack in RACKS.items():
        story.kube_nodes[name] = make_kube_node(name).but(labels={"x/rack": rack})
    return story.slurm(*natives(*busy)).start(*pods)


def place(job_id, **nodes):
    """The gang's job: waiting, or running on these nodes with these indices."""
    job = make_job(job_id).but(
        name=f"slurmbridge-{CLUSTER}",
        comment=write_comment(ClaimId(CLUSTER, UID, "group"), "default/g"),
        user_id=OWNER,
        reason="Resources",
        start=T0 + 600,
    )
    if not nodes:
        return job.state("PENDING")
    for name, indices in nodes.items():
        job.on(name, indices)
    return job


def queue(story, job_id=70):
    """The gang is put into Slurm's queue."""
    story.pass_time(4)
    asked = only(story.of(act.QueueGroup), act.QueueGroup)
    story.slurm(place(job_id))
    story.handle(ev.GroupQueued(UID, job_id))
    story.poll()
    return asked.request


def start(story, job_id=70, free=("n3",), **nodes):
    """Slurm starts it; the look at it tells."""
    story.slurm(place(job_id, **nodes), without=tuple(900 + int(n[1:]) for n in free))
    return story.handle(ev.JobLooked(UID, job_id, plain(story.jobs[job_id])))


def test_a_gang_that_does_not_fit_waits_as_one_job_with_all_that_its_pods_say():
    story = pool(*(member(i, DURATION="50m") for i in range(2)))
    assert none(story.actions, act.QueueGroup)
    request = queue(story)
    assert (request.members, request.ask.gpu.count, request.ask.minutes) == (2, 8, 52)
    assert request.ref == "default/g"
    assert none(story.actions, act.Allocate)
    assert none(story.pass_time(60), act.QueueGroup, act.Allocate, act.End)


def test_a_gang_without_a_duration_asks_for_the_whole_time_that_plans_are_heeded():
    story = pool(member(0), member(1))
    assert queue(story).ask.minutes == 1440


def test_it_asks_for_no_more_than_its_partition_allows():
    story = pool(member(0), member(1), policy=make_policy(partition="gpu"))
    snapshot = story.machine.state.snapshot
    partition = Partition("gpu", "UP", tuple(RACKS), max_time_min=300)
    story.machine.state.snapshot = msgspec.structs.replace(
        snapshot, partitions={"gpu": partition, "short": Partition("short", "UP", (), 10)}
    )
    story.tick(at=4)
    story.tick(at=5)
    assert only(story.of(act.QueueGroup), act.QueueGroup).request.ask.minutes == 300


def test_where_a_limit_forbids_the_long_time_it_asks_for_the_short_one():
    story = pool(member(0), member(1))
    queue(story)
    story.forget()
    held = place(70).but(reason="QOSMaxWallDurationPerJobLimit")
    story.slurm(held).handle(ev.JobLooked(UID, 70, plain(held)))
    assert only(story.of(act.End), act.End).job_id == 70
    story.slurm(without=(70,)).pass_time(3)
    assert only(story.of(act.QueueGroup), act.QueueGroup).request.ask.minutes == 60


def test_who_is_put_off_by_a_renewal_is_told():
    story = pool(member(0), member(1))
    run(story, n3="0-7", n4="0-7")
    story.slurm(place(70, n3="0-7", n4="0-7").but(end=story.now + 600))
    story.slurm(make_job(800).planned(story.now + 700, "n3", "n4")).poll()
    assert only(story.of(act.Extend), act.Extend).ends == story.now + 3600
    told = only(story.of(act.Tell), act.Tell)
    assert told.reason == "PlanDelayed"
    assert none(story.pass_time(60), act.Tell)


def test_its_pods_are_told_the_job_its_reason_and_when_it_is_to_start():
    story = pool(member(0), member(1))
    queue(story)
    story.pass_time(15)
    told = {a.uid: a.annotations[keys.REASON] for a in story.of(act.AnnotatePod)}
    text = (
        "slurm: waits in Slurm's queue as job 70 (Resources), "
        "expected to start at 2027-01-15T08:10Z"
    )
    assert told == {"uid-g0": text, "uid-g1": text}


def test_explain_names_the_job_and_why_the_gang_could_not_start_at_once():
    story = pool(member(0), member(1))
    queue(story)
    told = explain(story.machine.state, "default", "g1")["group"]
    assert told["slurmJob"] == {
        "jobId": 70,
        "state": "PENDING",
        "reason": "Resources",
        "expectedStart": "2027-01-15T08:10:00Z",
    }
    assert "lacks room for 1 pod" in told["whyNotNow"]
    start(story, n3="0-7", n4="0-7")
    told = explain(story.machine.state, "default", "g1")["group"]
    assert (told["slurmJob"], told["whyNotNow"]) == (
        {"jobId": 70, "state": "RUNNING", "members": 2},
        None,
    )
    assert (told["level"], told["domain"]) == ("rack", "r2")
    assert {row["jobId"] for row in told["members"]} == {70}


def planned_job(start):
    return make_job(800).planned(start, "n1", "n2", "n3", "n4")


def maintenance(start):
    return Reservation("upgrade", start, start + 3600, ("n1", "n2", "n3", "n4"), users=("root",))


@pytest.mark.parametrize("promise", ["plan", "reservation"])
@pytest.mark.parametrize(("duration", "at_once"), [("5m", True), ("50m", False), ("", False)])
def test_a_gang_keeps_what_slurm_has_promised_to_others(promise, duration, at_once):
    notes = {"DURATION": duration} if duration else {}
    story = Story(*RACKS, settings=make_settings(**SETTINGS))
    if promise == "plan":
        story.slurm(planned_job(T0 + 1200))
    else:
        story.reservations.append(maintenance(T0 + 1200))
    story.start(member(0, **notes), member(1, **notes)).pass_time(4)
    assert len(story.of(act.AllocateGroup)) == (1 if at_once else 0)
    # Slurm itself finds the time for the others: they wait in its queue.
    assert len(story.of(act.QueueGroup)) == (0 if at_once else 1)


def test_a_gang_in_a_reservation_goes_where_it_is_and_waits_in_the_queue_with_it():
    rule = IdentityRule(namespaces=("*",), reservations=("ours",))
    story = Story(*RACKS, settings=make_settings(make_policy(identities=(rule,)), **SETTINGS))
    story.reservations.append(Reservation("ours", T0 - 60, T0 + 36000, ("n1", "n2")))
    pods = [member(i, RESERVATION="ours") for i in range(2)]
    story.start(*pods)
    assert only(story.of(act.AllocateGroup), act.AllocateGroup).request.nodes == ("n1", "n2")
    story = Story(*RACKS, settings=make_settings(make_policy(identities=(rule,)), **SETTINGS))
    story.slurm(*natives("n1"))
    story.reservations.append(Reservation("ours", T0 - 60, T0 + 36000, ("n1", "n2")))
    assert queue(story.start(*pods)).ask.reservation == "ours"


def test_when_it_starts_each_member_has_its_share_and_all_gates_come_off():
    story = pool(*(member(i, size=4, gpus=4) for i in range(4)))
    queue(story)
    found = start(story, n4="0-7", n3="0-7")
    lifted = {a.uid: a.kube_node for a in found if isinstance(a, act.Lift)}
    assert set(lifted) == {f"uid-g{i}" for i in range(4)}
    # Neighbours by rank share a node.
    assert lifted["uid-g0"] == lifted["uid-g1"] != lifted["uid-g2"] == lifted["uid-g3"]
    shares = {(e.slurm_node, e.gpus.indices) for e in story.machine.state.book.values()}
    assert shares == {(n, i) for n in ("n3", "n4") for i in ((0, 1, 2, 3), (4, 5, 6, 7))}
    for i in range(4):
        told = story.ask(member(i, size=4, gpus=4), lifted[f"uid-g{i}"])
    replies = [a for a in told if isinstance(a, act.Reply)]
    assert [(a.job_id, a.gpus) for a in replies] == [(70, "0-3"), (70, "4-7")] * 2
    assert story.free("n3") == story.free("n4") == 0


@pytest.mark.parametrize("is_late", [False, True])
def test_a_reading_from_before_its_start_that_comes_in_after_it_takes_nothing_away(is_late):
    """Late: when its members are bound already."""
    story = pool(member(0), member(1))
    queue(story)
    began = story.now - T0
    waiting = plain(story.jobs[70])
    found = start(story, n3="0-7", n4="0-7", free=("n3",))
    assert {a.uid for a in found if isinstance(a, act.Lift)} == {"uid-g0", "uid-g1"}
    for i in range(2) if is_late else ():
        story.see(member(i).but(gates=()).on(f"n{i + 3}", 70, "0-7"))
    story.jobs[70] = waiting
    assert none(story.poll(began=began), act.End, act.Evict)
    story.slurm(place(70, n3="0-7", n4="0-7"))
    assert none(story.pass_time(60), act.End, act.Evict)


@pytest.mark.parametrize("state", ["CANCELLED", "NODE_FAIL"])
def test_a_look_that_saw_it_run_before_a_reading_saw_its_end_lets_nobody_go(state):
    story = pool(member(0), member(1))
    queue(story)
    ended = place(70, n3="0-7", n4="0-7").state(state)
    story.slurm(ended).pass_time(1)
    found = story.handle(ev.JobLooked(UID, 70, plain(place(70, n3="0-7", n4="0-7"))))
    assert none(found, act.Lift)
    story.pass_time(3)
    assert len(story.of(act.LookJob)) == 2  # the first may be the one that was answered
    story.handle(ev.JobLooked(UID, 70, plain(ended)))
    assert story.machine.queued_jobs == {}


def run(story, free=("n3",), **nodes):
    """Queued, started, bound, running; pods by name."""
    queue(story)
    found = start(story, free=free, **nodes)
    pods = {}
    for lift in [a for a in found if isinstance(a, act.Lift)]:
        entry = story.machine.state.book[lift.uid]
        indices = f"{entry.gpus.indices[0]}-{entry.gpus.indices[-1]}"
        pod = member(int(lift.name[1:]), size=len(found) // 2).but(gates=())
        pod.but(gpu=entry.request.ask.gpu, group=story.machine.state.pods[lift.uid].group)
        story.see(pod.on(lift.kube_node, 70, indices))
        pods[lift.name] = pod
    story.pass_time(3)
    assert {story.phase(p) for p in pods.values()} == {"bound"}
    story.forget()
    return pods


def test_the_claim_is_given_back_when_the_last_member_is_over():
    story = pool(member(0), member(1))
    pods = run(story, n3="0-7", n4="0-7")
    assert none(story.see(pods["g0"].over()), act.End)
    end = only(story.see(pods["g1"].over()), act.End)
    assert (end.claim_id, end.job_id) == (ClaimId(CLUSTER, UID, "group"), 70)


def test_a_member_that_is_replaced_gets_the_share_that_its_gang_still_has():
    story = pool(member(0), member(1))
    pods = run(story, n3="0-7", n4="0-7")
    node = plain(pods["g0"]).node
    story.see(pods["g0"].over("Failed"))
    fresh = member(0).but(uid="uid-new", name="g0")
    lift = only(story.see(fresh), act.Lift)
    assert (lift.uid, lift.kube_node) == ("uid-new", node)
    assert none(story.pass_time(5), act.Allocate, act.QueueGroup)


def test_a_share_that_a_member_cannot_use_is_not_given_to_it_again_for_its_own_word():
    """Its gate came off with the share written on it."""
    story = pool(member(0), member(1))
    queue(story)
    pods = []
    for lift in [a for a in start(story, n3="0-7", n4="0-7") if isinstance(a, act.Lift)]:
        pod = member(int(lift.name[1:])).wrote(SHARE=lift.annotations[keys.SHARE])
        pods.append(pod.but(gates=(), nominated=lift.kube_node))
        story.see(pod)
        story.handle(ev.Lifted(lift.uid))
    story.see(pods[0].on("n3", 70, "0-7"))
    story.pass_time(2)
    story.see(pods[1].refused())
    story.slurm(without=(901,)).forget().pass_time(10)
    assert only(story.of(act.Allocate), act.Allocate).request.slurm_node == "n1"


def test_a_second_gang_of_the_name_leaves_the_claim_of_the_first_alone():
    story = pool(member(0), member(1))
    pods = run(story, n3="0-7", n4="0-7")
    for i in range(2):
        story.see(pods[f"g{i}"].deleting())
        story.see(member(i).but(uid=f"uid-new{i}"))
    story.slurm(without=(901, 902))
    found = story.pass_time(20)
    assert none(found, act.End, act.Evict, act.QueueGroup)
    nodes = {a.uid: a.request.slurm_node for a in found if isinstance(a, act.Allocate)}
    assert set(nodes.values()) == {"n1", "n2"}


def test_one_command_renews_the_claim_for_all():
    story = pool(member(0), member(1))
    run(story, n3="0-7", n4="0-7")
    story.slurm(place(70, n3="0-7", n4="0-7").but(end=story.now + 60))
    extended = only(story.poll(), act.Extend)
    assert (extended.claim_id.kind, extended.job_id) == ("group", 70)
    story.handle(ev.Extended(UID, 70, story.now + 3600))
    ends = {e.claim.ends for e in story.machine.state.book.values()}
    assert ends == {story.now + 3600}


def test_a_preempted_claim_is_told_to_all_members_at_once_and_all_are_evicted():
    story = pool(member(0), member(1))
    run(story, n3="0-7", n4="0-7")
    story.slurm(place(70, n3="0-7", n4="0-7").but(preempted_at=story.now))
    told = story.poll()
    assert {a.uid for a in told if isinstance(a, act.Tell)} == {"uid-g0", "uid-g1"}
    assert {a.uid for a in story.of(act.Evict)} == {"uid-g0", "uid-g1"}
    assert none(story.pass_time(10), act.Tell)


@pytest.mark.parametrize("when", ["as it starts", "before it is bound"])
def test_a_claim_that_is_preempted_before_anybody_is_bound_is_given_back_and_asked_for_again(when):
    story = pool(member(0), member(1), busy=())
    taken = place(70, n1="0-7", n2="0-7")
    if when == "as it starts":
        taken.but(preempted_at=story.now)
    lifts = story.slurm(taken).handle(ev.GroupAllocated(UID, plain(taken)))
    assert none(lifts, act.Lift) is (when == "as it starts")
    story.slurm(taken.but(preempted_at=story.now)).poll()
    story.pass_time(1)
    assert {a.job_id for a in story.of(act.End)} == {70}
    story.slurm(without=(70,)).pass_time(8)
    assert len(story.of(act.AllocateGroup)) == 2
    assert none(story.actions, act.Evict)


def test_a_large_gang_that_goes_as_a_whole_does_not_open_the_breaker():
    story = pool(*(member(i, size=16, gpus=1) for i in range(16)), busy=("n1", "n2", "n3", "n4"))
    run(story, free=("n3", "n4"), n3="0-7", n4="0-7")
    ended = place(70, n3="0-7", n4="0-7").state("CANCELLED").but(gpus={})
    story.slurm(ended).pass_time(1)
    for look in story.of(act.LookJob):
        story.handle(ev.JobLooked(look.uid, 70, plain(ended)))
    story.pass_time(3)
    assert len({a.uid for a in story.of(act.Evict)}) == 16


def lives(i, indices):
    """A member that is bound with the gang's claim, job 70 on n3."""
    return member(i, gpus=4).but(gates=()).on("n3", 70, indices)


def lost(story, job_id):
    """Slurm ends a claim; who has to go."""
    story.jobs[job_id].state("CANCELLED")
    for _ in range(5):
        for look in [a for a in story.pass_time(1) if isinstance(a, act.LookJob)]:
            story.handle(ev.JobLooked(look.uid, job_id, plain(story.jobs[job_id])))
    return {a.uid for a in story.of(act.Evict)}


def test_a_pod_that_only_says_that_it_is_of_a_gang_takes_nobody_along():
    members = [lives(0, "0-3"), lives(1, "4-7")]
    other = make_pod("other").but(group=plain(members[0]).group).on("n4", 71, "0")
    story = Story(*RACKS).slurm(place(70, n3="0-7"), make_claim_job(71, other, "n4", "0"))
    story.start(*members, other).pass_time(2)
    assert lost(story, 71) == {"uid-other"}
    assert [story.phase(p) for p in members] == ["bound", "bound"]
    assert lost(story, 70) == {"uid-other", "uid-g0", "uid-g1"}


def test_members_that_change_their_group_while_they_run_stay_in_their_gangs_claim():
    members = [lives(0, "0-3"), lives(1, "4-7")]
    story = Story(*RACKS).slurm(place(70, n3="0-7").but(end=T0 + 300)).start(*members)
    assert {story.phase(p) for p in members} == {"bound"}
    for pod in members:
        pod.but(group=Group("own", "default", "h", size=2))
        story.see(pod)
    for again in (False, True):
        if again:
            story.forget().again(*members)
        story.pass_time(100)
        assert {story.phase(p) for p in members} == {"bound"}
        assert none(story.actions, act.End, act.Evict, act.Cover)
        assert {a.job_id for a in story.of(act.Extend)} == {70}
    assert lost(story, 70) == {"uid-g0", "uid-g1"}


def test_a_pod_of_another_namespace_finds_no_share_by_an_annotation_that_it_wrote():
    stranger = lives(1, "4-7").but(namespace="others", group=None)
    story = Story(*RACKS).slurm(place(70, n3="0-7")).start(lives(0, "0-3"), stranger)
    story.pass_time(2)
    assert story.entry(stranger).group == ""


def test_a_place_whose_gang_waits_no_more_is_given_back():
    """Its users have taken the gates off; another leader finds the job."""
    pods = [member(i).but(gates=()) for i in range(2)]
    story = Story(*RACKS).slurm(place(70)).start(*pods)
    story.pass_time(10)
    assert {a.job_id for a in story.of(act.End)} == {70}
    assert not story.machine.state.waiting.tickets


def test_to_explain_a_pod_changes_nothing():
    story = pool(member(0), member(1))
    queue(story)
    story.now += 30
    for i in range(2):
        story.see(member(i).deleting(story.now))
    explain(story.machine.state, "default", "g0")
    assert story.machine.state.waiting.gangs["own/default/g/"].members == {"uid-g0", "uid-g1"}
    for i in range(2):
        story.gone(member(i))
    story.pass_time(2)
    assert {a.job_id for a in story.of(act.End)} == {70}


def test_a_gang_that_is_larger_than_the_evictions_of_a_minute_goes_as_a_whole():
    members = [member(i, size=16, gpus=1) for i in range(16)]
    few = Eviction(per_minute=8, share=0.9, at_least=50)
    story = pool(*members, busy=("n1", "n2", "n3", "n4"), eviction=few)
    run(story, free=("n3", "n4"), n3="0-7", n4="0-7")
    story.slurm(place(70, n3="0-7", n4="0-7").but(preempted_at=story.now)).pass_time(3)
    assert len({a.uid for a in story.of(act.Evict)}) == 16


def test_members_with_claims_of_their_own_go_together_too():
    story = pool(member(0), member(1), busy=(), gangs_as_one=False)
    nodes = {a.uid: a.request.slurm_node for a in story.of(act.Allocate)}
    for i in range(2):
        story.grant(member(i), 7 + i, nodes[f"uid-g{i}"], "0-7")
    notes = {a.uid: a.annotations for a in story.of(act.Lift)}
    assert {n[keys.TOGETHER] for n in notes.values()} <= {"uid-g0", "uid-g1"}
    for i in range(2):
        bound = member(i, TOGETHER=notes[f"uid-g{i}"][keys.TOGETHER]).but(gates=())
        story.see(bound.on(nodes[f"uid-g{i}"], 7 + i, "0-7"))
    story.pass_time(2)
    assert story.phase(member(0)) == story.phase(member(1)) == "bound"
    story.jobs[7].but(preempted_at=story.now)
    story.poll()
    evicted = {a.uid: a.why for a in story.of(act.Evict)}
    assert set(evicted) == {"uid-g0", "uid-g1"}
    assert "its gang is ended" in evicted["uid-g1"]
    # That its own claim is well changes nothing.
    assert none(story.pass_time(3), act.AnnotatePod)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_after_a_kill_the_place_or_the_claim_is_found_by_its_comment(state):
    story = pool(member(0), member(1))
    queue(story)
    if state == "RUNNING":
        story.slurm(place(70, n3="0-7", n4="0-7"), without=(903,))
    story.forget().again(member(0), member(1))
    if state == "PENDING":
        assert none(story.actions + story.pass_time(20), act.QueueGroup, act.End, act.Allocate)
        start(story, n3="0-7", n4="0-7")
    else:
        # What was found running may have been used: without agents time has to pass.
        assert none(story.actions + story.pass_time(28), act.Lift)
        story.pass_time(5)
    assert {a.uid for a in story.of(act.Lift)} == {"uid-g0", "uid-g1"}
    assert none(story.actions + story.pass_time(5), act.End, act.Allocate, act.QueueGroup)


def test_after_a_kill_bound_members_are_found_in_their_shares():
    story = pool(member(0), member(1))
    pods = run(story, n3="0-7", n4="0-7")
    story.again(*pods.values())
    assert {story.phase(p) for p in pods.values()} == {"bound"}
    assert none(story.actions + story.pass_time(60), act.End, act.Cover, act.Evict)
    assert {e.group for e in story.machine.state.book.values()} == {UID}


def test_after_a_kill_explain_tells_of_a_running_gang_what_it_told_before():
    story = pool(member(0), member(1))
    pods = run(story, n3="0-7", n4="0-7")
    before = explain(story.machine.state, "default", "g1")["group"]
    story.again(*pods.values())
    story.machine.view()
    told = explain(story.machine.state, "default", "g1")["group"]
    assert (told["planned"], told["level"], told["domain"]) == (True, "rack", "r2")
    assert told["slurmJob"] == {"jobId": 70, "state": "RUNNING", "members": 2}
    assert [row["node"] for row in told["members"]] == ["n3", "n4"]
    assert {name for name in told if told[name] != before[name]} <= {"attempts", "whyNotLower"}
    assert story.machine.state.waiting.gangs == {}


def test_after_a_kill_explain_tells_of_members_with_claims_of_their_own():
    pods = [member(i, TOGETHER="uid-g0").but(gates=()) for i in range(2)]
    alone = make_pod("x").gpus(8).but(group=Group("own", "default", "other", size=1))
    for i, pod in enumerate([*pods, alone]):
        pod.on(f"n{i + 1}", 7 + i, "0-7")
    story = pool(*pods, alone, busy=())
    story.machine.view()
    told = explain(story.machine.state, "default", "g0")["group"]
    assert (told["planned"], told["slurmJob"], told["spread"]) == (True, None, {"node": 2})
    assert (told["level"], told["domain"], told["size"]) == ("rack", "r1", 2)
    # Bound by itself: nobody has planned it.
    assert explain(story.machine.state, "default", "x")["group"]["planned"] is False


def test_after_a_kill_a_share_that_no_pod_names_is_left_alone_for_a_while():
    story = pool(member(0), member(1))
    pods = run(story, n3="0-7", n4="0-7")
    gated = member(1).but(uid="uid-new")
    story.again(pods["g0"], gated)
    assert none(story.actions + story.pass_time(20), act.Lift)
    assert only(story.pass_time(25), act.Lift).uid == "uid-new"


def test_deleted_in_kubernetes_its_place_is_given_back():
    story = pool(member(0), member(1))
    queue(story)
    story.gone(member(0))
    assert none(story.pass_time(5), act.End)
    assert only(story.gone(member(1)), act.End).job_id == 70


def test_a_member_that_is_replaced_while_it_waits_costs_no_place():
    story = pool(member(0), member(1))
    queue(story)
    story.gone(member(0))
    story.pass_time(5)
    story.see(member(0).but(uid="uid-new"))
    assert none(story.pass_time(60), act.End, act.QueueGroup)


def test_a_claim_that_is_suspended_before_its_gang_is_whole_again_lets_nobody_go():
    story = pool(member(0), member(1))
    queue(story)
    story.gone(member(1))
    start(story, n3="0-7", n4="0-7")
    story.now += 1
    story.slurm(place(70, n3="0-7", n4="0-7").state("SUSPENDED")).poll()
    story.see(member(1).but(uid="uid-new"))
    assert none(story.pass_time(2), act.Lift, act.End)
    story.slurm(place(70, n3="0-7", n4="0-7"))
    lifted = [a.uid for a in story.pass_time(1) if isinstance(a, act.Lift)]
    assert lifted == ["uid-g0", "uid-new"]


def test_one_that_stays_away_gives_the_place_back():
    story = pool(member(0), member(1))
    queue(story)
    story.gone(member(0))
    assert {a.job_id for a in story.pass_time(30) if isinstance(a, act.End)} == {70}


def test_cancelled_in_slurm_its_pods_are_told_and_deleted_and_nothing_is_queued_again():
    story = pool(member(0), member(1))
    queue(story)
    ended = place(70).state("CANCELLED")
    story.slurm(ended).pass_time(1)
    story.handle(ev.JobLooked(UID, only(story.of(act.LookJob), act.LookJob).job_id, plain(ended)))
    story.tick()
    told = {a.uid: a.message for a in story.of(act.Tell) if a.reason == "ClaimCancelled"}
    assert set(told) == {"uid-g0", "uid-g1"}
    assert "cancelled in Slurm" in told["uid-g0"]
    assert {a.uid for a in story.of(act.Evict)} == {"uid-g0", "uid-g1"}
    assert none(story.pass_time(10), act.QueueGroup, act.Allocate)


def test_a_pod_that_goes_for_a_cancelled_place_is_told_before_it_is_gone():
    """Behind its gate it is gone at once: whoever tells it later finds nobody."""
    story = pool(member(0), member(1))
    queue(story)
    ended = place(70).state("CANCELLED")
    story.slurm(ended).pass_time(1)
    asked = only(story.of(act.LookJob), act.LookJob).job_id
    did = story.handle(ev.JobLooked(UID, asked, plain(ended))) + story.poll()
    kinds = [type(a) for a in did if isinstance(a, act.Tell | act.Evict)]
    assert kinds == [act.Tell, act.Evict] * 2


def many(count, size=2):
    """So many gangs behind their gates, in their order."""
    return [
        [
            make_pod(f"m{n:02}-{i}")
            .gpus(8)
            .but(
                gates=(keys.GATE,), group=Group("own", "default", f"m{n:02}", size=size, rank=(i,))
            )
            for i in range(size)
        ]
        for n in range(count)
    ]


def cancel(story, gangs):
    """Somebody cancels the places of all these gangs; Slurm tells so of one after the other."""
    story.pass_time(4)
    for n, gang in enumerate(gangs):
        uid = group_uid(plain(gang[0]).group.key)
        story.handle(ev.GroupQueued(uid, 100 + n))
    for n, gang in enumerate(gangs):
        uid = group_uid(plain(gang[0]).group.key)
        ended = place(100 + n).but(comment=write_comment(ClaimId(CLUSTER, uid, "group"), "d/m"))
        story.handle(ev.JobLooked(uid, 100 + n, plain(ended.state("CANCELLED"))))


def evicted(story):
    return {a.uid for a in story.of(act.Evict)}


def test_many_that_are_cancelled_are_evicted_within_the_budget_and_as_whole_gangs():
    gangs = many(8)
    budget = Eviction(per_minute=3, at_least=50)
    story = pool(*(pod for gang in gangs for pod in gang), eviction=budget)
    cancel(story, gangs)
    story.pass_time(50)
    first = {uid.rpartition("-")[0] for uid in evicted(story)}
    assert (len(evicted(story)), len(first)) == (6, 3)
    told = {a.uid for a in story.of(act.Tell) if a.reason == "ClaimCancelled"}
    assert len(told) == 16
    for pod in (pod for gang in gangs for pod in gang):
        if plain(pod).uid in evicted(story):
            story.gone(pod)
    story.pass_time(20)
    assert len(evicted(story)) == 12


@pytest.mark.parametrize("answer", ["confirm", "dismiss"])
def test_a_mass_cancel_opens_the_breaker_and_a_person_decides(answer):
    gangs = many(6)
    budget = Eviction(at_least=5)
    story = pool(*(pod for gang in gangs for pod in gang), eviction=budget)
    cancel(story, gangs)
    story.pass_time(30)
    told = breaker(story.machine.state)
    assert (evicted(story), told["open"], len(told["lost"])) == (set(), True, 12)
    story.forget().handle(ev.BreakerAnswered(confirm=answer == "confirm"))
    assert len(evicted(story)) == (12 if answer == "confirm" else 0)
    story.pass_time(3)
    assert len(story.of(act.QueueGroup)) == (0 if answer == "confirm" else 6)
    assert not breaker(story.machine.state)["open"]


def test_places_that_a_reading_does_not_show_count_for_the_breaker_until_they_are_looked_at():
    gangs = many(6)
    story = pool(*(pod for gang in gangs for pod in gang), eviction=Eviction(at_least=5))
    story.pass_time(4)
    for n, gang in enumerate(gangs):
        story.handle(ev.GroupQueued(group_uid(plain(gang[0]).group.key), 100 + n))
    story.pass_time(2)
    assert breaker(story.machine.state)["open"]
    for n, gang in enumerate(gangs):
        uid = group_uid(plain(gang[0]).group.key)
        job = place(100 + n).but(comment=write_comment(ClaimId(CLUSTER, uid, "group"), "d/m"))
        story.slurm(job).handle(ev.JobLooked(uid, 100 + n, plain(job)))
    story.pass_time(1)
    assert not breaker(story.machine.state)["open"]


@pytest.mark.parametrize(("seconds", "gone"), [(2, set()), (70, {"uid-g0", "uid-g1"})])
def test_a_late_scancel_of_an_earlier_leader_is_taken_for_nobodys_will(seconds, gone):
    """It gave the place up, and was killed while the command waited for a busy slurmctld."""
    story = pool(member(0), member(1))
    queue(story)
    story.gone(member(0))
    assert {a.job_id for a in story.pass_time(20) if isinstance(a, act.End)} == {70}
    story.again(member(0), member(1)).pass_time(seconds)
    ended = place(70).state("CANCELLED")
    story.slurm(ended).handle(ev.JobLooked(UID, 70, plain(ended)))
    story.forget().pass_time(10)
    assert evicted(story) == gone
    assert len(story.of(act.QueueGroup)) == (0 if gone else 1)


def test_a_place_under_the_id_of_one_that_slurmctld_forgot_as_it_was_given_up_is_queued_once():
    """That it is another is not told by its id: it is asked for again, and nobody is evicted."""
    story = pool(member(0), member(1), answer_s=10)
    queue(story)
    story.forget()
    story.handle(ev.JobLooked(UID, 70, plain(place(70).but(reason="PartitionTimeLimit"))))
    assert only(story.of(act.End), act.End).job_id == 70
    assert only(story.of(act.QueueGroup), act.QueueGroup)
    story.boot = story.now
    story.handle(ev.GroupQueued(UID, 70))
    story.pass_time(15)
    assert len(story.of(act.QueueGroup)) == 2
    story.slurm(place(71)).handle(ev.GroupQueued(UID, 71))
    story.pass_time(7)
    assert {a.job_id for a in story.of(act.End)} == {70}
    story.slurm(place(70).state("CANCELLED")).pass_time(5)
    assert evicted(story) == set()
    assert story.machine.queued_jobs == {71: UID}


def test_pods_that_are_made_again_after_a_cancel_are_a_new_gang():
    story = pool(member(0), member(1))
    queue(story)
    ended = place(70).state("CANCELLED")
    story.slurm(ended).handle(ev.JobLooked(UID, 70, plain(ended)))
    story.tick()
    story.gone(member(0))
    story.see(member(0).but(uid="uid-new0"))
    story.gone(member(1))
    story.see(member(1).but(uid="uid-new1"))
    story.forget().pass_time(25)
    assert evicted(story) == set()
    assert only(story.actions, act.QueueGroup).request.members == 2


def test_a_reading_from_before_a_cancel_that_comes_in_after_it_makes_it_nobodys_place_again():
    """It would be seen to be cancelled once more, and the pods that were made since would go."""
    story = pool(member(0), member(1))
    queue(story)
    story.now += 0.5
    began = story.now - T0
    story.now += 0.1
    ended = place(70).state("CANCELLED")
    story.handle(ev.JobLooked(UID, 70, plain(ended)))
    story.tick()
    story.poll(began=began)
    for i in range(2):
        story.gone(member(i))
        story.see(member(i).but(uid=f"uid-new{i}"))
    story.now += 0.5
    story.slurm(ended).forget().poll()
    story.handle(ev.JobLooked(UID, 70, plain(ended)))
    story.pass_time(25)
    assert evicted(story) == set()
    assert only(story.actions, act.QueueGroup).request.members == 2


def test_a_place_that_slurmctld_has_forgotten_is_asked_for_again():
    story = pool(member(0), member(1))
    queue(story)
    story.slurm(without=(70,)).boot = story.now
    story.forget().pass_time(3)
    assert {a.uid for a in story.of(act.LookJob)} == {UID}
    assert only(story.handle(ev.JobLooked(UID, 70, None)), act.QueueGroup).uid == UID


def test_an_answer_that_comes_too_late_is_given_back():
    story = pool(member(0), member(1))
    story.pass_time(4)
    story.gone(member(0))
    story.gone(member(1))
    assert only(story.handle(ev.GroupQueued(UID, 70)), act.End).job_id == 70


def test_an_answer_after_the_end_of_what_it_tells_of_is_none_to_what_was_asked_for_since():
    """A reading has shown the place before: one that Slurm would never start."""
    story = pool(member(0), member(1))
    story.pass_time(4.1)
    held = place(70).but(reason="QOSMaxWallDurationPerJobLimit")
    story.slurm(held).poll()
    assert only(story.of(act.End), act.End).job_id == 70
    story.handle(ev.GroupQueued(UID, 70))
    story.slurm(place(71)).handle(ev.GroupQueued(UID, 71))
    ended = place(70).state("CANCELLED")
    story.slurm(ended).handle(ev.JobLooked(UID, 70, plain(ended)))
    story.pass_time(5)
    assert {a.job_id for a in story.of(act.End)} == {70}
    assert evicted(story) == set()
    assert story.machine.queued_jobs == {71: UID}


def test_nor_is_the_grant_of_a_claim_that_was_given_back_before():
    story = pool(member(0), member(1), busy=())
    story.now += 0.1
    claim = plain(place(70, n1="0-7", n2="0-7"))
    story.slurm(place(70, n1="0-7", n2="0-7").but(preempted_at=story.now)).poll()
    assert only(story.of(act.End), act.End).job_id == 70
    story.now += 4.5
    story.tick()
    story.tick()
    assert len(asked_now(story)) == 2
    assert none(story.handle(ev.GroupAllocated(UID, claim)), act.Lift)
    lifted = [a.uid for a in granted(story, 71, n3="0-7", n4="0-7") if isinstance(a, act.Lift)]
    assert lifted == ["uid-g0", "uid-g1"]


def test_nor_is_one_whose_end_a_reading_has_shown():
    story = pool(member(0), member(1), busy=("n1", "n2"))
    story.now += 0.1
    story.slurm(place(70, n3="0-7", n4="0-7").state("NODE_FAIL")).poll()
    claim = plain(place(70, n3="0-7", n4="0-7"))
    assert none(story.handle(ev.GroupAllocated(UID, claim)), act.Lift)
    story.pass_time(6)
    assert len(asked_now(story)) == 2


def test_a_refused_place_is_told_and_asked_for_again_later():
    story = pool(member(0), member(1))
    story.pass_time(4)
    story.handle(ev.GroupRefused(UID, "qos", "Invalid qos specification"))
    story.forget()
    assert none(story.pass_time(2), act.QueueGroup)
    assert only(story.pass_time(20), act.QueueGroup).uid == UID


def test_an_unanswered_place_is_found_or_asked_for_again():
    story = pool(member(0), member(1), answer_s=10)
    story.pass_time(4)
    story.handle(ev.ActionFailed("QueueGroup", UID, 0, "timed out"))
    story.forget()
    story.slurm(place(70))
    assert none(story.pass_time(20), act.QueueGroup)
    assert story.machine.queued_jobs == {70: UID}


def granted(story, job_id=70, **nodes):
    """Slurm grants the one claim that was asked for at once."""
    job = place(job_id, **nodes)
    story.slurm(job)
    return story.handle(ev.GroupAllocated(UID, plain(job)))


def asked_now(story):
    return [a.request for a in story.of(act.AllocateGroup)]


def test_a_gang_that_fits_is_one_claim_on_the_nodes_of_its_plan():
    story = pool(*(member(i, size=4, gpus=4) for i in range(4)), busy=("n1",))
    (request,) = asked_now(story)
    assert (request.nodes, request.members, request.ask.gpu.count) == (("n3", "n4"), 4, 4)
    # Its GPUs are charged from the moment of asking.
    assert (story.free("n3"), story.free("n4"), story.free("n2")) == (0, 0, 8)
    lifted = [a for a in granted(story, n3="0-7", n4="0-7") if isinstance(a, act.Lift)]
    assert [a.kube_node for a in sorted(lifted, key=lambda a: a.uid)] == ["n3", "n3", "n4", "n4"]
    assert {a.annotations[keys.SHARE] for a in lifted} == {
        f"70/{name}/{gpus}" for name in ("n3", "n4") for gpus in ("0-3", "4-7")
    }
    assert none(story.pass_time(5), act.Allocate, act.AllocateGroup, act.End)


def test_a_refused_claim_for_all_holds_nothing_and_the_third_try_finds_the_node_that_is_bad():
    story = pool(member(0), member(1), busy=())
    for _ in range(2):
        story.handle(ev.GroupRefused(UID, "busy", "busy"))
        assert {story.free(name) for name in RACKS} == {8}
        story.pass_time(4)
    assert len(asked_now(story)) == 2
    assert len(story.of(act.Allocate)) == 2


def refuse_all(story, reason, seconds, told=None):
    """Slurm refuses whatever is asked for at once, until the gang is queued; how often it was.

    told: what was written on pods.
    """
    count = 0
    for _ in range(seconds):
        new, story.actions = story.actions, []
        for action in new:
            if isinstance(action, act.AllocateGroup):
                story.handle(ev.GroupRefused(UID, reason, "violates policy"))
            elif isinstance(action, act.Allocate):
                story.handle(ev.AllocateRefused(action.uid, reason, "violates policy"))
            elif isinstance(action, act.QueueGroup):
                story.actions = new
                return count
            elif isinstance(action, act.AnnotatePod) and told is not None:
                told.append(action)
            count += isinstance(action, (act.AllocateGroup, act.Allocate))
        story.pass_time(1)
    story.actions = new
    return count


@pytest.mark.parametrize("as_one", [True, False])
@pytest.mark.parametrize(
    ("reason", "most"), [("limit", 2), ("qos", 2), ("priority", 2), ("busy", 12)]
)
def test_what_slurm_refuses_at_once_though_there_is_room_waits_in_its_queue(reason, most, as_one):
    story = pool(member(0), member(1), busy=(), gangs_as_one=as_one)
    assert refuse_all(story, reason, 120) <= most
    assert only(story.of(act.QueueGroup), act.QueueGroup).request.members == 2


def test_one_that_may_not_wait_in_the_queue_is_told_why_slurm_refuses_it():
    story = pool(*(member(i, MODE="immediate") for i in range(2)), busy=())
    told = []
    assert 2 < refuse_all(story, "account", 90, told) < 20
    text = "slurm: Slurm refuses the claim: violates policy"
    assert {a.annotations[keys.REASON] for a in told} == {text}
    assert none(told, act.QueueGroup)


def test_two_gangs_with_room_for_one_ask_for_one_claim():
    other = [
        make_pod(f"h{i}")
        .gpus(8)
        .but(gates=(keys.GATE,), group=Group("own", "default", "h", size=2))
        for i in range(2)
    ]
    story = pool(member(0), member(1), *other, busy=("n1", "n2"))
    assert len(asked_now(story)) == 1


def test_a_claim_for_all_whose_gang_is_gone_is_given_back():
    story = pool(member(0), member(1), busy=())
    story.gone(member(0))
    story.gone(member(1))
    assert only(granted(story, n1="0-7", n2="0-7"), act.End).job_id == 70


def test_a_member_that_is_deleted_before_the_start_gives_the_claim_for_all_back():
    story = pool(member(0), member(1), busy=())
    story.gone(member(0))
    assert only(granted(story, n1="0-7", n2="0-7"), act.End).job_id == 70


def test_after_a_kill_a_claim_whose_gang_is_not_complete_any_more_is_given_back():
    story = pool(member(0), busy=()).slurm(place(70, n1="0-7", n2="0-7")).again(member(0))
    assert none(story.actions + story.pass_time(55), act.End)
    assert {a.job_id for a in story.pass_time(20) if isinstance(a, act.End)} == {70}


def test_a_claim_for_all_that_was_not_answered_is_found():
    story = pool(member(0), member(1), busy=())
    story.handle(ev.ActionFailed("AllocateGroup", UID, 0, "timed out"))
    story.slurm(place(70, n1="0-7", n2="0-7"))
    lifted = {a.uid for a in story.pass_time(3) if isinstance(a, act.Lift)}
    assert lifted == {"uid-g0", "uid-g1"}


@pytest.mark.parametrize("began", [0, 1.5])
def test_a_reading_of_a_claim_for_all_that_was_not_answered_lets_nobody_go(began):
    """Slurm may have given something else than was asked for; then its answer is that it ended."""
    story = pool(member(0), member(1), busy=())
    only(story.of(act.AllocateGroup), act.AllocateGroup)
    story.now = T0 + 2
    story.slurm(place(70, n1="0-7", n2="0-7", n3="0-7")).poll(began=began)
    story.tick()
    assert none(story.actions, act.Lift)
    story.now += 0.1
    story.slurm(place(70, n1="0-7").state("CANCELLED"))
    story.handle(ev.GroupRefused(UID, "other", "asked for 2 times 8, got 24"))
    story.tick()
    story.pass_time(3)
    assert none(story.actions, act.Lift)
    assert len(asked_now(story)) == 2
    lifted = {a.uid for a in granted(story, 71, n1="0-7", n2="0-7") if isinstance(a, act.Lift)}
    assert lifted == {"uid-g0", "uid-g1"}


def test_a_claim_for_all_whose_answer_never_comes_starts_in_the_end():
    story = pool(member(0), member(1), busy=(), answer_s=10)
    story.slurm(place(70, n1="0-7", n2="0-7"))
    assert none(story.pass_time(8), act.Lift)
    assert {a.uid for a in story.pass_time(3) if isinstance(a, act.Lift)} == {"uid-g0", "uid-g1"}
    assert none(story.actions + story.pass_time(5), act.End)


def test_a_claim_for_all_that_is_being_configured_is_not_missed_by_a_reading_from_before_it():
    story = pool(member(0), member(1), busy=())
    story.now += 0.5
    began = story.now - T0
    story.now += 0.5
    job = plain(place(70, n1="0-7", n2="0-7").state("RUNNING+CONFIGURING"))
    story.handle(ev.GroupAllocated(UID, job))
    assert none(story.poll(began=began), act.LookJob)
    story.slurm(place(70, n1="0-7", n2="0-7")).now += 0.5
    assert {a.uid for a in story.poll() if isinstance(a, act.Lift)} == {"uid-g0", "uid-g1"}


def test_what_an_earlier_leader_asked_for_and_what_this_one_did_are_one_claim_in_the_end():
    story = pool(member(0), member(1), busy=())
    story.slurm(place(70, n3="0-7", n4="0-7")).pass_time(1)
    assert only(granted(story, 71, n1="0-7", n2="0-7"), act.End).job_id == 71
    story.pass_time(1)
    lifted = {a.uid: a.kube_node for a in story.of(act.Lift)}
    assert lifted == {"uid-g0": "n3", "uid-g1": "n4"}
    assert none(story.pass_time(10), act.AllocateGroup, act.Allocate)


def test_a_members_own_claim_that_an_earlier_leader_asked_for_leaves_no_share_that_is_nobodys():
    story = pool(member(0), member(1), busy=())
    story.slurm(make_claim_job(60, member(0), "n3", "0-7")).pass_time(1)
    actions = granted(story, 70, n1="0-7", n2="0-7")
    assert only(actions, act.End).job_id == 70
    asked = only(actions, act.Allocate)
    assert (asked.uid, asked.request.slurm_node) == ("uid-g1", "n4")


def test_a_claim_that_is_had_at_once_is_not_taken_for_the_place_that_an_earlier_leader_asked_for():
    story = pool(member(0), member(1), busy=())
    story.slurm(place(60)).pass_time(1)
    lifted = {a.uid for a in granted(story, 70, n1="0-7", n2="0-7") if isinstance(a, act.Lift)}
    assert lifted == {"uid-g0", "uid-g1"}
    assert {a.job_id for a in story.pass_time(2) if isinstance(a, act.End)} == {60}


@pytest.mark.parametrize("gpus", [(8, 4), (4, 4, 4)])
def test_members_that_differ_or_stand_unevenly_on_their_nodes_have_a_claim_each(gpus):
    pods = [member(i, size=len(gpus), gpus=count) for i, count in enumerate(gpus)]
    story = pool(*pods, busy=())
    assert asked_now(story) == []
    assert len(story.of(act.Allocate)) == len(gpus)


def test_a_gang_that_is_to_be_queued_is_queued_though_there_is_room():
    story = pool(member(0, MODE="queued"), member(1, MODE="queued"), busy=())
    assert only(story.actions, act.QueueGroup).request.members == 2
    assert none(story.actions, act.Allocate)


@pytest.mark.parametrize("notes", [{}, {"SEGMENT": "1"}])
def test_one_that_cannot_be_said_in_one_job_starts_at_once_though_it_is_to_be_queued(notes):
    gpus = (8, 8) if notes else (8, 4)
    pods = [member(i, gpus=count, MODE="queued", **notes) for i, count in enumerate(gpus)]
    story = pool(*pods, busy=())
    assert len(story.of(act.Allocate)) == 2
    assert none(story.pass_time(20), act.QueueGroup)


def test_one_that_wants_now_or_nothing_is_not_queued():
    story = pool(member(0, MODE="immediate"), member(1))
    assert none(story.pass_time(20), act.QueueGroup)


def test_what_would_never_fit_is_not_queued():
    story = pool(*(member(i, size=5) for i in range(5)))
    assert none(story.pass_time(20), act.QueueGroup)


def test_a_required_level_is_one_domain_and_nodes_that_kubernetes_cannot_use_are_left_out():
    story = pool(*(member(i, wish="required:rack") for i in range(2)))
    assert queue(story).exclude == "n[1-2]"
    story = pool(*(member(i) for i in range(2)))
    story.kube_nodes["n2"] = make_kube_node("n2").not_ready()
    story.handle(ev.NodeChanged(plain(story.kube_nodes["n2"])))
    assert queue(story).exclude == "n2"


def closed_to_one(version):
    story = pool(member(0, PARTITION="kube"), member(1, PARTITION="kube"), **KUBE)
    story.kube_nodes["n2"] = make_kube_node("n2").not_ready()
    story.handle(ev.NodeChanged(plain(story.kube_nodes["n2"])))
    story.version = version
    return story


KUBE = {
    "policy": make_policy(
        identities=(IdentityRule(namespaces=("*",), partitions=("main", "kube")),)
    )
}


@pytest.mark.parametrize("version", ["23.11.10", "24.05.1", "25.05.2"])
def test_where_slurm_may_end_a_job_for_a_node_that_it_excludes_no_gang_excludes_one(version):
    story = closed_to_one(version)
    assert none(story.pass_time(20), act.QueueGroup)
    story.version = "24.11.5"
    assert queue(story).exclude == "n2"


def test_there_it_waits_in_a_partition_of_which_every_node_is_open_to_it():
    story = closed_to_one("25.05.2")
    story.partitions = [Partition("kube", "UP", ("n1", "n3", "n4"))]
    assert queue(story).exclude == ""


def test_one_that_waits_for_one_rack_goes_to_another_that_has_room_for_a_while():
    story = pool(*(member(i, wish="required:rack") for i in range(2)))
    request = queue(story)
    assert request.exclude == "n[1-2]"
    assert none(story.pass_time(20), act.End, act.AllocateGroup)
    story.forget().slurm(without=(901, 902)).pass_time(3)
    assert none(story.actions, act.End, act.AllocateGroup)
    story.pass_time(8)
    assert only(story.of(act.End), act.End).job_id == 70
    assert asked_now(story)[0].nodes == ("n1", "n2")


def test_one_that_is_to_be_queued_waits_for_its_place():
    story = pool(*(member(i, wish="required:rack", MODE="queued") for i in range(2)))
    queue(story)
    story.forget().slurm(without=(901, 902)).pass_time(20)
    assert none(story.actions, act.End, act.AllocateGroup)


def test_a_single_pod_that_is_to_be_queued_waits_as_a_job_in_a_full_pool_too():
    one = make_pod("solo").gpus(8).but(gates=(keys.GATE,)).wrote(MODE="queued", DURATION="1h")
    story = pool(one, busy=tuple(RACKS))
    asked = only(story.of(act.QueueGroup), act.QueueGroup)
    assert (asked.request.members, asked.request.ref) == (1, "default/solo")
    assert none(story.pass_time(5), act.Queue, act.Allocate)
    job = place(70).but(comment=write_comment(ClaimId(CLUSTER, asked.uid, "group"), "default/solo"))
    story.slurm(job).handle(ev.GroupQueued(asked.uid, 70))
    story.slurm(job.state("RUNNING").on("n3", "0-7"), without=(903,))
    lift = only(story.handle(ev.JobLooked(asked.uid, 70, plain(job))), act.Lift)
    assert (lift.kube_node, lift.annotations[keys.SHARE]) == ("n3", "70/n3/0-7")
    story.see(one.but(gates=(), nominated="n3").wrote(SHARE="70/n3/0-7"))
    reply = only(story.ask(one, "n3"), act.Reply)
    assert (reply.job_id, reply.gpus) == (70, "0-7")
    story.see(one.on("n3", 70, "0-7"))
    story.pass_time(2)
    # Found in its claim by the next leader, and the claim ends with the pod.
    story.forget().again(one).pass_time(3)
    assert story.phase(one) == "bound"
    assert none(story.actions, act.End, act.Cover, act.Evict)
    story.see(one.over())
    story.pass_time(60)
    assert {a.job_id for a in story.of(act.End)} == {70}


def test_nodes_of_a_group_without_room_for_kubernetes_are_left_out():
    group = NodeGroup(name="g", nodes="n[1-2]", kubernetes=Side(ceiling=8))
    story = pool(member(0), member(1), groups=(group,))
    assert queue(story).exclude == "n[1-2]"


def test_what_slurm_gives_above_a_ceiling_is_given_back():
    group = NodeGroup(name="g", nodes="n[1-4]", kubernetes=Side(ceiling=16))
    story = pool(member(0), member(1), groups=(group,))
    queue(story)
    other = make_pod("x").gpus(1).on("n2", 80, "0")
    story.slurm(make_claim_job(80, other, "n2", "0"), without=(902,))
    story.see(other)
    story.poll()
    found = start(story, n3="0-7", n4="0-7")
    assert only(found, act.End).job_id == 70
    assert none(found, act.Lift)


def test_where_each_rack_has_a_node_feature_slurm_may_choose_the_rack():
    story = Story(*RACKS, settings=make_settings(**SETTINGS))
    for name, rack in RACKS.items():
        story.kube_nodes[name] = make_kube_node(name).but(labels={"x/rack": rack})
        story.nodes[name].but(features=("a100", f"feature-{rack}"))
    story.slurm(*natives("n1", "n2", "n3"))
    request = queue(story.start(*(member(i, wish="required:rack") for i in range(2))))
    assert (request.constraint, request.exclude) == ("[feature-r1|feature-r2]", "")
    story.nodes["n3"].but(features=("a100",))
    story.slurm(without=(70,)).forget()
    other = queue(story.again(*(member(i, wish="required:rack") for i in range(2))), 71)
    assert (other.constraint, other.exclude) == ("", "n[1-2]")


def test_a_claim_of_a_gang_without_pods_is_ended_after_a_while():
    story = Story("n1", "n2").slurm(place(70, n1="0-7"), place(71)).start()
    assert {a.job_id for a in story.pass_time(20) if isinstance(a, act.End)} == {71}
    story.slurm(without=(71,))
    assert {a.job_id for a in story.pass_time(40) if isinstance(a, act.End)} == {70}


def test_when_slurmctld_forgets_a_running_gang_each_member_is_covered_for_itself():
    story = pool(member(0), member(1))
    pods = run(story, n3="0-7", n4="0-7")
    story.slurm(without=(70,)).boot = story.now
    story.pass_time(1)
    for look in story.of(act.LookJob):
        story.handle(ev.JobLooked(look.uid, 70, None))
    covers = {a.uid: (a.request.slurm_node, a.indices) for a in story.of(act.Cover)}
    assert covers == {p.uid: (p.node, tuple(range(8))) for p in map(plain, pods.values())}
    assert none(story.actions, act.Evict, act.Tell)


def test_what_a_member_says_of_its_share_must_lie_within_the_claim():
    story = pool(member(0), member(1))
    queue(story)
    start(story, n3="0-7", n4="0-7")
    entry = story.machine.state.book["uid-g0"]
    story.see(member(0).but(gates=()).on(entry.kube_node, 70, "20-27"))
    entry = story.machine.state.book["uid-g0"]
    assert (entry.phase, entry.gpus.indices) == ("bound", tuple(range(8)))


def test_a_second_gang_of_the_same_name_is_not_ended_with_the_first():
    story = pool(member(0), member(1))
    old = run(story, n3="0-7", n4="0-7")
    new = [member(i).but(uid=f"uid-new{i}") for i in range(2)]
    for i, pod in enumerate(new):
        story.see(old[f"g{i}"].deleting())
        story.see(pod)
    story.slurm(without=(901, 902))
    for n, ask in enumerate(a for a in story.pass_time(20) if isinstance(a, act.Allocate)):
        pod = next(p for p in new if plain(p).uid == ask.uid)
        story.grant(pod, 100 + n, ask.request.slurm_node, "0-7")
        story.see(pod.but(gates=()).on(ask.request.slurm_node, 100 + n, "0-7"))
    story.pass_time(3)
    assert [story.phase(p) for p in new] == ["bound", "bound"]
    ended = place(70, n3="0-7", n4="0-7").state("TIMEOUT").but(gpus={})
    story.slurm(ended).forget()
    for _ in range(6):
        story.pass_time(1)
        for look in story.of(act.LookJob):
            story.handle(ev.JobLooked(look.uid, 70, plain(ended)))
    assert not {a.uid for a in story.of(act.Evict)} & {plain(p).uid for p in new}


def test_a_claim_asked_for_at_once_that_we_end_ourselves_is_nobodys_cancel():
    story = pool(member(0), member(1), busy=("n1", "n2"))
    only(story.of(act.AllocateGroup), act.AllocateGroup)
    story.now += 0.5
    story.slurm(place(70, n3="0-7", n4="0-7").but(gpus=None))
    story.poll()
    ended = place(70, n3="0-7", n4="0-7").state("CANCELLED").but(gpus={})
    story.slurm(ended)
    story.handle(ev.GroupRefused(UID, "starting", "runs without GPUs"))
    for _ in range(8):
        story.pass_time(1)
        for look in story.of(act.LookJob):
            story.handle(ev.JobLooked(look.uid, 70, plain(ended)))
    assert none(story.actions, act.Evict)


@pytest.mark.parametrize("late_s", [0.5, 1.9, 2.5, 30.0])
def test_a_gang_asks_again_after_its_pause_however_late_the_look_comes(late_s):
    story = pool(member(0), member(1), busy=())
    story.handle(ev.GroupRefused(UID, "busy", "x"))
    (gang,) = story.machine.state.waiting.gangs.values()
    story.forget()
    story.now = gang.pause.until + late_s
    assert any(isinstance(a, act.AllocateGroup) for a in story.pass_time(10))


def test_each_member_gets_gpus_of_one_side_as_the_nodes_agent_tells_them():
    story = pool(*[member(i, gpus=4) for i in range(2)], busy=("n1", "n2", "n3", "n4"))
    gpus = tuple(NodeGpu(i, f"GPU-{i}", i, numa=i % 2) for i in range(8))
    report = NodeReport("n3", registered=True, is_whole=True, gpus=gpus)
    story.handle(ev.AgentReported("n3", "r1", 1, 0.0, story.machine.state.moment, report))
    queue(story)
    start(story, n3="0-7")
    lifted = story.of(act.Lift)
    assert [a.annotations[keys.SHARE] for a in lifted] == ["70/n3/0,2,4,6", "70/n3/1,3,5,7"]
