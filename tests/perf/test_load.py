"""A full pool of 4,096 GPUs, 900 jobs, 1,000 pods and 50 gangs that wait: nothing grows."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import PODS, bound, claims, wait_for
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

PODS_WAITING, GANGS, GANG = 1000, 50, 4
MOST_BRIDGE_MIB, MOST_EXTENDER_MIB = 400, 300
"""Measured here: 110 and 90."""


@pytest.fixture(scope="module", name="pool")
def _pool(cluster: ClusterFactory) -> Cluster:
    """64 nodes of 64 GPUs, all of them held by 960 native jobs; pods of `default` are gated."""
    pool = cluster(
        SlurmConfig(nodes=64, gpus_per_node=64, cpus=256, extra=("MaxJobCount=20000",)),
        scheduler=False,
    )
    policy = Path(__file__).parents[2] / "manifests/planned/policy.yaml"
    pool.kube.kubectl("apply", "-f", str(policy))
    opted = {"metadata": {"labels": {"slurmbridge.dev/planned": "true"}}}
    pool.kube.api.patch("/api/v1/namespaces/default", opted)
    one = "salloc --no-shell -Q -N1 --mem=100 --gres=gpu:"
    jobs = f"seq 896 | xargs -P 4 -I @ {one}4; seq 64 | xargs -P 4 -I @ {one}8"
    pool.slurm.run("sh", "-c", jobs, timeout_s=240)
    assert pool.checker.sample().gpus_used == 4096
    return pool


@pytest.mark.e2e
def test_with_everything_full_and_everybody_waiting_no_queue_and_no_memory_grows(
    pool: Cluster,
) -> None:
    with Product(pool) as product:
        wait_for("the bridge knows", lambda: product.cli("status")["gpus"]["free"] == 0, 30, 0.5)
        pods = [pod(f"p{i}", gpus=1 + i % 8) for i in range(PODS_WAITING)]
        for g in range(GANGS):
            notes = {keys.GROUP: f"g{g}", keys.GROUP_SIZE: str(GANG)}
            pods += [
                pod(f"g{g}-{i}", gpus=8, annotations=notes | {keys.RANK: str(i)})
                for i in range(GANG)
            ]
        pool.kube.api.create_all(pods)
        every = PODS_WAITING + GANGS * GANG
        wait_for(
            "it knows all pods",
            lambda: product.metrics()["slurmbridge_pods_waiting"] == every,
            60,
            0.5,
        )
        time.sleep(15)
        before = _memory(pool)
        waiting, readings = [], []
        for _ in range(30):
            told = product.metrics()
            waiting.append(told["slurmbridge_events_waiting"])
            readings.append(told['slurmbridge_polls_total{result="ok"}'])
            time.sleep(1)
        after = _memory(pool)
        # The queue of events is worked off again and again, and slurmctld is read on and on.
        assert sorted(waiting)[len(waiting) // 2] < 50, waiting
        assert len(set(readings)) >= 3, readings
        for name, most in (("bridge-0", MOST_BRIDGE_MIB), ("extender-0", MOST_EXTENDER_MIB)):
            assert after[name] < most, after
            assert after[name] < 1.3 * before[name] + 20, (before, after)
        # Gangs that do not fit have a place in Slurm's queue, which holds nothing.
        assert not claims(pool, "R")
        assert not bound(pool)
        # And they are served when there is room: two nodes' worth of jobs end.
        ids = pool.slurm.run("squeue", "-h", "-w", "gpu[001-002]", "-o", "%A").split()
        pool.slurm.run("scancel", *ids)
        wait_for("some are bound", lambda: len(bound(pool)) >= 10, 90, 0.5)
        assert pool.checker.sample().violations == ()
        names = [p["metadata"]["name"] for p in pool.kube.api.items(PODS)]
        assert len(names) == every


def _memory(pool: Cluster) -> dict[str, float]:
    """Resident memory of our daemons in MiB, by the name of the process."""
    found = {}
    for pid in pool.kube.pids():
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        for name, mark in (("bridge-0", "slurmbridge run"), ("extender-0", "extender run")):
            size = re.search(r"VmRSS:\s+(\d+) kB", status)
            if f"-m {mark}" in argv and size:
                found[name] = int(size[1]) / 1024
    return found
