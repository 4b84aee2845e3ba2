"""A long queue in Slurm must not slow pods down."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.scene import PODS, is_bound, wait_for
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e

HELD = 5000


def _latency_s(pool: Cluster, name: str) -> float:
    """Create -> bound of one pod alone, seconds."""
    began = time.monotonic()
    pool.kube.api.create(pod(name, gpus=1, run_s=0.2))
    wait_for("it is bound", lambda: is_bound(pool, name), 10, 0.001)
    took = time.monotonic() - began
    wait_for("it is over", lambda: _phase(pool, name) == "Succeeded", 10)
    return took


def _phase(pool: Cluster, name: str) -> str:
    return str(pool.kube.api.get(f"{PODS}/{name}")["status"]["phase"])


def test_5000_held_jobs_make_one_pod_wait_no_longer(cluster: ClusterFactory) -> None:
    """Medians of many pods on one cluster: without the queue, with it, without it again."""
    # bf_interval as Slurm has it by default: a queue of 5,000 costs slurmctld itself much with less.
    config = SlurmConfig(nodes=16, gpus_per_node=8, bf_interval_s=30, extra=("MaxJobCount=20000",))
    pool = cluster(config, scheduler=False)
    with Product(pool) as product:
        _latency_s(pool, "warm-up")
        without = [_latency_s(pool, f"without-{i}") for i in range(25)]
        script = "#!/bin/sh\n: > /tmp/never\n"
        options = "-H -Q --gres=gpu:1 -o /dev/null -D /"
        submits = f"seq {HELD} | xargs -P 4 -I @ sbatch {options} {_script(pool, script)} @"
        pool.slurm.run("sh", "-c", submits, timeout_s=240)
        count = len(pool.slurm.run("squeue", "-h", "-t", "PD", "-o", "%A").split())
        assert count == HELD
        wait_for(
            "the bridge has read them all",
            lambda: product.metrics()["slurmbridge_slurm_age_seconds"] < 1.5,
            30,
        )
        with_queue = [_latency_s(pool, f"with-{i}") for i in range(25)]
        # Again without: what has changed on this machine meanwhile is no fault of the queue's.
        pool.slurm.run("scancel", "--state=PENDING", "--user=root", timeout_s=120)
        wait_for(
            "the queue is gone",
            lambda: not pool.slurm.run("squeue", "-h", "-t", "PD", "-o", "%A").split(),
            60,
            0.5,
        )
        without += [_latency_s(pool, f"again-{i}") for i in range(25)]
    assert statistics.median(with_queue) <= 1.2 * statistics.median(without)


def _script(pool: Cluster, text: str) -> str:
    path = pool.kube.dir / "held.sh"
    path.write_text(text)
    return str(path)
