"""The main job on real Slurm and real Kubernetes: one pool, two schedulers, no GPU given twice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.scene import (
    PODS,
    assert_each_pod_has_one_claim,
    bound,
    claims,
    clear,
    condition,
    delete_all,
    event_of,
    get_pod,
    is_bound,
    settled,
    stays,
    submit,
    wait_for,
)
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    """32 nodes with 8 GPUs, shared GPU by GPU."""
    started = cluster(SlurmConfig(nodes=32, gpus_per_node=8), scheduler=False)
    # Without grace minutes a pod of 10 s needs a claim of one minute, Slurm's smallest.
    with Product(started, policy={"graceMinutes": 0}) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def test_pods_and_native_jobs_thrown_in_together_never_share_a_gpu(
    pool: Cluster, product: Product
) -> None:
    with pool.checker.watch(0.5) as watch:
        jobs = submit(pool, "--gres=gpu:1", "--mem=100", count=100)
        pool.kube.api.create_all([pod(f"a{i}", gpus=1) for i in range(100)])
        jobs += submit(pool, "--gres=gpu:1", "--mem=100", count=100)
        pool.kube.api.create_all([pod(f"b{i}", gpus=1) for i in range(100)])

        def all_gpus_are_used() -> bool:
            sample = pool.checker.sample()
            is_full = sample.gpus_used == sample.gpus_total == 256
            bound = sample.bound  # a moment after its claim
            return is_full and bound == sample.claims_running == 256 - sample.native_running

        wait_for("all 256 GPUs are used by pods and jobs", all_gpus_are_used, 120, 1.0)
    assert len(watch.samples) >= 3
    assert watch.violations == []
    # The checker reads Slurm itself; the bridge knows with its next poll.
    wait_for("the bridge knows", lambda: product.cli("status")["gpus"]["free"] == 0, 30)


def test_with_slurm_full_a_pod_waits_with_the_reason_and_is_bound_when_a_job_ends(
    pool: Cluster, product: Product
) -> None:
    jobs = submit(pool, "--gres=gpu:8", "--mem=100", count=32)
    wait_for("Slurm is full", lambda: pool.checker.sample().gpus_used == 256, 30)
    wait_for("the bridge knows", lambda: product.cli("status")["gpus"]["free"] == 0, 30)
    pool.kube.api.create(pod("late", gpus=2))
    wait_for("it is refused", lambda: "free GPUs" in condition(pool, "late"), 10)
    assert not is_bound(pool, "late")
    explained = product.cli("explain", "default/late")
    assert explained["waits"]["nodes"]["gpu_busy"]["count"] == 32
    pool.slurm.run("scancel", str(jobs[7]))
    wait_for("it is bound", lambda: is_bound(pool, "late"), 30)
    assert_each_pod_has_one_claim(pool)


def test_a_finished_pod_gives_its_gpus_back_and_a_running_one_does_not(pool: Cluster) -> None:
    pool.kube.api.create(pod("short", gpus=8, run_s=1))
    pool.kube.api.create(pod("long", gpus=8))
    wait_for("both ran", lambda: len(claims(pool)) == 2, 10)
    wait_for("one claim is left", lambda: len(claims(pool)) == 1, 10)
    assert settled(pool)
    assert is_bound(pool, "long")


def test_a_deleted_pod_keeps_its_claim_until_its_containers_have_stopped(pool: Cluster) -> None:
    pool.kube.api.create(pod("stubborn", gpus=4, stop_s=4, grace_s=30))
    wait_for("it runs", lambda: is_bound(pool, "stubborn"), 10)
    began = time.monotonic()
    pool.kube.api.delete(f"{PODS}/stubborn")
    stays("its claim", lambda: len(claims(pool)) == 1, 3, began)
    wait_for("the claim is ended", lambda: not claims(pool), 20)


def test_scancel_of_a_claim_evicts_the_pod_and_its_gpus_wait_for_it(
    pool: Cluster, product: Product
) -> None:
    names = pool.slurm.node_names
    submit(pool, "--gres=gpu:8", "--mem=100", f"--exclude={names[0]}", count=31)
    wait_for("one node is left", lambda: pool.checker.sample().gpus_used == 248, 30)
    pool.kube.api.create(pod("victim", gpus=8, stop_s=4, grace_s=30))
    wait_for("it runs", lambda: is_bound(pool, "victim"), 15)
    (job,) = claims(pool)
    pool.kube.api.create(pod("heir", gpus=8))
    pool.slurm.run("scancel", str(job))
    wait_for(
        "it is being evicted",
        lambda: (get_pod(pool, "victim") or {}).get("metadata", {}).get("deletionTimestamp"),
        10,
    )
    assert "Slurm has ended the claim" in event_of(pool, "victim", "ClaimLost")
    while get_pod(pool, "victim") is not None:
        assert not is_bound(pool, "heir")
        time.sleep(0.1)
    wait_for("the next pod gets them", lambda: is_bound(pool, "heir"), 10)


def test_a_planned_native_job_keeps_its_start_while_short_pods_run_before_it(
    pool: Cluster, product: Product
) -> None:
    # 20 nodes are busy for two minutes; the big job needs all 32 of them then.
    submit(pool, "--gres=gpu:8", "--mem=100", "--nodes=1", "--time=2", seconds=115, count=20)
    wait_for("they run", lambda: pool.checker.sample().gpus_used == 160, 30)
    (big,) = submit(
        pool, "--gres=gpu:8", "--mem=100", "--nodes=32", "--time=5", "--exclusive", seconds=5
    )

    def planned() -> float:
        text = pool.slurm.run("squeue", "-h", f"--jobs={big}", "--format=%S").strip()
        return 0.0 if text in ("N/A", "") else _epoch(text)

    wait_for("Slurm has planned it", planned, 30)
    first = planned()
    wait_for(
        "the bridge knows the plan",
        lambda: product.cli("who", pool.slurm.node_names[25])["planStart"],
        10,
    )
    pool.kube.api.create(pod("endless", gpus=1))
    pool.kube.api.create(pod("too-long", gpus=1, annotations={"slurmbridge.dev/duration": "1h"}))
    short = {"slurmbridge.dev/duration": "10s"}
    pool.kube.api.create_all(
        [pod(f"gap{i}", gpus=1, annotations=short, run_s=3) for i in range(100)]
    )
    # More than the 96 GPUs that are free, and few enough for a slow machine to bind them all before
    # the planned start is too near for any of them.
    wait_for("all 100 ran in the gaps", lambda: len(_given_nodes(pool, "gap")) == 100, 55, 0.3)
    wait_for(
        "it is told so", lambda: "planned for a pending Slurm job" in condition(pool, "endless"), 30
    )
    assert not is_bound(pool, "endless")
    assert not is_bound(pool, "too-long")

    def start_time() -> float:
        text = pool.slurm.job_field(big, "StartTime")
        return 0.0 if text in (None, "Unknown") else _epoch(text)

    wait_for(
        "the big job runs",
        lambda: pool.slurm.job_field(big, "JobState") in ("RUNNING", "COMPLETED", "COMPLETING"),
        180,
        0.5,
    )
    # Whoever is let in wrongly holds the big job up for an hour or for ever.
    assert start_time() - first <= 60


def _given_nodes(pool: Cluster, prefix: str) -> list[str]:
    """Pods that have or had a node."""
    names = [p["metadata"]["name"] for p in pool.kube.api.items(PODS) if p["spec"].get("nodeName")]
    return [name for name in names if name.startswith(prefix)]


def _epoch(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def test_hostile_requests_get_a_verdict_and_never_a_claim(pool: Cluster, product: Product) -> None:
    evil = "x; touch /tmp/owned\n$(reboot) `id` ' \" --uid=0"
    cases = {
        "evil-account": {"slurmbridge.dev/account": evil},
        "evil-reservation": {"slurmbridge.dev/reservation": "--uid=root"},
        "evil-qos": {"slurmbridge.dev/qos": "a" * 5000},
        "evil-duration": {"slurmbridge.dev/duration": "-1h; scancel -u root"},
        "evil-partition": {"slurmbridge.dev/partition": "main"},
        "evil-mode": {"slurmbridge.dev/mode": "sudo"},
    }
    for name, notes in cases.items():
        pool.kube.api.create(pod(name, gpus=1, annotations=notes))
    pool.kube.api.create(pod("greedy", gpus=1_000_000_000))
    pool.kube.api.create(pod("n" * 253, gpus=1))
    pool.kube.api.create(pod("zero", gpus=0))
    wait_for("the long name is bound", lambda: is_bound(pool, "n" * 253), 15)
    wait_for("no GPU is no business of ours", lambda: is_bound(pool, "zero"), 15)
    for name in cases:
        wait_for(f"{name} is refused", lambda n=name: "slurmbridge" in condition(pool, n), 15)
        assert not is_bound(pool, name)
    assert not is_bound(pool, "greedy")
    assert len(claims(pool)) == 1


def test_every_pod_of_one_bind_storm_has_its_own_indices(pool: Cluster) -> None:
    pool.kube.api.create_all([pod(f"s{i}", gpus=1 + i % 4) for i in range(60)])
    wait_for("all are bound", lambda: len(bound(pool, "s")) == 60, 60)
    sample = pool.checker.sample()
    assert sample.violations == ()
    assert sample.bound == 60
    delete_all(pool)
    wait_for("all claims are ended", lambda: not claims(pool), 20)
