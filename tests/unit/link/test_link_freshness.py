import pytest

from slurmbridge.link.freshness import RETIRED_TERMS, AgeMeter, TermGuard


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
    for second in range(0, 7 * 86400, 10):
        now = second * (1 + ppm / 1e6)
        meter.hear(float(second), 0.5, now)
        assert meter.age_s(now) == pytest.approx(0.5, abs=0.02)


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


def test_a_leadership_that_was_left_is_never_believed_again():
    guard = TermGuard()
    assert [guard.admits(t) for t in ("a1", "a1", "b1", "a1", "b1", "a2", "b1", "a2")] == [
        True, True, True, False, True, True, False, True,
    ]  # fmt: skip
    assert guard.current == "a2"


def test_a_retired_leadership_is_not_believed_and_an_empty_one_never():
    guard = TermGuard()
    guard.admits("a1")
    guard.retire("a1")
    assert guard.current == ""
    assert not guard.admits("a1")
    assert guard.admits("a2")
    assert not guard.admits("")


def test_the_memory_of_old_leaderships_is_bounded():
    guard = TermGuard()
    for number in range(RETIRED_TERMS + 10):
        guard.admits(f"t{number}")
    assert len(guard._retired) == RETIRED_TERMS
    assert not guard.admits(f"t{RETIRED_TERMS}")
