"""When looks begin: from begin to begin, whatever they take, and without bursts."""

from __future__ import annotations

import pytest

from tests.support.cadence import Cadence


def begins(lasting: list[float], every_s: float = 0.2) -> list[float]:
    """When looks that last so long begin; the first one at 100.0."""
    now = 100.0
    cadence = Cadence(every_s, lambda: now)
    found = []
    for lasts in lasting:
        found.append(now)
        now += lasts
        now += cadence.pause_s()
    return found


@pytest.mark.parametrize(
    ("lasting", "expected"),
    {
        "short looks": ([0.05, 0.19, 0.0, 0.1], [100.0, 100.2, 100.4, 100.6]),
        "one long look is caught up with": (
            [0.1, 0.35, 0.1, 0.1, 0.1],
            [100.0, 100.2, 100.55, 100.65, 100.8],
        ),
        "too slow a machine: one after the other": ([0.3] * 4, [100.0, 100.3, 100.6, 100.9]),
        "after a stall no burst": (
            [5.0, 0.1, 0.1, 0.1, 0.1],
            [100.0, 105.0, 105.1, 105.2, 105.4],
        ),
    }.values(),
)
def test_looks_begin_every_so_often_from_begin_to_begin(
    lasting: list[float], expected: list[float]
) -> None:
    assert begins(lasting) == pytest.approx(expected)
