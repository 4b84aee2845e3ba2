"""GPUs of one side, where that can be."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from slurmbridge.pool.gpuside import choose

TWO = {i: i // 4 for i in range(8)}


@pytest.mark.parametrize(
    ("free", "count", "wanted"),
    [
        (range(8), 4, (0, 1, 2, 3)),
        ((1, 2, 3, 4, 5, 6, 7), 4, (4, 5, 6, 7)),
        ((1, 2, 3, 4, 5, 6, 7), 3, (1, 2, 3)),
        ((3, 4, 5, 6, 7), 1, (3,)),
        ((2, 3, 4, 5, 6, 7), 5, (2, 4, 5, 6, 7)),
        ((0, 5), 2, (0, 5)),
        (range(8), 8, tuple(range(8))),
        (range(8), 0, ()),
    ],
)
def test_one_side_if_it_holds_all_and_the_one_that_is_left_with_least(free, count, wanted):
    assert choose(tuple(free), count, TWO) == wanted


def test_where_no_side_is_known_the_lowest_are_taken():
    assert choose((5, 3, 1, 7), 2, {}) == (1, 3)


def test_a_gpu_without_a_known_side_is_alone():
    assert choose((0, 1, 2, 3), 2, {2: 0, 3: 0}) == (2, 3)
    assert choose((0, 1, 2), 2, {2: 0}) == (0, 1)


def test_gpus_without_numbers_are_as_many_as_are_asked_for():
    assert choose((-1, -1, -1), 2, TWO) == (-1, -1)


def test_no_choice_has_fewer_sides():
    rng = np.random.default_rng(7)
    for _ in range(500):
        sides = {i: int(rng.integers(0, 4)) for i in range(8)}
        free = tuple(i for i in range(8) if rng.random() < 0.7)
        count = int(rng.integers(0, len(free) + 1))
        found = choose(free, count, sides)
        assert len(found) == len(set(found)) == count
        assert set(found) <= set(free)
        fewest = min(len({sides[i] for i in some}) for some in combinations(free, count))
        assert len({sides[i] for i in found}) == fewest
