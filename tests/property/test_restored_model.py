"""The API server is set back to an older state, again and again: the promises hold, and all settles.

The world is in tests/support/restored_world.py.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from slurmbridge.core import adopted, pods, release
from tests.property.soak import KILLS, run_story
from tests.support.core_agents import Agents
from tests.support.core_world import BrokenPromise
from tests.support.restored_world import RestoredGangWorld, RestoredWorld


class Often(RestoredWorld):
    """It happens some ten times in a story."""

    more_weights: ClassVar = {"back_up": 8, "set_back": 12}


class OftenGangs(RestoredGangWorld):
    """The same with gangs."""

    more_weights: ClassVar = RestoredGangWorld.more_weights | Often.more_weights


def tell(kind, seeds):
    for seed in seeds:
        world = kind(agents=Agents() if seed % 2 == 0 else None)
        run_story(seed, 150, world, KILLS[seed // 3 % len(KILLS)])


@pytest.mark.parametrize("first", [1, 70, 1275, 1480])
def test_no_promise_is_broken(first):
    # 12, 76, 1280 and 1487 have told us of four ways.
    tell(Often, range(first, first + 12))


@pytest.mark.parametrize("first", [19, 401])
def test_no_promise_to_gangs_is_broken(first):
    tell(OftenGangs, range(first, first + 12))


def test_a_bridge_that_gives_away_what_it_finds_of_gangs_is_found_out(monkeypatch):
    """The model can fail: what is left of a gang's members is of no matter to this one."""
    monkeypatch.setattr(adopted, "unclear", lambda state, job, numbers=None: [])
    with pytest.raises(BrokenPromise, match=r"ended_in_use|double_owned"):
        tell(OftenGangs, range(19, 200))


def test_a_bridge_that_ends_what_it_finds_at_once_is_found_out(monkeypatch):
    """The model can fail: what an unbound pod may have left running is of no matter to this one."""
    monkeypatch.setattr(release, "_may_be_used", lambda state, uid, job: False)
    with pytest.raises(BrokenPromise, match=r"ended_in_use|double_owned"):
        tell(Often, range(1, 200))


def test_a_bridge_that_never_believes_that_a_pod_is_unbound_leaks_its_claim(monkeypatch):
    monkeypatch.setattr(pods, "_went_back", lambda state, known, pod: None)
    with pytest.raises(BrokenPromise, match="leaked"):
        tell(Often, range(1, 60))
