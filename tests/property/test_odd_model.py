"""Names that change, lists that lie and time limits that come, in the exact world of odd_world.py."""

from __future__ import annotations

import pytest

from slurmbridge.core import audit, cover, release, sweep
from tests.property.soak import KILLS, run_story
from tests.support.core_agents import Agents
from tests.support.core_world import BrokenPromise
from tests.support.odd_world import OddGangWorld, OddWorld


def tell(kind, seeds):
    for seed in seeds:
        world = kind(agents=Agents() if seed % 2 else None)
        run_story(seed, 150, world, KILLS[seed // 3 % len(KILLS)])


@pytest.mark.parametrize("first", [1, 186, 230])
def test_no_promise_to_single_pods_is_broken(first):
    # 193: a label changes while a list lacks a node; 238: a claim that may be bound any moment.
    tell(OddWorld, range(first, first + 15))


@pytest.mark.parametrize("first", [1, 21])
def test_no_promise_to_gangs_is_broken(first):
    tell(OddGangWorld, range(first, first + 12))


def test_a_bridge_that_goes_by_names_alone_gives_claims_in_use_back(monkeypatch):
    """The model can fail: a new leader of this bridge believes labels more than claims.

    Nor does it keep what it finds until nothing can be left in it.
    """

    def name_of(state, pod):
        return state.slurm_of.get(pod.node, "")

    def by_name(state, pod, job):
        return name_of(state, pod) if name_of(state, pod) in job.nodes else ""

    monkeypatch.setattr(sweep, "place_of", by_name)
    monkeypatch.setattr(sweep, "is_bound_with", lambda pod, job: False)
    monkeypatch.setattr(cover, "node_of", name_of)
    monkeypatch.setattr(release, "_may_be_used", lambda state, uid, job: False)
    with pytest.raises(BrokenPromise, match=r"ended_in_use|ran_out|double_owned"):
        tell(OddWorld, range(1, 61))


def test_a_bridge_that_does_not_renew_lets_claims_in_use_run_out(monkeypatch):
    monkeypatch.setattr(audit, "_renew", lambda state, entry, job: None)
    with pytest.raises(BrokenPromise, match="ran_out"):
        tell(OddWorld, range(1, 11))
