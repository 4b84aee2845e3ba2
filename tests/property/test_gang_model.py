"""Gangs in the exact world of tests/support/gang_world.py, under random faults: all or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from slurmbridge.core import adopted, evict, turn
from tests.property.soak import KILLS, run_story
from tests.support.core_agents import Agents
from tests.support.core_world import BrokenPromise
from tests.support.gang_world import GangWorld, RestlessGangWorld


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


class Alone(GangWorld):
    """What makes RestlessGangWorld restless, and nothing else that is about gangs."""

    more_weights: ClassVar[Mapping[str, int]] = {"make_again": 6, "untell": 12}


@pytest.mark.parametrize(
    ("kind", "first", "kills"), [(RestlessGangWorld, 1, 1.0), (Alone, 27, 0.0)]
)
def test_gangs_made_again_beside_claims_of_which_slurm_tells_no_gpus(kind, first, kills):
    # 7: the members lived in the second of two claims that the next bridge found. 33: what was left
    # of a gang whose claim slurmctld had forgotten, beside one of the same name under the same id.
    for seed in range(first, first + 10):
        run_story(seed, 150, kind(), kills)
        run_story(seed, 150, kind(agents=Agents()), kills)


def test_no_gang_is_passed_over_where_one_can_be_looked_at_in_each_tick(monkeypatch):
    monkeypatch.setattr(turn, "LOOKS_A_TICK", 1)
    for seed in range(401, 431):
        run_story(seed, 150, GangWorld(agents=Agents() if seed % 2 else None))


class Often(GangWorld):
    """What these tests are about happens often."""

    more_weights: ClassVar[Mapping[str, int]] = {"make_again": 12, "cancel_places": 12}


def first_fault(what, agents):
    """The seed of the first story that breaks this promise; 0: none of a hundred does."""
    for seed in range(1, 101):
        try:
            world = Often(agents=Agents() if agents else None)
            run_story(seed, 150, world, KILLS[seed % len(KILLS)])
        except BrokenPromise as error:
            if error.what == what:
                return seed
    return 0


@pytest.mark.parametrize("agents", [True, False])
def test_a_bridge_that_gives_away_what_it_finds_is_found_out(monkeypatch, agents):
    """The model can fail: what is left of deleted members is of no matter to this bridge."""
    monkeypatch.setattr(adopted, "unclear", lambda state, job, numbers=None: [])
    assert first_fault("double_owned", agents)


def test_a_bridge_without_a_breaker_for_cancelled_gangs_is_found_out(monkeypatch):
    monkeypatch.setattr(evict, "_watch_breaker", lambda state, cases: None)
    assert first_fault("no_breaker", agents=False)
