"""Refused pods are woken when they now fit: only as many, best first, less and less often."""

from __future__ import annotations

from itertools import pairwise

from slurmbridge.core import action as act
from slurmbridge.pool import keys
from tests.support.builders import T0, Story, make_claim_job, make_job, make_pod, none


def woken(actions):
    """Names of the pods that are woken, in order."""
    return [
        a.name for a in actions if isinstance(a, act.AnnotatePod) and keys.WAKE in a.annotations
    ]


def waiting(count, gpus=1, **fields):
    return [make_pod(f"p{i}").gpus(gpus).refused().but(**fields) for i in range(count)]


def full(*pods, nodes=("n1",)):
    """Every GPU is taken, these pods wait."""
    story = Story(*nodes)
    for index, node in enumerate(nodes):
        story.slurm(make_job(1 + index).on(node, "0-7"))
    return story.start(*pods).forget()


def test_nobody_is_woken_while_nothing_fits():
    assert woken(full(*waiting(5)).pass_time(120)) == []


def test_only_as_many_are_woken_as_fit_now():
    story = full(*waiting(20, gpus=2))
    story.slurm(make_job(1).on("n1", "0-4"))
    assert woken(story.poll()) == ["p0"]


def test_on_several_nodes_each_holds_what_it_can():
    story = full(*waiting(20, gpus=3), nodes=("n1", "n2"))
    story.slurm(make_job(1).on("n1", "0"), make_job(2).on("n2", "0-3"))
    assert len(woken(story.poll())) == 3


def test_cpus_and_memory_count_as_well():
    story = full(*waiting(8, cpus=30))
    story.slurm(without=(1,))
    assert len(woken(story.poll())) == 2


def test_the_highest_priority_is_woken_first_and_then_the_oldest():
    pods = [
        make_pod("young").refused().but(created=T0 - 1),
        make_pod("old").refused().but(created=T0 - 9),
        make_pod("urgent").refused(priority=100),
        make_pod("least").refused(priority=-1),
    ]
    story = full(*pods)
    story.slurm(make_job(1).on("n1", "0-4"))
    assert woken(story.poll()) == ["urgent", "old", "young"]


def test_a_smaller_pod_behind_one_that_does_not_fit_is_woken():
    big = make_pod("big").gpus(8).refused(priority=9)
    story = full(big, make_pod("small").refused())
    story.slurm(make_job(1).on("n1", "0-6"))
    assert woken(story.poll()) == ["small"]


def test_a_pod_that_is_woken_in_vain_is_woken_less_and_less_often():
    story = full(*waiting(1))
    story.slurm(without=(1,))
    times = [second for second in range(1, 301) if woken(story.pass_time(1))]
    assert [b - a for a, b in pairwise(times)] == [2, 4, 8, 16, 32, 60, 60, 60]


def test_room_that_somebody_was_woken_for_is_not_given_to_the_next_at_once():
    story = full(*waiting(20, gpus=8))
    story.slurm(without=(1,))
    assert woken(story.poll()) == ["p0"]
    assert woken(story.tick()) == []
    assert woken(story.pass_time(1)) == []


def test_another_pod_gets_its_turn_while_one_that_came_in_vain_pauses():
    story = full(*waiting(3, gpus=8))
    story.slurm(without=(1,))
    assert woken(story.pass_time(9)) == ["p0", "p0", "p1", "p0", "p1"]


def test_pods_that_do_not_wait_for_us_are_left_alone():
    story = full(
        make_pod("new"),
        make_pod("gated").refused().but(gates=("slurmbridge.dev/claim",)),
        make_pod("dying").refused().deleting(),
        make_pod("forbidden").refused().wrote(ACCOUNT="admin"),
        make_pod("bound").refused().on("n1"),
    )
    story.slurm(without=(1,))
    assert woken(story.poll()) == []


def test_a_pod_whose_claim_is_under_way_is_left_alone():
    (pod,) = waiting(1)
    story = full(pod)
    story.slurm(without=(1,)).poll()
    story.ask(pod, "n1")
    assert woken(story.pass_time(30)) == []


def test_nothing_is_woken_on_a_stale_reading():
    story = full(*waiting(3))
    story.slurm(without=(1,)).poll()
    assert none(story.tick(at=100), act.AnnotatePod)


def test_nobody_is_woken_for_a_node_that_is_drained_planned_or_shared_with_a_pod_without_a_claim():
    story = full(*waiting(3))
    story.slurm(make_job(5).planned(T0 + 60, "n1"), without=(1,))
    assert woken(story.poll()) == []
    story.slurm(without=(5,)).nodes["n1"].state("IDLE+DRAIN")
    assert woken(story.poll()) == []
    story.nodes["n1"].state("IDLE")
    story.see(make_pod("stray").on("n1"))
    assert woken(story.poll()) == []


def test_of_very_many_some_are_woken_at_a_time():
    story = Story("n1")
    story.nodes["n1"].gpus(1000).but(cpus_total=100_000, memory_mib=10_000_000)
    story.kube_nodes["n1"].gpus(1000)
    found = woken(story.start(*waiting(500)).actions)
    assert len(found) == 200
    assert len(woken(story.tick())) == 200
    assert len(woken(story.tick())) == 100


def test_a_claim_that_is_found_later_wakes_its_pod():
    (pod,) = waiting(1)
    story = full(pod)
    story.slurm(make_claim_job(10, pod, "n1", "0"), without=(1,))
    assert woken(story.poll()) == ["p0"]
