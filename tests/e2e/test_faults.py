"""Processes die, slurmctld forgets, and afterwards every pod has its claim and every claim its pod."""

from __future__ import annotations

import threading
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
    get_pod,
    is_bound,
    settled,
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
    """16 nodes with 8 GPUs, two bridges, two extenders."""
    started = cluster(SlurmConfig(nodes=16, gpus_per_node=8), scheduler=False)
    with Product(started, bridges=2, extenders=2) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def _throw_in(pool: Cluster, count: int) -> threading.Thread:
    """Create pods over about four seconds, beside the test."""

    def work() -> None:
        for i in range(count):
            pool.kube.api.create(pod(f"p{i}", gpus=1))
            time.sleep(4 / count)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_bridge_killed_in_the_middle_of_100_binds(pool: Cluster, product: Product) -> None:
    with pool.checker.watch(0.5) as watch:
        thread = _throw_in(pool, 100)
        wait_for("some are bound", lambda: len(bound(pool)) >= 20, 30)
        product.kill9_bridge(0)
        time.sleep(0.5)
        product.start_bridge(0)
        thread.join()
        wait_for("all are bound", lambda: len(bound(pool)) == 100, 60, 0.3)
        wait_for("claims and pods match", lambda: settled(pool), 30, 0.3)
    assert watch.double_owned == []
    assert_each_pod_has_one_claim(pool)


def test_leading_bridge_killed_and_the_other_takes_over(pool: Cluster, product: Product) -> None:
    pool.kube.api.create_all([pod(f"before{i}", gpus=1) for i in range(10)])
    wait_for("bound", lambda: len(bound(pool)) == 10, 20)
    leader = next(i for i in (0, 1) if product.metrics("bridge", i)["slurmbridge_leader"] == 1)
    product.kill9_bridge(leader)
    pool.kube.api.create_all([pod(f"after{i}", gpus=1) for i in range(10)])
    wait_for("the other leads and binds", lambda: len(bound(pool)) == 20, 30)
    product.start_bridge(leader)
    product.wait_bridge(leader)
    wait_for("claims and pods match", lambda: settled(pool), 10)
    # Asked by either address, the one that leads answers.
    wait_for("it says so", lambda: product.cli("status", i=leader)["podsBound"] == 20, 10)


def test_extender_killed_in_the_middle_of_100_binds(pool: Cluster, product: Product) -> None:
    with pool.checker.watch(0.5) as watch:
        thread = _throw_in(pool, 100)
        wait_for("some are bound", lambda: len(bound(pool)) >= 20, 30)
        product.kill9_extender(0)
        time.sleep(0.5)
        product.start_extender(0)
        thread.join()
        wait_for("all are bound", lambda: len(bound(pool)) == 100, 60, 0.3)
        wait_for("claims and pods match", lambda: settled(pool), 90, 0.3)
    assert watch.double_owned == []
    assert_each_pod_has_one_claim(pool)


def test_slurmctld_killed_in_the_middle_of_100_binds(pool: Cluster, product: Product) -> None:
    """Claims that slurmctld forgot are made again, with the same indices, before anything else."""
    thread = _throw_in(pool, 100)
    wait_for("some are bound", lambda: len(bound(pool)) >= 30, 30)
    # More than there is room for: native jobs wait for every GPU that becomes free.
    submit(pool, "--gres=gpu:1", "--mem=100", count=120)
    pool.slurm.kill9_slurmctld()
    time.sleep(0.5)
    pool.slurm.start_slurmctld()
    thread.join()
    wait_for("claims and pods match", lambda: settled(pool), 60, 0.3)
    # Right after the crash a native job may take the GPU of a pod whose claim was forgotten, until
    # the pod is gone; from here on no GPU has two owners.
    with pool.checker.watch(0.5) as watch:
        time.sleep(5)
        # Pods that wait may be on their way into a claim at the very moment of a look.
        wait_for("they still match", lambda: settled(pool), 30, 0.3)
    assert watch.double_owned == []
    wait_for("no promise is broken", lambda: pool.checker.sample().violations == (), 30, 0.3)


def test_slurmctld_away_running_pods_stay_and_the_rest_of_kubernetes_goes_on(
    pool: Cluster, product: Product
) -> None:
    pool.kube.api.create_all([pod(f"old{i}", gpus=2) for i in range(5)])
    wait_for("they run", lambda: len(bound(pool)) == 5, 20)
    pool.slurm.stop_slurmctld()
    time.sleep(6)
    pool.kube.api.create(pod("waits", gpus=1))
    pool.kube.api.create(pod("cpu-only"))
    wait_for("a pod without GPUs is bound", lambda: is_bound(pool, "cpu-only"), 10)
    wait_for("the reason is told", lambda: "slurmbridge" in condition(pool, "waits"), 45)
    assert not is_bound(pool, "waits")
    assert len(bound(pool, "old")) == 5
    assert not any(p["metadata"].get("deletionTimestamp") for p in bound(pool, "old"))
    pool.slurm.start_slurmctld()
    wait_for("all is well again", lambda: is_bound(pool, "waits"), 10)
    wait_for("claims and pods match", lambda: settled(pool), 10)
    assert len(bound(pool, "old")) == 5


def test_api_server_restart_loses_nothing(pool: Cluster, product: Product) -> None:
    pool.kube.api.create_all([pod(f"r{i}", gpus=1, run_s=6) for i in range(10)])
    wait_for("they run", lambda: len(bound(pool)) == 10, 20)
    pool.kube.kill9_api()
    time.sleep(2)
    pool.kube.start_api()
    pool.kube.api.create(pod("afterwards", gpus=1))
    wait_for("a new pod is bound", lambda: is_bound(pool, "afterwards"), 30)
    wait_for("the ended pods' claims are ended", lambda: len(claims(pool)) == 1, 40)
    wait_for("claims and pods match", lambda: settled(pool), 10)


def test_a_cancelled_claim_whose_node_is_dead_is_not_lost(pool: Cluster, product: Product) -> None:
    """A force-deleted pod on a node that is not ready keeps its claim until the node is gone."""
    pool.kube.api.create(pod("orphan", gpus=8))
    wait_for("it runs", lambda: is_bound(pool, "orphan"), 10)
    node = (get_pod(pool, "orphan") or {})["spec"]["nodeName"]
    api = pool.kube.api
    api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"hollow.test/kubelet": None}}})
    ready = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": ""}
    api.patch(
        f"/api/v1/nodes/{node}/status",
        {"status": {"conditions": [ready]}},
        "application/strategic-merge-patch+json",
    )
    time.sleep(1)
    api.delete(f"{PODS}/orphan", grace_s=0)
    wait_for("the object is gone", lambda: get_pod(pool, "orphan") is None, 20)
    time.sleep(8)
    assert len(claims(pool)) == 1
    body = api.get(f"/api/v1/nodes/{node}")
    api.delete(f"/api/v1/nodes/{node}")
    wait_for("the claim is ended", lambda: not claims(pool), 70)
    pool.kube.create_nodes([body["metadata"]["name"]])
