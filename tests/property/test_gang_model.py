"""Gangs in the exact world of tests/support/gang_world.py, under random faults: all or none."""

from __future__ import annotations

import pytest

from tests.property.soak import run_story
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
