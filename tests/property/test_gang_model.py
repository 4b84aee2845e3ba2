"""Gangs in the exact world of tests/support/gang_world.py, under random faults: all or none."""

from __future__ import annotations

import pytest

from slurmbridge.core import adopted
from tests.property.soak import KILLS, run_story
from tests.support.core_agents import Agents
from tests.support.core_world import BrokenPromise
from tests.support.gang_world import GangWorld


@pytest.mark.parametrize("first", [1, 41, 290])
def test_gangs_start_as_a_whole_or_hold_nothing(first):
    # 306: a cover refused because of a job that slurmctld forgets in its next restart.
    for seed in range(first, first + 40):
        run_story(seed, 150, GangWorld())


@pytest.mark.parametrize("first", range(1, 41, 20))
def test_gangs_survive_a_bridge_that_dies_after_every_single_action(first):
    for seed in range(first, first + 20):
        run_story(seed, 150, GangWorld(), kills=1.0)


def test_gangs_with_agents_that_see_what_is_left_of_members_made_again():
    for seed in range(2, 62, 2):
        run_story(seed, 150, GangWorld(agents=Agents()), KILLS[seed // 3 % len(KILLS)])


@pytest.mark.parametrize(("agents", "seeds"), [(Agents, (24, 38, 76, 78)), (None, (15, 17, 75))])
def test_a_bridge_that_gives_away_what_it_finds_is_found_out(monkeypatch, agents, seeds):
    """The model can fail: what is left of deleted members is of no matter to this bridge."""
    monkeypatch.setattr(adopted, "unclear", lambda state, job, numbers=None: [])
    found = set()
    for seed in seeds:
        try:
            world = GangWorld(agents=None if agents is None else agents())
            run_story(seed, 150, world, KILLS[seed // 3 % len(KILLS)])
        except BrokenPromise as error:
            found.add(error.what)
    assert "double_owned" in found
