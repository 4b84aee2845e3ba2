"""Many gangs that wait: looked at within a budget for each tick, and none is passed over."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import layout, turn
from slurmbridge.core.waiting import LOOKS_A_TICK
from slurmbridge.pool import keys
from slurmbridge.pool.group import Group
from tests.support.builders import Story, make_job, make_pod, make_settings

EACH = turn.LOOKS_EACH + 2


@pytest.fixture
def looks(monkeypatch):
    """Keys of the gangs that were laid, in order."""
    seen = []
    lay_out = layout.lay_out

    def watched(state, gang, *more):
        seen.append(gang.key.split("/")[2])
        return lay_out(state, gang, *more)

    monkeypatch.setattr(layout, "lay_out", watched)
    return seen


def gang(name, created=0.0):
    """Two pods that want a node each, now or not at all."""
    return [
        make_pod(f"{name}-{i}")
        .gpus(8)
        .but(gates=(keys.GATE,), group=Group("own", "default", name, size=2, rank=(i,)))
        .wrote(MODE="immediate")
        for i in range(2)
    ]


def waiting(count):
    """So many gangs, each a second older than the next, and two nodes that are full."""
    story = Story("n1", "n2", settings=make_settings())
    story.slurm(make_job(901).on("n1", "0-7"), make_job(902).on("n2", "0-7"))
    story.start()
    names = [f"g{n:03}" for n in range(count)]
    for name in names:
        story.now += 0.01
        for pod in gang(name):
            story.see(pod)
    return story, names


def read(story):
    """A reading, a view of it, and what follows from that."""
    story.poll()
    assert story.machine.view_is_due
    story.poll()


def grow_and_shrink(story):
    """One GPU becomes free and is taken again: nobody's chance, but all have to be looked at."""
    for held in ("0-6", "0-7"):
        story.slurm(make_job(901).on("n1", held))
        read(story)


def test_all_are_laid_again_oldest_first_when_the_budget_is_enough(looks):
    story, names = waiting(20)
    story.pass_time(1)
    looks.clear()
    grow_and_shrink(story)
    assert looks == names


def test_a_tick_has_a_budget_and_the_rest_comes_in_the_next_ones(looks, monkeypatch):
    story, names = waiting(20)
    story.pass_time(3)
    monkeypatch.setattr(turn, "LOOKS_A_TICK", 6 * EACH)
    story.tick()
    looks.clear()
    grow_and_shrink(story)
    assert looks == names[:6]
    for _ in range(3):
        story.tick()
    assert looks[:20] == names


def test_however_often_the_pool_grows_each_gang_is_reached(looks, monkeypatch):
    story, names = waiting(20)
    story.pass_time(3)
    monkeypatch.setattr(turn, "LOOKS_A_TICK", 3 * EACH)
    story.tick()
    looks.clear()
    for _ in range(15):
        story.now += 0.5
        grow_and_shrink(story)
        story.tick()
    assert looks[:20] == names
    assert min(looks.count(name) for name in names) >= 2


def test_the_oldest_gets_the_room_though_another_one_has_just_come(looks):
    story, _ = waiting(3)
    story.pass_time(2)
    story.forget()
    story.slurm(without=(901, 902)).see(gang("new")[0])
    story.see(gang("new")[1])
    read(story)
    story.tick()
    (asked,) = story.of(act.AllocateGroup)
    assert asked.request.ref == "default/g000"


def test_one_that_is_left_over_is_not_forgotten_when_nothing_else_happens(looks):
    story, names = waiting(3)
    story.pass_time(1)
    story.machine.state.waiting.looks_left = 0
    looks.clear()
    read(story.slurm(without=(901, 902)))
    assert looks == []
    assert story.machine.state.waiting.gangs_later
    story.tick()
    assert looks[0] == names[0]
    assert len(story.of(act.AllocateGroup)) == 1
    assert story.machine.state.waiting.looks_left < LOOKS_A_TICK
