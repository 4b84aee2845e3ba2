"""Fixtures that start real clusters; tests/conftest.py makes them known to every test.

Each is a factory, so that a test file says what its cluster looks like:

    @pytest.fixture(scope="module")
    def cluster8(cluster): return cluster(SlurmConfig(nodes=8))

Clusters live as long as the module that made them, and stand side by side.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from tests.support.cluster import Cluster
from tests.support.kube import KubeCluster
from tests.support.slurm import SlurmCluster, SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


class SlurmFactory(Protocol):
    """Call with a SlurmConfig, or with its fields: a started SlurmCluster."""

    def __call__(self, config: SlurmConfig | None = None, **fields: Any) -> SlurmCluster: ...


class KubeFactory(Protocol):
    """Call with the fields of KubeCluster: a started one."""

    def __call__(self, **fields: Any) -> KubeCluster: ...


class ClusterFactory(Protocol):
    """Call with a SlurmConfig and the fields of Cluster: a started one."""

    def __call__(self, config: SlurmConfig | None = None, **fields: Any) -> Cluster: ...


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmFactory]:
    """Starts Slurm clusters: `slurm_cluster(nodes=8)`."""
    with contextlib.ExitStack() as stack:

        def start(config: SlurmConfig | None = None, **fields: Any) -> SlurmCluster:
            return stack.enter_context(SlurmCluster(config or SlurmConfig(**fields)))

        yield start


@pytest.fixture(scope="module")
def kube_cluster() -> Iterator[KubeFactory]:
    """Starts control planes: `kube_cluster()`."""
    with contextlib.ExitStack() as stack:

        def start(**fields: Any) -> KubeCluster:
            return stack.enter_context(KubeCluster(**fields))

        yield start


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterFactory]:
    """Starts whole clusters: `cluster(SlurmConfig(nodes=8), extenders=[...])`."""
    with contextlib.ExitStack() as stack:

        def start(config: SlurmConfig | None = None, **fields: Any) -> Cluster:
            return stack.enter_context(Cluster(config or SlurmConfig(), **fields))

        yield start
