"""Makes the cluster fixtures known to all tests; what they are stands in tests/support/fixtures.py."""

from __future__ import annotations

from tests.support.fixtures import cluster, kube_cluster, slurm_cluster

__all__ = ["cluster", "kube_cluster", "slurm_cluster"]
