"""Members that differ, as equal tasks of one Slurm job."""

from __future__ import annotations

import pytest

from slurmbridge.pool.tasks import as_tasks
from tests.support.pool_view import make_ask


def tasks(*sizes, node=8, **last):
    asks = [make_ask(n, cpus=n, memory_mib=10 * n) for n in sizes[:-1]]
    found = as_tasks([*asks, make_ask(sizes[-1], **{"cpus": sizes[-1]} | last)], node)
    return found and (found.ask.gpu.count, found.number)


@pytest.mark.parametrize(
    ("sizes", "node", "expected"),
    [
        ((2,), 8, (2, 1)),
        ((2, 2, 2), 8, (2, 3)),
        ((8, 4, 4), 8, (8, 2)),
        ((4, 4, 8, 6, 2), 8, (8, 3)),
        ((5, 3, 5, 2, 1), 8, None),  # 5 3 2 1 is no full 5
        ((8, 1), 8, None),  # seven GPUs would be held for nobody
        ((4, 2, 2), 8, None),  # two tasks on one node may be divided another way
        ((4, 2, 2), 7, (4, 2)),
    ],
)
def test_tasks_are_equal_full_and_one_to_a_node_where_members_share_them(sizes, node, expected):
    assert tasks(*sizes, node=node) == expected


def test_what_else_members_need_is_asked_for_as_the_largest_task_needs_it():
    found = as_tasks([make_ask(8, cpus=9), make_ask(4, cpus=5), make_ask(4, cpus=6)], 8)
    assert (found.number, found.ask.cpus, found.ask.memory_mib) == (2, 11, 2000)
    found = as_tasks([make_ask(8, cpus=9), make_ask(8, cpus=1)], 8)
    assert (found.number, found.ask.cpus) == (2, 9)


@pytest.mark.parametrize("last", [{"kind": "h100"}, {"account": "x"}, {"minutes": 9}])
def test_members_of_other_types_accounts_or_times_are_no_tasks_of_one_job(last):
    assert tasks(8, 8, **last) is None
