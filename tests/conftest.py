"""Makes the cluster fixtures known to all tests, and says what may run beside what.

`make test` runs two processes (pytest-xdist). One takes all tests on real nodes, and then the tests
that start no cluster, file by file; the other takes the tests on real clusters with hollow nodes,
one after the other.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

from tests.support.fixtures import cluster, kube_cluster, slurm_cluster

if TYPE_CHECKING:
    import pytest
    from xdist.remote import Producer

__all__ = ["cluster", "kube_cluster", "slurm_cluster"]

REAL_NODES = ("tests/node",)
HOLLOW_NODES = ("tests/e2e", "tests/integration", "tests/meta", "tests/perf")
"""In the order in which they run: what compares rates comes last, when the other process has
ended."""


class Groups(LoadScopeScheduling):
    """Tests of one group run in one process."""

    def _split_scope(self, nodeid: str) -> str:
        return _turn(nodeid)[1]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    """Deal the tests out by group, the first groups first."""
    config.option.loadscopereorder = False
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the groups that take longest first."""
    items.sort(key=lambda item: _turn(item.nodeid)[0])


def _turn(nodeid: str) -> tuple[int, str]:
    """When a test runs, and its group."""
    path = PurePosixPath(nodeid.partition("::")[0])
    turn = 0
    for group, places in (("real nodes", REAL_NODES), ("hollow nodes", HOLLOW_NODES)):
        for place in places:
            if path.is_relative_to(place):
                return turn, group
            turn += 1
    return turn, str(path)
