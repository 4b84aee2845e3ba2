import pytest

from slurmbridge.link.freshness import (
    RETIRED_S,
    RETIRED_TERMS,
    AgeMeter,
    TermGuard,
    make_term,
    order_of,
)


def hear(meter, messages):
    """messages: (sent_s, age_s, read at)."""
    for message in messages:
        meter.hear(*message)
    return meter


STORIES = {
    # The Watch request was sent at our 100.0.
    "read at once": ([(0.0, 2.0, 100.0)], 100.0, 2.0),
    "it ages after it was read": ([(0.0, 2.0, 100.0)], 107.5, 9.5),
    "the way to and fro took 0.2 s: all of it counts": ([(0.0, 2.0, 100.2)], 100.2, 2.2),
    "a later message makes it younger": ([(0.0, 2.0, 100.0), (1.0, 0.1, 101.0)], 101.0, 0.1),
    "the message lay for 60 s while we were stopped": (
        [(0.0, 2.0, 100.0), (1.0, 0.1, 161.0)],
        161.0,
        60.1,
    ),
    "the first message lay for 60 s": ([(0.0, 0.1, 160.0)], 160.0, 60.1),
    "a whole minute of messages is read at once, then the bridge is silent": (
        [(float(t), 0.1, 100.0 + t) for t in range(100)]
        + [(100.0 + t, 0.1, 260.0) for t in range(31)],
        260.0,
        30.1,
    ),
    "after the backlog it is young again": (
        [(float(t), 0.1, 100.0 + t) for t in range(10)]
        + [(10.0 + t, 0.1, 170.0) for t in range(60)]
        + [(70.0, 0.1, 170.0)],
        170.0,
        0.1,
    ),
    "an age below zero (the bridge's wall clock was set) is none": (
        [(0.0, -5.0, 100.0)],
        100.0,
        0.0,
    ),
}


@pytest.mark.parametrize(("messages", "now", "age"), STORIES.values(), ids=STORIES.keys())
def test_age_of_a_view(messages, now, age):
    # The floor may rise by DRIFT a second.
    assert hear(AgeMeter(100.0), messages).age_s(now) == pytest.approx(age, abs=0.1)


@pytest.mark.parametrize("ppm", [50, -50, 500, -500])
def test_clocks_that_drift_apart_for_a_week_are_not_taken_for_delay(ppm):
    meter = AgeMeter(0.0)
    for second in range(0, 7 * 86400, 60):
        now = second * (1 + ppm / 1e6)
        meter.hear(float(second), 0.5, now)
        assert meter.age_s(now) == pytest.approx(0.5, abs=0.1)


def test_a_steady_delay_is_seen_for_long():
    meter = hear(AgeMeter(0.0), [(float(t), 0.1, float(t)) for t in range(60)])
    for second in range(60, 360):
        meter.hear(float(second), 0.1, second + 3.0)
    assert meter.delay_s == pytest.approx(3.0, abs=0.4)


def test_without_a_view_there_is_no_age():
    meter = AgeMeter(0.0)
    assert meter.age_s(5.0) is None
    meter.hear(0.0, None, 0.0)
    assert meter.age_s(5.0) is None


def admitted(guard, *terms, now=0.0):
    return [guard.admits(term, now) for term in terms]


def test_of_ordered_terms_only_the_newest_is_believed():
    guard = TermGuard()
    one, two, three = (make_term(1_800_000_000, n, 1, f"bridge-{n % 2}") for n in (9, 10, 11))
    assert admitted(guard, two, two, one, three, two, one, three) == [
        True, True, False, True, False, False, True,
    ]  # fmt: skip
    assert guard.current == three
    assert admitted(guard, one, two, now=RETIRED_S - 1) == [False, False]


def test_a_leader_of_an_api_server_that_was_set_back_is_believed_when_the_last_one_is_silent():
    guard = TermGuard()
    last, again = make_term(5, 9, 1, "bridge-0"), make_term(5, 7, 1, "bridge-1")
    assert admitted(guard, last, now=0) == [True]
    assert admitted(guard, again, last, now=50) == [False, True]
    assert admitted(guard, again, now=50 + RETIRED_S - 1) == [False]
    assert admitted(guard, again, now=50 + RETIRED_S) == [True]
    assert guard.current == again
    assert admitted(guard, make_term(5, 8, 1, "bridge-0"), again, now=120) == [True, False]


def test_a_bridge_that_has_led_itself_leads_again_under_an_older_term_after_a_while():
    guard = TermGuard()
    mine, again = make_term(5, 9, 1, "bridge-0"), make_term(5, 7, 2, "bridge-0")
    guard.admits(mine, 0.0)
    guard.retire(mine, 100.0)
    assert admitted(guard, again, now=159) == [False]
    assert admitted(guard, again, now=161) == [True]


def test_a_leader_is_not_locked_out_by_one_that_wakes_up():
    guard = TermGuard()
    sleeper, leader = make_term(5, 3, 1, "bridge-0"), make_term(5, 4, 1, "bridge-1")
    assert admitted(guard, leader, sleeper, leader) == [True, False, True]


NEWER = {
    "another bridge has acquired the Lease": (make_term(5, 3, 7, "a"), make_term(5, 4, 1, "b")),
    "the same bridge again, nobody in between": (make_term(5, 3, 1, "a"), make_term(5, 3, 2, "a")),
    "someone has deleted the Lease": (make_term(5, 300, 1, "a"), make_term(900, 0, 1, "a")),
}


@pytest.mark.parametrize(("older", "newer"), NEWER.values(), ids=NEWER.keys())
def test_what_makes_a_term_newer(older, newer):
    guard = TermGuard()
    assert admitted(guard, older, newer, older, newer) == [True, True, False, True]


def test_a_term_without_an_order_is_refused_for_a_while_after_it_was_left():
    guard = TermGuard()
    assert admitted(guard, "a", "a", "b", "a", "b", "c", "b", "a", "c") == [
        True, True, True, False, True, True, False, False, True,
    ]  # fmt: skip
    assert guard.current == "c"
    assert admitted(guard, "b", now=RETIRED_S - 1) == [False]
    assert admitted(guard, "b", now=RETIRED_S + 1) == [True]


def test_a_retired_term_is_not_believed_and_an_empty_one_never():
    for term in ("a1", make_term(1, 1, 1, "a")):
        guard = TermGuard()
        guard.admits(term, 0.0)
        guard.retire(term, 0.0)
        assert guard.current == ""
        assert admitted(guard, term, "", make_term(1, 2, 1, "a")) == [False, False, True]


def test_the_memory_of_old_terms_is_bounded():
    guard = TermGuard()
    for number in range(RETIRED_TERMS + 10):
        guard.admits(f"t{number}", 0.0)
    assert len(guard._retired) == RETIRED_TERMS
    assert admitted(guard, f"t{RETIRED_TERMS}") == [False]


@pytest.mark.parametrize(
    "term", ["", "t1", "1", "/x", "1./x", "1.2.3.4.5/x", "-1/x", "1x/y", "²/x"]
)
def test_terms_of_another_form_have_no_order(term):
    assert order_of(term) is None
