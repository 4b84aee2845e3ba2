"""The planned way on real components: gate, claim, nomination, gate off, bind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import (
    PODS,
    assert_each_pod_has_one_claim,
    bound,
    claims,
    clear,
    condition,
    delete_all,
    events_of,
    get_pod,
    is_bound,
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
GPUS = 64


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    """8 nodes with 8 GPUs; the default namespace is opted in with the policy of manifests/."""
    started = cluster(SlurmConfig(nodes=8, gpus_per_node=8), scheduler=False)
    policy = Path(__file__).parents[2] / "manifests/planned/policy.yaml"
    started.kube.kubectl("apply", "-f", str(policy))
    started.kube.api.patch("/api/v1/namespaces/default", {"metadata": {"labels": LABELS}})
    wait_for("the policy is in force", lambda: _is_gated(started), 20, 0.2)
    with Product(started, sections={"rules": {"lingerS": 5}}) as running:
        yield running


LABELS = {"slurmbridge.dev/planned": "true"}


def _is_gated(cluster: Cluster) -> bool:
    """Whether the API server adds the gate by now."""
    return bool(gates(cluster.kube.api.request("POST", f"{PODS}?dryRun=All", pod("p", gpus=1))))


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def gates(made: dict[str, Any] | None) -> list[str]:
    return [g["name"] for g in (made or {}).get("spec", {}).get("schedulingGates", [])]


def filter_calls(product: Product) -> float:
    found = product.metrics("extender")
    return sum(v for k, v in found.items() if k.startswith("slurmbridge_extender_requests_total"))


def test_the_policy_gates_pods_with_pool_gpus_and_no_others(pool: Cluster) -> None:
    def made(body: dict[str, Any]) -> list[str]:
        """Gates of a pod as the API server would make it."""
        return gates(pool.kube.api.request("POST", f"{PODS}?dryRun=All", body))

    assert made(pod("gpu", gpus=1)) == [keys.GATE]
    assert made(pod("other", gpus=1, gates=["example.org/quota"])) == [
        "example.org/quota",
        keys.GATE,
    ]
    assert made(pod("plain")) == []
    zero = pod("zero")
    zero["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "0"}}
    assert made(zero) == []
    assert made(pod("by-hand", gpus=1, node_name="gpu001")) == []
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "1-2"}
    daemon = pod("daemon", gpus=1)
    daemon["metadata"]["ownerReferences"] = [owner]
    assert made(daemon) == []


def test_a_pod_without_gpus_is_let_out_of_a_gate_that_somebody_wrote(pool: Cluster) -> None:
    zero = pod("zero", gates=[keys.GATE])
    zero["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "0"}}
    pool.kube.api.create_all([zero, pod("none", gates=[keys.GATE])])
    for name in ("zero", "none"):
        wait_for(f"{name} is bound", lambda n=name: is_bound(pool, n), 20)
    assert claims(pool) == {}


def test_gated_pods_are_claimed_nominated_and_bound_where_their_claims_are(
    pool: Cluster, product: Product
) -> None:
    with pool.checker.watch(0.5) as watch:
        pool.kube.api.create_all([pod(f"p{i}", gpus=1 + i % 2) for i in range(40)])
        wait_for("all are bound", lambda: len(bound(pool, "p")) == 40, 40)
    assert watch.violations == []
    assert_each_pod_has_one_claim(pool)
    for each in bound(pool, "p"):
        assert gates(each) == []
        assert each["metadata"]["annotations"][keys.CLAIM].endswith(each["metadata"]["uid"])
    # Best fit: 60 GPUs are on 8 nodes, none of them was left half empty for another.
    assert pool.checker.sample().gpus_used == 60


def test_a_pod_with_another_gate_is_not_claimed_before_that_is_off(pool: Cluster) -> None:
    pool.kube.api.create(pod("quota", gpus=1, gates=["example.org/quota"]))
    time.sleep(2)
    assert not claims(pool)
    pool.kube.api.patch(
        "/api/v1/namespaces/default/pods/quota",
        {"spec": {"schedulingGates": [{"name": keys.GATE}]}},
    )
    wait_for("it is bound", lambda: is_bound(pool, "quota"), 10)


def test_with_a_full_pool_pods_wait_behind_the_gate_and_kube_scheduler_never_tries_them(
    pool: Cluster, product: Product
) -> None:
    jobs = submit(pool, "--gres=gpu:8", "--mem=100", count=8)
    wait_for("Slurm is full", lambda: pool.checker.sample().gpus_used == GPUS, 30)
    wait_for("the bridge knows", lambda: product.cli("status")["gpus"]["free"] == 0, 10)
    before = filter_calls(product)
    pool.kube.api.create_all([pod(f"w{i}", gpus=2) for i in range(30)])
    told = "gpu_busy: slurmbridge: not enough free GPUs"

    def reasons() -> list[str]:
        items = pool.kube.api.items("/api/v1/namespaces/default/pods")
        return [p["metadata"].get("annotations", {}).get(keys.REASON, "") for p in items]

    wait_for("they are told why", lambda: reasons() == [told] * 30, 20, 0.5)
    versions = _versions(pool)
    time.sleep(6)
    assert _versions(pool) == versions, "nothing is written while nothing changes"
    assert condition(pool, "w0").startswith("SchedulingGated")
    assert filter_calls(product) == before
    assert product.cli("explain", "default/w0")["waits"]["nodes"]["gpu_busy"]["count"] == 8
    pool.slurm.run("scancel", str(jobs[3]))
    wait_for("four are bound", lambda: len(bound(pool, "w")) == 4, 30)
    # First come, first served.
    names = sorted(p["metadata"]["creationTimestamp"] for p in bound(pool, "w"))
    assert names[-1] <= min(
        p["metadata"]["creationTimestamp"]
        for p in pool.kube.api.items("/api/v1/namespaces/default/pods")
        if not p["spec"].get("nodeName")
    )
    for each in bound(pool, "w"):
        assert keys.REASON not in each["metadata"]["annotations"]


def _versions(pool: Cluster) -> dict[str, str]:
    items = pool.kube.api.items("/api/v1/namespaces/default/pods")
    return {p["metadata"]["name"]: p["metadata"]["resourceVersion"] for p in items}


def test_a_bridge_killed_in_the_middle_loses_no_pod_and_no_claim(
    pool: Cluster, product: Product
) -> None:
    with pool.checker.watch(0.5) as watch:
        pool.kube.api.create_all([pod(f"k{i}", gpus=1) for i in range(60)])
        for at_least in (3, 20, 40):
            wait_for("some are claimed", lambda n=at_least: len(claims(pool)) >= n, 40, 0.01)
            product.kill9_bridge()
            product.start_bridge()
            product.wait_bridge()
        wait_for("all are bound", lambda: len(bound(pool, "k")) == 60, 90)
    assert watch.violations == []
    wait_for("claims match", lambda: _match(pool), 20, 0.5)


def _match(pool: Cluster) -> bool:
    try:
        assert_each_pod_has_one_claim(pool)
    except AssertionError:
        return False
    return True


def test_a_node_that_kube_scheduler_cannot_use_is_given_back_and_another_one_claimed(
    pool: Cluster, product: Product
) -> None:
    nodes = pool.slurm.node_names
    # The best fit is the node that is partly used, and its port is taken.
    port = [{"containerPort": 9400, "hostPort": 9400}]
    holder = pod("holder", node_name=nodes[2])
    holder["spec"]["containers"][0]["ports"] = port
    pool.kube.api.create(holder)
    submit(pool, "--gres=gpu:4", "--mem=100", f"--nodelist={nodes[2]}")
    wait_for("the job is seen", lambda: product.cli("status")["gpus"]["native"] == 4, 20, 0.3)
    picky = pod("picky", gpus=2)
    picky["spec"]["containers"][0]["ports"] = port
    pool.kube.api.create(picky)
    wait_for("it is bound", lambda: is_bound(pool, "picky"), 30)
    assert (get_pod(pool, "picky") or {})["spec"]["nodeName"] != nodes[2]
    assert_each_pod_has_one_claim(pool)
    assert nodes[2] in product.log("bridge-0")


def test_a_cordoned_node_and_a_node_selector_are_heeded_from_the_start(
    pool: Cluster, product: Product
) -> None:
    nodes = pool.slurm.node_names
    pool.kube.api.patch(f"/api/v1/nodes/{nodes[0]}", {"spec": {"unschedulable": True}})
    try:
        wish = {"nodeSelector": {"kubernetes.io/hostname": nodes[5]}}
        pool.kube.api.create(pod("chosen", gpus=1, spec=wish))
        cordoned = {"nodeSelector": {"kubernetes.io/hostname": nodes[0]}}
        pool.kube.api.create(pod("stuck", gpus=1, spec=cordoned))
        wait_for("it is bound", lambda: is_bound(pool, "chosen"), 10)
        assert (get_pod(pool, "chosen") or {})["spec"]["nodeName"] == nodes[5]
        assert gates(get_pod(pool, "stuck")) == [keys.GATE]
    finally:
        pool.kube.api.patch(f"/api/v1/nodes/{nodes[0]}", {"spec": {"unschedulable": None}})
    wait_for("the other too", lambda: is_bound(pool, "stuck"), 15)


def test_a_gated_pod_that_is_deleted_before_its_gate_is_off_leaves_no_claim(pool: Cluster) -> None:
    pool.kube.api.create_all([pod(f"d{i}", gpus=1) for i in range(30)])
    delete_all(pool)
    # One that was bound and never ran is kept for as long as its processes might run.
    wait_for("no claim is left", lambda: not claims(pool), 60, 0.3)
    assert not events_of(pool, "d0").get("Stray")
