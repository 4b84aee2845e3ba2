"""Makes the cluster fixtures known to all tests, and says what may run beside what.

`make test` runs two processes (pytest-xdist, `--dist loadgroup`). One takes all tests on real
nodes, and then the tests that start no cluster, file by file; the other takes the tests on real
clusters with hollow nodes, one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.fixtures import cluster, kube_cluster, slurm_cluster

if TYPE_CHECKING:
    from pathlib import PurePath

__all__ = ["cluster", "kube_cluster", "slurm_cluster"]

REAL_NODES = ("node", "e2e/test_chaos.py")
HOLLOW_NODES = ("e2e", "integration", "meta", "perf")
"""Below tests/, in the order in which they run: what compares rates comes last, when the other
process has ended."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name each test's group, and put the groups that take longest first."""
    turns = {}
    for item in items:
        path = item.path.relative_to(config.rootpath / "tests")
        turns[item], group = _turn(path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=turns.__getitem__)


def _turn(path: PurePath) -> tuple[int, str]:
    """When a file's tests run, and the group whose tests share one process."""
    turn = 0
    for group, folders in (("real-nodes", REAL_NODES), ("hollow-nodes", HOLLOW_NODES)):
        for folder in folders:
            if path.is_relative_to(folder):
                return turn, group
            turn += 1
    return turn, str(path)
