"""A long queue of held jobs in Slurm, and how long a single pod takes beside it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tests.e2e.scene import PODS, is_bound, wait_for
from tests.support.kube_objects import pod
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

BINDING_S: Final = 10.0
"""Longest wait for the Binding of a pod that has room."""


def queue_config() -> SlurmConfig:
    """16 nodes of 8 GPUs. bf_interval is Slurm's default: with less, backfill of 5,000 costs much."""
    return SlurmConfig(nodes=16, gpus_per_node=8, bf_interval_s=30, extra=("MaxJobCount=20000",))


def fill_queue(cluster: Cluster, jobs: int) -> None:
    """Submit held jobs of one GPU, and wait until slurmctld lists as many."""
    script = cluster.kube.dir / "held.sh"
    script.write_text("#!/bin/sh\n: > /tmp/never\n")
    options = "-H -Q --gres=gpu:1 -o /dev/null -D /"
    submits = f"seq {jobs} | xargs -P 4 -I @ sbatch {options} {script} @"
    cluster.slurm.run("sh", "-c", submits, timeout_s=240)
    wait_for("all jobs wait", lambda: waiting_jobs(cluster) == jobs, 60, 0.5)


def empty_queue(cluster: Cluster) -> None:
    """Cancel what waits."""
    cluster.slurm.run("scancel", "--state=PENDING", "--user=root", timeout_s=120)
    wait_for("the queue is gone", lambda: not waiting_jobs(cluster), 60, 0.5)


def waiting_jobs(cluster: Cluster) -> int:
    """How many jobs wait in Slurm."""
    return len(cluster.slurm.run("squeue", "-h", "-t", "PD", "-o", "%A").split())


def latency_s(cluster: Cluster, name: str) -> float:
    """Create -> bound of one pod alone, seconds; returns when the pod is over."""
    began = time.monotonic()
    cluster.kube.api.create(pod(name, gpus=1, run_s=0.2))
    wait_for("it is bound", lambda: is_bound(cluster, name), BINDING_S, 0.001)
    took = time.monotonic() - began
    phase = lambda: cluster.kube.api.get(f"{PODS}/{name}")["status"]["phase"]  # noqa: E731
    wait_for("it is over", lambda: phase() == "Succeeded", 10)
    return took
