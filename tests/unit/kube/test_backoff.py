"""Growing delays."""

from __future__ import annotations

from slurmbridge.kube.backoff import Backoff


def test_delays_double_up_to_the_cap_and_begin_anew_after_success() -> None:
    backoff = Backoff(lambda: 1.0, base_s=1.0, cap_s=5.0)
    assert [backoff.delay() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.delay() == 1.0


def test_half_of_a_delay_is_certain_and_half_is_chance() -> None:
    assert Backoff(lambda: 0.0, base_s=1.0).delay() == 0.5
    assert Backoff(lambda: 0.5, base_s=1.0).delay() == 0.75


def test_a_longer_wait_that_the_peer_asks_for_is_obeyed() -> None:
    backoff = Backoff(lambda: 0.0, base_s=1.0)
    assert backoff.delay(30.0) == 30.0
    assert backoff.delay(0.1) == 1.0
