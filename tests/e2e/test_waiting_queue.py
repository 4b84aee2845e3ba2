"""A long queue in Slurm does not keep pods from free GPUs, and loses nothing by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.scene import wait_for
from tests.support.product import Product
from tests.support.waiting_queue import fill_queue, latency_s, queue_config, waiting_jobs

if TYPE_CHECKING:
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e

HELD, PODS = 5000, 25


def test_pods_are_bound_beside_5000_held_jobs_and_these_go_on_waiting(
    cluster: ClusterFactory,
) -> None:
    """How long that takes is told by bench/waiting_queue.py."""
    pool = cluster(queue_config(), scheduler=False)
    with Product(pool) as product:
        fill_queue(pool, HELD)
        wait_for(
            "the bridge has read them all",
            lambda: product.metrics()["slurmbridge_slurm_age_seconds"] < 1.5,
            30,
        )
        for number in range(PODS):
            latency_s(pool, f"pod-{number}")
        assert waiting_jobs(pool) == HELD
        assert pool.checker.sample().violations == ()
