"""Pods that come past us, or say what is not so, on real Slurm and real Kubernetes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.e2e.scene import (
    PODS,
    bound,
    claims,
    clear,
    delete_all,
    events_of,
    get_pod,
    is_bound,
    settled,
    submit,
    wait_for,
)
from tests.support.kube_api import KubeError
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e

RULES = [
    {"namespaces": ["team-a"], "accounts": ["a1", "a2"], "qos": [], "reservations": ["a-res"]},
    {"namespaces": ["team-b"], "serviceAccounts": ["trainer"], "accounts": ["b1"]},
    {"namespaces": ["default"]},
]


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    """4 nodes with 4 GPUs; the policy for strays is changed as the tests go."""
    started = cluster(SlurmConfig(nodes=4, gpus_per_node=4), scheduler=False)
    with Product(started, policy={"identities": RULES}) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def _policy(product: Product, **values: Any) -> None:
    """A changed ConfigMap is taken by the running bridge."""
    path = product.config_path()
    config = yaml.safe_load(path.read_text())
    if config["policy"] | values == config["policy"]:
        return
    name = 'slurmbridge_config_reloads_total{result="ok"}'
    before = product.metrics().get(name, 0)
    config["policy"] |= values
    path.write_text(yaml.safe_dump(config))
    wait_for("the change is taken", lambda: product.metrics().get(name, 0) > before, 20, 0.3)


def _notes(pool: Cluster, name: str) -> dict[str, str]:
    found: dict[str, str] = (get_pod(pool, name) or {"metadata": {}})["metadata"].get(
        "annotations", {}
    )
    return found


def test_a_stray_is_covered_at_once(pool: Cluster, product: Product) -> None:
    _policy(product, stray="cover")
    pool.kube.api.create(pod("past-us", gpus=2, node_name="gpu001"))
    wait_for("it has a claim", lambda: "slurmbridge.dev/claim" in _notes(pool, "past-us"), 15)
    assert settled(pool)
    wait_for("it is told", lambda: "Covered" in events_of(pool, "past-us"), 10)
    assert pool.checker.sample().violations == ()


def test_a_stray_that_has_no_room_is_reported_and_covered_when_there_is(
    pool: Cluster, product: Product
) -> None:
    _policy(product, stray="cover")
    (job,) = submit(pool, "--gres=gpu:4", "--mem=100", "--nodelist=gpu002")
    wait_for("it runs", lambda: pool.slurm.job_field(job, "JobState") == "RUNNING", 15)
    wait_for("the bridge knows", lambda: product.cli("status")["gpus"]["native"] == 4, 15, 0.3)
    pool.kube.api.create(pod("no-room", gpus=2, node_name="gpu002"))
    wait_for("it is reported", lambda: "Stray" in events_of(pool, "no-room"), 60, 0.3)
    assert not claims(pool)
    pool.slurm.run("scancel", str(job))
    wait_for("it is covered", lambda: settled(pool), 75, 0.3)
    assert is_bound(pool, "no-room")


def test_a_stray_is_only_reported_where_policy_says_so_and_nothing_comes_to_its_node(
    pool: Cluster, product: Product
) -> None:
    _policy(product, stray="report")
    pool.kube.api.create(pod("seen", gpus=1, node_name="gpu003"))
    wait_for("it is reported", lambda: "Stray" in events_of(pool, "seen"), 15, 0.2)
    pool.kube.api.create_all([pod(f"full{i}", gpus=4) for i in range(4)])
    wait_for("the others are full", lambda: len(bound(pool, "full")) == 3, 20, 0.2)
    time.sleep(4)
    assert "gpu003" not in {p["spec"]["nodeName"] for p in bound(pool, "full")}
    assert "deletionTimestamp" not in (get_pod(pool, "seen") or {})["metadata"]
    assert "slurmbridge.dev/claim" not in _notes(pool, "seen")
    delete_all(pool, ["seen"])
    wait_for("its node is free again", lambda: len(bound(pool, "full")) == 4, 20, 0.2)


def test_a_stray_is_evicted_where_policy_says_so_and_nobody_else(
    pool: Cluster, product: Product
) -> None:
    _policy(product, stray="evict")
    pool.kube.api.create(pod("good", gpus=1))
    wait_for("it runs", lambda: is_bound(pool, "good"), 15)
    node = (get_pod(pool, "good") or {})["spec"]["nodeName"]
    pool.kube.api.create(pod("gate-crasher", gpus=1, node_name=node, stop_s=2))
    wait_for(
        "it is told why",
        lambda: "claim lost" in _notes(pool, "gate-crasher").get("slurmbridge.dev/reason", ""),
        15,
    )
    wait_for("it is gone", lambda: get_pod(pool, "gate-crasher") is None, 20)
    assert settled(pool)
    assert "deletionTimestamp" not in (get_pod(pool, "good") or {})["metadata"]


@pytest.mark.parametrize("policy", ["report", "evict"])
def test_a_claim_that_a_pods_owner_wrote_himself_makes_no_difference(
    pool: Cluster, product: Product, policy: str
) -> None:
    """While no bridge looks: a pod on a node by hand, with annotations as ours would be."""
    _policy(product, stray=policy)
    pool.kube.api.create(pod("honest", gpus=2))
    wait_for("it runs", lambda: is_bound(pool, "honest"), 15)
    (job,) = claims(pool)
    node = (get_pod(pool, "honest") or {})["spec"]["nodeName"]
    # A slurmctld that has started a moment ago may have forgotten anything.
    booted = pool.slurm.run("scontrol", "show", "config").partition("BOOT_TIME")[2].split()[1]
    while (
        time.mktime(time.localtime()) - time.mktime(time.strptime(booted, "%Y-%m-%dT%H:%M:%S")) < 12
    ):
        time.sleep(0.5)
    product.kill9_bridge()
    made = pool.kube.api.create(pod("forger", gpus=2, node_name=node))
    notes = {
        "slurmbridge.dev/claim": f"{job}/{made['metadata']['uid']}",
        "slurmbridge.dev/gpus": _notes(pool, "honest")["slurmbridge.dev/gpus"],
    }
    pool.kube.api.patch(f"{PODS}/forger", {"metadata": {"annotations": notes}})
    product.start_bridge()
    product.wait_bridge()
    if policy == "evict":
        wait_for("it is evicted", lambda: get_pod(pool, "forger") is None, 30, 0.2)
    else:
        wait_for("it is reported", lambda: "Stray" in events_of(pool, "forger"), 30, 0.2)
        time.sleep(3)
        assert is_bound(pool, "forger")
    # Whose claim it named has lost nothing.
    assert list(claims(pool)) == [job]
    assert "deletionTimestamp" not in (get_pod(pool, "honest") or {})["metadata"]
    if policy == "report":
        delete_all(pool, ["forger"])


# Identity.


def _create(pool: Cluster, namespace: str, name: str, **annotations: str) -> None:
    notes = {f"slurmbridge.dev/{key}": value for key, value in annotations.items()}
    pool.kube.api.create(pod(name, namespace=namespace, gpus=1, annotations=notes))


def _told(pool: Cluster, namespace: str, name: str) -> str:
    """What kube-scheduler was told of a pod; "bound" when it has a node."""
    found = pool.kube.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
    if found["spec"].get("nodeName"):
        return "bound"
    for entry in found["status"].get("conditions", []):
        if entry["type"] == "PodScheduled":
            return str(entry.get("message", ""))
    return ""


def test_a_pod_takes_no_account_reservation_or_user_that_its_namespace_may_not(
    pool: Cluster, product: Product
) -> None:
    _policy(product, stray="cover")
    api = pool.kube.api
    for name in ("team-a", "team-b", "team-c"):
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    trainer = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer"}}
    api.create(trainer | {"metadata": {"name": "trainer", "namespace": "team-b"}})
    _create(pool, "team-a", "default-account")
    _create(pool, "team-a", "other-account", account="a2")
    body = pod("trainer", namespace="team-b", gpus=1, spec={"serviceAccountName": "trainer"})
    api.create(body)
    refused = {
        ("team-a", "others-account"): {"account": "b1"},
        ("team-a", "root"): {"account": "root"},
        ("team-a", "qos"): {"qos": "high"},
        ("team-a", "partition"): {"partition": "main"},
        ("team-a", "reservation"): {"reservation": "b-res"},
        ("team-b", "no-rule-for-this-account"): {"account": "b1"},
        ("team-c", "no-rule"): {},
        ("default", "no-choice"): {"account": "a1"},
    }
    for (namespace, name), wish in refused.items():
        _create(pool, namespace, name, **wish)
    good = {("team-a", "default-account"): "a1", ("team-a", "other-account"): "a2"}
    good |= {("team-b", "trainer"): "b1"}
    for namespace, name in good:
        wait_for(name, lambda n=namespace, p=name: _told(pool, n, p) == "bound", 20)
    for namespace, name in refused:
        wait_for(name, lambda n=namespace, p=name: "identity" in _told(pool, n, p), 20)
    text = pool.slurm.run("squeue", "-h", "--name=slurmbridge-test", "-o", "%k|%a|%u|%P|%v")
    rows = [line.split("|") for line in text.splitlines()]
    accounts = {row[0].partition("ref=")[2]: row[1] for row in rows}
    assert accounts == {f"{n}/{p}": account for (n, p), account in good.items()}
    assert {(row[2], row[3], row[4]) for row in rows} == {("root", "claims", "(null)")}
    for namespace in ("team-a", "team-b", "team-c"):
        api.delete(f"/api/v1/namespaces/{namespace}/pods")
    wait_for("their claims are ended", lambda: not claims(pool), 20)


# With the admission policies.


def test_with_the_policies_our_own_daemons_go_on_and_the_ways_past_are_closed(
    pool: Cluster, product: Product
) -> None:
    kube = pool.kube
    kube.kubectl("apply", "-k", "manifests/admission")
    kube.kubectl("apply", "-k", "manifests/admission/strict")
    try:

        def is_closed() -> bool:
            try:
                kube.api.create(pod("by-hand", gpus=1, node_name="gpu001"))
            except KubeError:
                return True
            delete_all(pool, ["by-hand"])
            return False

        wait_for("a node by hand is refused", is_closed, 30, 0.3)
        with pytest.raises(KubeError, match="written by"):
            kube.api.create(pod("forged", gpus=1, annotations={"slurmbridge.dev/gpus": "0"}))
        kube.api.create(pod("reactive", gpus=2))
        kube.api.create(pod("planned", gpus=2, gates=("slurmbridge.dev/claim",)))
        wait_for("both ways lead", lambda: len(bound(pool)) == 2, 20)
        wait_for("each has its claim", lambda: settled(pool), 10)
        # What the bridge writes on a pod: the reason, when its claim is lost.
        (first, *_) = claims(pool)
        pool.slurm.run("scancel", str(first))
        wait_for("one is evicted", lambda: len(bound(pool)) == 1, 20)
        wait_for("the rest match", lambda: settled(pool), 10)
    finally:
        kube.kubectl("delete", "-k", "manifests/admission")
        kube.kubectl("delete", "-k", "manifests/admission/strict")
