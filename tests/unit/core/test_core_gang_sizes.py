"""How many members a gang starts with: more may have come, and a JobSet may start in order."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from slurmbridge.pool.group import Group, GroupObject, SizeFrom
from tests.support.builders import make_pod, none, only, plain
from tests.unit.core.test_core_gang_queue import UID, member, place, pool, queue


def lifted(actions):
    return {a.uid: a.kube_node for a in actions if isinstance(a, act.Lift)}


def test_where_not_all_that_came_fit_those_that_have_to_start_do_and_the_rest_follow():
    story = pool(*(member(i) for i in range(3)), busy=("n1", "n2"))
    request = only(story.of(act.AllocateGroup), act.AllocateGroup).request
    assert (request.members, request.nodes) == (2, ("n3", "n4"))
    job = place(70, n3="0-7", n4="0-7")
    story.slurm(job)
    found = story.handle(ev.GroupAllocated(UID, plain(job)))
    assert set(lifted(found)) == {"uid-g0", "uid-g1"}
    story.forget()
    for i, node in enumerate(("n3", "n4")):
        story.bind(member(i), 70, node, "0-7")
    story.pass_time(30)
    assert none(story.actions, act.End, act.QueueGroup, act.Allocate)
    story.slurm(without=(901,)).pass_time(3)
    assert only(story.of(act.Allocate), act.Allocate).request.slurm_node == "n1"


def test_where_all_that_came_fit_all_start():
    story = pool(*(member(i) for i in range(3)), busy=("n1",))
    assert only(story.of(act.AllocateGroup), act.AllocateGroup).request.members == 3


def test_a_gang_waits_in_the_queue_for_as_many_as_have_to_start():
    story = pool(*(member(i) for i in range(3)))
    assert queue(story).members == 2
    story.slurm(place(70, n3="0-7", n4="0-7"), without=(903,))
    found = story.handle(ev.JobLooked(UID, 70, plain(story.jobs[70])))
    assert set(lifted(found)) == {"uid-g0", "uid-g1"}
    assert none(story.pass_time(5), act.End, act.QueueGroup)


PATH = "apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/js"


def of_jobset(part, i, divided=False):
    name = f"js/{part}" if divided else "js"
    size_from = SizeFrom((PATH,), part if divided else "")
    group = Group("jobset", "default", name, "u.0", None, size_from, (0, i))
    pod = make_pod(f"js-{part}-{i}").gpus(8).but(gates=(keys.GATE,), group=group)
    return pod.but(annotations={keys.PART: "replicated-job"}) if divided else pod


def test_each_replicated_job_of_a_jobset_that_starts_in_order_is_a_gang():
    story = pool(of_jobset("a", 0), of_jobset("a", 1), busy=())
    look = only(story.of(act.LookGroup), act.LookGroup)
    assert (look.paths, look.part) == ((PATH,), "")
    story.handle(ev.GroupLooked(look.key, GroupObject(4, in_order=True)))
    notes = [a.annotations for a in story.of(act.AnnotatePod) if keys.PART in a.annotations]
    assert len(notes) == 2
    story.forget()
    story.see(of_jobset("a", 0, divided=True))
    look = only(story.of(act.LookGroup), act.LookGroup)
    assert look.part == "a"
    story.handle(ev.GroupLooked(look.key, GroupObject(2, in_order=True)))
    assert none(story.actions, act.AllocateGroup)
    story.see(of_jobset("a", 1, divided=True))
    assert only(story.of(act.AllocateGroup), act.AllocateGroup).request.members == 2
    assert len(story.machine.state.waiting.gangs) == 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((8, 4, 4), (2, 8)), ((8, 8, 8), (3, 8)), ((8, 6, 1), None)],
)
def test_members_that_differ_wait_in_the_queue_where_they_fill_equal_tasks(sizes, expected):
    story = pool(*(member(i, size=3, gpus=gpus) for i, gpus in enumerate(sizes)))
    story.pass_time(4)
    asked = [(a.request.members, a.request.ask.gpu.count) for a in story.of(act.QueueGroup)]
    assert asked == ([] if expected is None else [expected])
    if sizes != (8, 4, 4):
        return
    story.slurm(place(70))
    story.handle(ev.GroupQueued(UID, 70))
    story.slurm(place(70, n3="0-7", n4="0-7"), without=(903,))
    found = lifted(story.handle(ev.JobLooked(UID, 70, plain(story.jobs[70]))))
    assert found["uid-g1"] == found["uid-g2"] != found["uid-g0"]
