"""Makes the cluster fixtures known to all tests, and says what may run beside what.

`make test` runs two processes (pytest-xdist). One takes all tests on real nodes, those of single
parts, and then the tests that start no cluster, file by file; the other takes the tests on whole
clusters with hollow nodes, one after the other.
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

PLACES = {
    "tests/node": "real nodes",
    "tests/e2e": "hollow nodes",
    "tests/integration": "real nodes",
    "tests/meta": "real nodes",
    "tests/perf": "hollow nodes",
    "tests/e2e/test_chaos.py": "hollow nodes",
}
"""Groups of tests, in the order in which they run. Chaos comes last: its judge looks as often as it
can, when the other process has ended."""


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
    place = max((p for p in PLACES if path.is_relative_to(p)), key=len, default="")
    if not place:
        return len(PLACES), str(path)
    return list(PLACES).index(place), PLACES[place]
