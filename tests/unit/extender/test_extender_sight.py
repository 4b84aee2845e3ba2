import pytest

from extender.filter import Freshness
from extender.inflight import InFlight, Size
from extender.sight import Limits, Sight
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.record import GpuRequest
from slurmbridge.pool.view import ViewDelta, apply_delta
from tests.support.clock import HandClock
from tests.support.pool_view import NOW, make_node, make_view


class FixedLink:
    """A link that says what the test wants."""

    def __init__(self, view=None, age=0.5):
        self.view, self.policy, self.age, self.leader = view, Policy("c1"), age, ""

    def age_s(self):
        return None if self.view is None else self.age


def sight_of(*nodes, age=0.5, **how):
    link, book = FixedLink(make_view(*nodes, **how), age), InFlight()
    return Sight(link, book, HandClock(), Limits()), link, book


def test_now_is_by_the_clock_of_the_bridge():
    sight, _, _ = sight_of(make_node("a"), age=3.25)
    assert NOW + 3.25 == sight.situation("p").now


def test_before_the_first_view_it_is_blind():
    link = FixedLink()
    sight = Sight(link, InFlight(), HandClock(), Limits())
    situation = sight.situation("p")
    assert (None, Freshness.BLIND) == (situation.index, situation.freshness)


def test_when_the_view_is_dropped_the_nodes_outside_are_still_known():
    sight, link, _ = sight_of(make_node("a"))
    sight.note_outside(["x"])
    link.view = None
    sight.note_outside(["y"])
    situation = sight.situation("p")
    assert Freshness.BLIND is situation.freshness
    assert ["x"] == list(situation.outside)


@pytest.mark.parametrize("age", [0.5, 20.0, 60.0])
def test_only_a_fresh_view_says_what_is_outside(age):
    sight, _, _ = sight_of(make_node("a"), age=age)
    sight.note_outside(["x"])
    assert ("x" in sight.situation("p").outside) == (age < 1)


def test_a_node_that_joins_the_pool_is_outside_no_more():
    sight, link, _ = sight_of(make_node("a"), make_node("b"))
    sight.note_outside(["c", "x"])
    change = ViewDelta("t1", 1, 2, NOW, 1.0, nodes={"a": None, "c": make_node("c")})
    link.view = apply_delta(link.view, change)
    situation = sight.situation("p")
    assert ["b", "c"] == list(situation.index.names)
    assert ["x"] == list(situation.outside)


def test_a_view_is_compiled_once():
    sight, _, _ = sight_of(make_node("a"))
    assert sight.situation("p").index is sight.situation("q").index


def test_freshness_follows_the_age_and_the_poll_interval():
    sight, link, _ = sight_of(make_node("a"), interval_s=4.0)
    for age, expected in ((7.9, "fresh"), (8.1, "stale"), (31.0, "blind")):
        link.age = age
        assert expected == sight.situation("p").freshness


def test_binds_under_way_are_taken_off_for_others_and_pin_their_own_pod():
    sight, link, book = sight_of(make_node("a"))
    book.remember("p1", Size(GpuRequest(3), 0, 0))
    book.begin("p1", "a", "t1", 99.0)
    assert [5] == sight.situation("p2").index.free[0].tolist()
    assert sight.situation("p2").index is sight.situation("p3").index
    own = sight.situation("p1")
    assert ([8], "") == (own.index.free[0].tolist(), own.pinned)
    book.grant("p1", 7, "0-2", generation=2, until=99.0)
    assert "a" == sight.situation("p1").pinned
    link.view = apply_delta(
        link.view, ViewDelta("t1", 1, 2, NOW, 1.0, nodes={"a": make_node("a", free=5)})
    )
    assert [5] == sight.situation("p2").index.free[0].tolist()
    assert 0 == len(book)


def test_facts_hold_all_that_an_answer_depends_on():
    sight, _, _ = sight_of(make_node("a"))
    assert {"freshness", "age_s", "view", "policy", "in_flight"} == set(sight.facts())


def test_the_topology_of_the_view_ranks_a_rack_in_use_before_a_whole_one():
    nodes = [
        make_node("a", domains=("r1",)),
        make_node("b", domains=("r2",), free=0),
        make_node("c", domains=("r2",)),
    ]
    sight, link, _ = sight_of(*nodes)
    key = sight.situation("p").topology
    assert key[2] > key[0]
    assert sight.situation("q").topology is key
    change = ViewDelta("t1", 1, 2, NOW, 1.0, nodes={"c": make_node("c", domains=("r1",))})
    link.view = apply_delta(link.view, change)
    moved = sight.situation("p").topology
    assert moved[0] == moved[2]


def test_a_view_that_tells_of_no_domains_has_no_topology():
    sight, _, _ = sight_of(make_node("a"))
    assert sight.situation("p").topology is None
