"""Gangs in the pure core: all or none."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from slurmbridge.pool.group import Group, GroupObject, SizeFrom
from tests.support.builders import (
    T0,
    Story,
    make_claim_job,
    make_job,
    make_kube_node,
    make_pod,
    make_settings,
    none,
    only,
    plain,
)

RACKS = {"n1": "r1", "n2": "r1", "n3": "r2", "n4": "r2"}


def member(i, size=2, gpus=8, group="g", wish="", **fields):
    made = Group("own", "default", group, size=size, rank=(i,))
    notes = {keys.TOPOLOGY: wish} | fields.pop("notes", {})
    pod = make_pod(f"{group}{i}").gpus(gpus, fields.pop("gpu_type", ""))
    return pod.but(gates=(keys.GATE,), group=made, annotations=notes, **fields)


def pool(*pods, jobs=(), **settings):
    """Each member gets a claim of its own."""
    settings = {"gangs_as_one": False} | settings
    story = Story(*RACKS, settings=make_settings(topology_labels=("x/rack",), **settings))
    for name, rack in RACKS.items():
        story.kube_nodes[name] = make_kube_node(name).but(labels={"x/rack": rack})
    return story.slurm(*jobs).start(*pods)


def asked(actions):
    return {a.uid: a.request.slurm_node for a in actions if isinstance(a, act.Allocate)}


def test_nothing_is_claimed_before_all_have_come_and_then_all_in_one_rack():
    story = pool()
    assert asked(story.see(member(0))) == {}
    found = asked(story.see(member(1)))
    assert {RACKS[n] for n in found.values()} in ({"r1"}, {"r2"})
    assert len(set(found.values())) == 2


def test_the_gates_come_off_when_the_last_claim_is_held():
    story = pool()
    story.see(member(0))
    nodes = asked(story.see(member(1)))
    assert none(story.grant(member(0), 7, nodes["uid-g0"], "0-7"), act.Lift)
    lifted = story.grant(member(1), 8, nodes["uid-g1"], "0-7")
    assert {a.uid for a in lifted if isinstance(a, act.Lift)} == {"uid-g0", "uid-g1"}


@pytest.mark.parametrize("refused_first", [True, False])
def test_one_refusal_gives_everything_back_and_a_pause_follows(refused_first):
    story = pool()
    story.see(member(0))
    nodes = asked(story.see(member(1)))
    refusal = ev.AllocateRefused("uid-g1", "busy", "busy")
    if refused_first:
        story.handle(refusal)
        actions = story.grant(member(0), 7, nodes["uid-g0"], "0-7")
    else:
        story.grant(member(0), 7, nodes["uid-g0"], "0-7")
        actions = story.handle(refusal)
    assert only(actions, act.End).job_id == 7
    assert asked(actions) == {}
    story.slurm(without=(7,))
    again = asked(story.pass_time(6))
    assert set(again) == {"uid-g0", "uid-g1"}


def test_two_gangs_for_the_room_of_one_never_hold_half_each():
    jobs = (make_job(1).on("n3", "0-7"), make_job(2).on("n4", "0-7"))
    story = pool(jobs=jobs)
    for i in range(2):
        for group in "gh":
            story.see(member(i, group=group))
    found = asked(story.actions)
    assert set(found) in ({"uid-g0", "uid-g1"}, {"uid-h0", "uid-h1"})


def test_a_required_level_that_is_short_is_named_and_a_preferred_one_climbs():
    pods = [member(i, size=3, wish="required:rack") for i in range(3)]
    story = pool(*pods)
    story.pass_time(12)
    told = [a.annotations[keys.REASON] for a in story.of(act.AnnotatePod)]
    assert "no rack holds it" in told[0]
    assert asked(story.actions) == {}
    pods = [member(i, size=3, wish="preferred:rack") for i in range(3)]
    story = pool(*pods, climb_s=20)
    assert asked(story.pass_time(15)) == {}
    assert len(asked(story.pass_time(30))) == 3


def test_after_a_kill_a_half_claimed_gang_is_completed_near_what_it_has():
    pods = [member(0), member(1)]
    job = make_claim_job(7, pods[0], "n3", "0-7")
    story = pool(*pods, jobs=(job,))
    assert asked(story.actions) == {"uid-g1": "n4"}


def test_after_a_kill_a_half_claimed_gang_without_room_gives_back_what_it_has():
    pods = [member(0), member(1)]
    jobs = [make_claim_job(7, pods[0], "n3", "0-7")]
    jobs += [make_job(i).on(n, "0-7") for i, n in ((1, "n1"), (2, "n2"), (4, "n4"))]
    story = pool(*pods, jobs=jobs)
    assert none(story.pass_time(25), act.End), "nobody knows yet what is left in it"
    assert {a.job_id for a in story.pass_time(10) if isinstance(a, act.End)} == {7}


def test_after_a_kill_a_gang_that_is_let_go_in_part_is_let_go_as_a_whole():
    bound = member(0).but(gates=()).on("n3", 7, "0-7")
    jobs = [make_claim_job(7, bound, "n3", "0-7"), make_claim_job(8, member(1), "n4", "0-7")]
    story = pool(bound, member(1), jobs=jobs)
    assert only(story.of(act.Lift), act.Lift).uid == "uid-g1"
    assert none(story.actions, act.End)


def test_a_member_that_is_deleted_before_the_start_takes_the_others_claims_with_it():
    story = pool()
    story.see(member(0, size=3))
    story.see(member(1, size=3))
    nodes = asked(story.see(member(2, size=3)))
    story.grant(member(0, size=3), 7, nodes["uid-g0"], "0-7")
    story.gone(member(2, size=3))
    story.handle(ev.AllocateRefused("uid-g2", "other", "gone"))
    story.grant(member(1, size=3), 8, nodes["uid-g1"], "0-7")
    story.pass_time(3)
    assert {a.job_id for a in story.of(act.End)} == {7, 8}


def test_a_group_that_never_completes_is_told_so_and_holds_nothing():
    story = pool(member(0, size=3), group_s=60)
    story.pass_time(90)
    told = [a.annotations[keys.REASON] for a in story.of(act.AnnotatePod)]
    assert told == [
        "group: waits for all of its 3 pods",
        "group: given up, not all of its 3 pods have come",
    ]
    assert asked(story.actions) == {}


def test_the_size_is_asked_of_the_object_and_not_counted():
    made = Group("podgroup", "default", "pg", size_from=SizeFrom(("apis/x/podgroups/pg",)))
    pods = [make_pod(f"m{i}").but(gates=(keys.GATE,), group=made) for i in range(2)]
    story = pool(*pods)
    look = story.of(act.LookGroup)[0]
    assert look.paths == ("apis/x/podgroups/pg",)
    assert asked(story.actions) == {}
    assert len(asked(story.handle(ev.GroupLooked(look.key, GroupObject(2))))) == 2


def of_object(name, uid="", **fields):
    """A member of a group whose object tells the size."""
    made = Group("podgroup", "default", "pg", size_from=SizeFrom(("apis/x/podgroups/pg",)))
    pod = make_pod(name).gpus(8).but(gates=(keys.GATE,), group=made, **fields)
    return pod.but(uid=uid) if uid else pod


def test_after_a_kill_what_a_gang_holds_stays_while_its_size_is_asked_for():
    pods = [of_object("m0"), of_object("m1")]
    jobs = [make_claim_job(7 + i, pods[i], f"n{3 + i}", "0-7") for i in range(2)]
    story = pool(*pods, jobs=jobs)
    assert none(story.pass_time(3), act.Lift, act.End, act.Allocate)
    story.machine.view()
    look = story.of(act.LookGroup)[0]
    actions = story.handle(ev.GroupLooked(look.key, GroupObject(2)))
    assert {a.uid: a.kube_node for a in actions if isinstance(a, act.Lift)} == {
        "uid-m0": "n3",
        "uid-m1": "n4",
    }
    told = only(actions, act.LogGang)
    assert (told.level, told.domain) == ("rack", "r2")
    assert set(told.seats) == {("default/m0", "n3", 7), ("default/m1", "n4", 8)}
    assert none(story.pass_time(60), act.Allocate)


def test_where_nobody_tells_its_size_it_gives_back_what_it_holds_in_the_end():
    pods = [of_object("m0"), of_object("m1")]
    story = pool(*pods, jobs=[make_claim_job(7, pods[0], "n3", "0-7")])
    assert none(story.pass_time(55), act.End)
    assert {a.job_id for a in story.pass_time(20) if isinstance(a, act.End)} == {7}


def test_sizes_that_nobody_tells_are_asked_for_a_few_at_a_time_and_less_and_less_often():
    """Anybody can name groups whose objects there are not."""
    where = SizeFrom(("apis/x/v1/namespaces/default/podgroups/g",))
    pods = [
        make_pod(f"p{i}").but(
            group=Group("podgroup", "default", f"g{i}", size_from=where), gates=(keys.GATE,)
        )
        for i in range(200)
    ]
    story = Story("n1").start(*pods)
    asked = [story.of(act.LookGroup)]
    for _ in range(300):
        asked.append([a for a in story.pass_time(1) if isinstance(a, act.LookGroup)])
        for look in asked[-1]:
            story.handle(ev.GroupLooked(look.key, None))
    assert max(map(len, asked)) <= 50
    assert {a.key for each in asked for a in each} == {plain(p).group.key for p in pods}
    assert len([a for each in asked[-60:] for a in each]) <= 2 * len(pods)


def test_a_launcher_without_gpus_counts_and_is_left_alone():
    launcher = of_object("launcher").but(gpu=None, gates=())
    story = pool(launcher, of_object("w0"))
    look = story.of(act.LookGroup)[0]
    assert asked(story.handle(ev.GroupLooked(look.key, GroupObject(3)))) == {}
    assert set(asked(story.see(of_object("w1")))) == {"uid-w0", "uid-w1"}


def test_without_its_launcher_a_gang_is_not_complete():
    launcher = of_object("launcher").but(gpu=None, gates=())
    story = pool(launcher, of_object("w0"))
    look = story.of(act.LookGroup)[0]
    story.handle(ev.GroupLooked(look.key, GroupObject(3)))
    story.gone(launcher)
    assert asked(story.see(of_object("w1"))) == {}


def test_a_second_group_whose_object_has_the_same_name_does_not_count_pods_of_the_first():
    old = of_object("old", bound_at=T0 - 100).but(gates=()).on("n1", 7, "0-7")
    story = pool(old, jobs=(make_claim_job(7, old, "n1", "0-7"),))
    story.see(of_object("new0"))
    story.pass_time(1)
    look = story.of(act.LookGroup)[-1]
    story.handle(ev.GroupLooked(look.key, GroupObject(2, T0 - 50)))
    assert asked(story.pass_time(3)) == {}
    assert set(asked(story.see(of_object("new1")))) == {"uid-new0", "uid-new1"}


def test_a_late_look_at_the_object_of_the_first_does_not_tell_the_size_of_the_second():
    story = pool(of_object("m0"))
    late = only(story.of(act.LookGroup), act.LookGroup)
    story.gone(of_object("m0"))
    story.forget().see(of_object("m0", uid="uid-new0"))
    look = only(story.of(act.LookGroup), act.LookGroup)
    assert asked(story.handle(ev.GroupLooked(late.key, GroupObject(1), late.asked))) == {}
    assert asked(story.handle(ev.GroupLooked(look.key, GroupObject(2), look.asked))) == {}
    assert set(asked(story.see(of_object("m1")))) == {"uid-new0", "uid-m1"}


def test_a_member_that_is_replaced_counts_those_that_were_bound_after_the_object_was_made():
    old = of_object("w0", bound_at=T0 - 100).but(gates=()).on("n1", 7, "0-7")
    story = pool(old, jobs=(make_claim_job(7, old, "n1", "0-7"),))
    story.see(of_object("w1"))
    story.pass_time(1)
    look = story.of(act.LookGroup)[-1]
    found = story.handle(ev.GroupLooked(look.key, GroupObject(2, T0 - 150)))
    assert asked(found) == {"uid-w1": "n2"}


def test_members_without_ranks_come_in_the_order_of_the_numbers_in_their_names():
    made = Group("own", "default", "g", size=4)
    names = ["w-10", "w-9", "w-1", "a-2"]
    pods = [make_pod(n).gpus(8).but(gates=(keys.GATE,), group=made) for n in names]
    nodes = asked(pool(*pods).actions)
    assert [nodes[f"uid-{n}"] for n in ("a-2", "w-1", "w-9", "w-10")] == ["n1", "n2", "n3", "n4"]


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_member_without_our_gate_gets_no_claim_alone_before_its_mates_are_known(is_seen):
    story = pool()
    one = member(0).but(gates=())
    if is_seen:
        story.see(one)
        told = story.ask(one, "n1")
    else:
        only(story.ask(one, "n1"), act.LookPod)
        told = story.handle(ev.PodLooked("uid-g0", plain(one)))
    assert only(told, act.Reply).reason == "no_plan"
    assert asked(told) == {}
    assert set(asked(story.see(member(1)))) == {"uid-g0", "uid-g1"}


def done(i, phase="Succeeded", owner="", rank=None):
    """A member of three that has come to its end and is there still."""
    pod = made_by(owner, i if rank is None else rank, f"g{i}", created=T0 - 60, bound_at=T0 - 30)
    return pod.but(gates=()).on(f"n{i + 1}").over(phase)


def made_by(owner, rank, name, **fields):
    group = Group("own", "default", "g", owner, size=3, rank=() if rank < 0 else (rank,))
    return make_pod(name).gpus(8).but(gates=(keys.GATE,), group=group, **fields)


@pytest.mark.parametrize("rank", [2, -1])
def test_a_member_that_lost_its_claim_before_the_start_follows_those_that_are_over_by_now(rank):
    story = pool(*(done(i, rank=min(i, rank)) for i in range(2)))
    last = made_by("", rank, "last", created=T0 - 60)
    node = asked(story.see(last))["uid-last"]
    assert only(story.grant(last, 7, node, "0-7"), act.Lift).uid == "uid-last"
    assert only(story.ask(last.but(gates=()), node), act.Reply).job_id == 7


def test_a_pod_that_replaces_one_of_a_job_follows_those_that_are_over():
    story = pool(done(0, owner="job"), done(1, owner="job"), done(2, "Failed", "job"))
    assert set(asked(story.see(made_by("job", 2, "again", created=T0 - 1)))) == {"uid-again"}


@pytest.mark.parametrize(
    ("phase", "owner", "rank"),
    [("Succeeded", "", 2), ("Failed", "job", 2), ("Succeeded", "job", 3), ("Succeeded", "job", 1)],
)
def test_what_ended_before_is_no_part_of_a_start_that_comes_later(phase, owner, rank):
    """An earlier group of the name; pods that failed; the next three of a Job; the same again."""
    count = 3 if rank == 3 else 2
    story = pool(*(done(i, phase, owner) for i in range(count)))
    story.see(made_by(owner, rank, "new", created=T0 - 10))
    story.pass_time(12)
    assert asked(story.actions) == {}
    assert story.of(act.AnnotatePod)[-1].annotations[keys.REASON].endswith("all of its 3 pods")
