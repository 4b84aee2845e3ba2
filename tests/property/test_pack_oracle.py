import pytest

from slurmbridge.topology import exact, knapsack
from slurmbridge.topology.gang import Placement
from tests.support.pack_checks import answer, breaks_of, faults_of, fit_of, key_of
from tests.support.pack_oracle import best, best_fit, random_case

CASES = 2000


@pytest.mark.parametrize("start", range(0, CASES, 200))
def test_exhaustive_search_never_finds_a_lower_domain_or_fewer_children_or_a_tighter_fit(start):
    for seed in range(start, start + 200):
        case = random_case(seed)
        index, placement = answer(case)
        wanted = best_fit(case)
        if wanted is None:
            assert not isinstance(placement, Placement), (seed, case, placement)
            continue
        assert isinstance(placement, Placement), (seed, case, placement)
        assert placement.exact
        assert faults_of(case, placement) == [], (seed, case, placement)
        if len(set(case.pods)) == 1:
            assert not any(breaks_of(case, placement)), (seed, case, placement)
        height, *spread = key_of(case, index, placement)
        assert (placement.level, [*placement.spread.values()]) == (index.levels[height], spread)
        found = (height, *spread)
        if height:  # on one node there is no spread, and the choice is that of single pods
            found += fit_of(case, placement)
        assert found == wanted[: len(found)], (seed, case, placement)


def test_where_best_fit_does_not_fit_into_a_cost_the_level_and_the_spread_are_still_the_least(
    monkeypatch,
):
    monkeypatch.setattr(exact, "COST_BITS", 18)
    for seed in range(0, CASES, 4):
        case = random_case(seed)
        index, placement = answer(case)
        if isinstance(placement, Placement):
            assert placement.exact
            assert key_of(case, index, placement) == best(case), (seed, case, placement)


def test_without_search_placements_are_possible_and_no_higher_for_pods_of_one_size(monkeypatch):
    monkeypatch.setattr(knapsack, "WORK_LIMIT", 1)
    for seed in range(CASES):
        case = random_case(seed)
        index, placement = answer(case)
        if not isinstance(placement, Placement):
            assert len(set(case.pods)) > 1 or best(case) is None, (seed, case)
            continue
        assert faults_of(case, placement) == [], (seed, case, placement)
        if len(set(case.pods)) == 1:
            found = key_of(case, index, placement)
            assert placement.exact is (found[0] == 0)
            assert found[:2] == best(case)[:2], (seed, case, placement)
