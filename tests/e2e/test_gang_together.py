"""Gangs whose nodes kube-scheduler cannot use, on real components: they move as a whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import (
    PODS,
    bound,
    claims,
    clear,
    get_pod,
    wait_for,
    wait_seen_free,
)
from tests.support.group_objects import own_pods
from tests.support.kube_objects import pod
from tests.support.pod_history import PodHistory
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e
NODES, PER_RACK = 8, 2
RACK = "example.org/rack"
ONE_RACK = {keys.TOPOLOGY: "required:rack"}
PORT = [{"containerPort": 9400, "hostPort": 9400}]
VOLUMES = "/api/v1/persistentvolumes"
VOLUME_CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"


@pytest.fixture(scope="module", params=[False, True], ids=["claim-each", "one-claim"])
def product(cluster: ClusterFactory, request: pytest.FixtureRequest) -> Iterator[Product]:
    started = cluster(
        SlurmConfig(nodes=NODES, gpus_per_node=8),
        scheduler=False,
        labels=lambda i, _: {RACK: f"r{i // PER_RACK}"},
        controller_manager=True,
    )
    sections = {"pool": {"topologyLabels": [RACK]}, "rules": {"gangsAsOne": request.param}}
    with Product(started, sections=sections) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    wait_seen_free(product, NODES * 8)
    yield product.cluster
    clear(product.cluster)


def gated(name: str, size: int, notes: dict[str, str] | None = None) -> list[dict[str, Any]]:
    made = own_pods(name, size, 8, notes)
    for each in made:
        each["spec"]["schedulingGates"] = [{"name": keys.GATE}]
    return made


def rack_of(each: dict[str, Any]) -> int:
    return (int(each["spec"]["nodeName"][3:]) - 1) // PER_RACK


def wait_bound(pool: Cluster, prefix: str, count: int) -> set[int]:
    """Racks of the gang, once all of it is bound."""
    wait_for("all are bound", lambda: len(bound(pool, prefix)) == count, 90)
    return {rack_of(each) for each in bound(pool, prefix)}


def assert_bound_together(history: PodHistory, prefix: str, size: int) -> None:
    """All were bound within the time that as many Bindings take, and none before."""
    first: dict[str, float] = {}
    for moment in history.moments:
        name = moment.pod["metadata"]["name"]
        if name.startswith(prefix) and moment.pod["spec"].get("nodeName"):
            first.setdefault(name, moment.at)
    assert len(first) == size
    spread_s = max(first.values()) - min(first.values())
    print(f"{prefix}: bound within {spread_s:.2f} s of each other")


def test_a_port_that_is_taken_in_three_racks_moves_the_gang_to_the_fourth(pool: Cluster) -> None:
    for i in (1, 3, 5):
        name = f"gpu{i:03d}"
        taken = pod(f"holder-{i}", node_name=name)
        taken["spec"]["containers"][0]["ports"] = PORT
        pool.kube.api.create(taken)
    wait_for("the ports are taken", lambda: len(bound(pool, "holder-")) == 3, 20)
    made = gated("port", 2, ONE_RACK)
    for each in made:
        each["spec"]["containers"][0]["ports"] = PORT
    with PodHistory(pool.kube) as history:
        pool.kube.api.create_all(made)
        assert wait_bound(pool, "port-", 2) == {3}
        assert_bound_together(history, "port-", 2)


def test_members_with_local_volumes_find_the_nodes_where_these_are(pool: Cluster) -> None:
    made = gated("vol", 2)
    for i, each in enumerate(made):
        add_local_volume(pool, f"disk-{i}", node=f"gpu{6 - i:03d}")
        each["spec"]["volumes"] = [
            {"name": "d", "persistentVolumeClaim": {"claimName": f"disk-{i}"}}
        ]
    try:
        with PodHistory(pool.kube) as history:
            pool.kube.api.create_all(made)
            assert wait_bound(pool, "vol-", 2) == {2}
            assert_bound_together(history, "vol-", 2)
        nodes = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in bound(pool, "vol-")}
        assert nodes == {"vol-0": "gpu006", "vol-1": "gpu005"}
    finally:
        clear(pool)
        for i in range(2):
            pool.kube.api.delete(f"{VOLUME_CLAIMS}/disk-{i}")
            pool.kube.api.delete(f"{VOLUMES}/disk-{i}")


def add_local_volume(pool: Cluster, name: str, node: str) -> None:
    """A volume of one node, and a claim that is bound to it."""
    api, size = pool.kube.api, {"storage": "1Gi"}
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    spec = {
        "capacity": size,
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "",
        "local": {"path": "/mnt/disk"},
        "claimRef": {"namespace": "default", "name": name},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [term]}]}},
    }
    about = {"apiVersion": "v1", "metadata": {"name": name}}
    api.create(about | {"kind": "PersistentVolume", "spec": spec})
    wanted = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "",
        "resources": {"requests": size},
        "volumeName": name,
    }
    api.request("POST", VOLUME_CLAIMS, about | {"kind": "PersistentVolumeClaim", "spec": wanted})

    def is_bound() -> bool:
        made = api.find(f"{VOLUME_CLAIMS}/{name}") or {}
        return bool(made.get("status", {}).get("phase") == "Bound")

    wait_for("the volume is bound", is_bound, 30, 0.2)


def test_a_rack_that_is_tainted_is_left_out_from_the_start(pool: Cluster, product: Product) -> None:
    taint = {"key": "example.org/broken", "effect": "NoSchedule"}
    tainted = [f"gpu{i:03d}" for i in range(1, 5)]
    for name in tainted:
        pool.kube.api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": [taint]}})
    try:
        pool.kube.api.create_all(gated("taint", 2, ONE_RACK))
        assert wait_bound(pool, "taint-", 2) <= {2, 3}
        assert product.cli("explain", "default/taint-0")["group"]["attempts"] == 1
    finally:
        for name in tainted:
            pool.kube.api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})


@pytest.mark.timeout(600)
def test_while_no_place_can_be_used_nothing_is_held_and_its_pods_are_told(pool: Cluster) -> None:
    holders = []
    for i in (1, 2):
        holders.append(pod(f"holder-{i}", node_name=f"gpu{i:03d}"))
        holders[-1]["spec"]["containers"][0]["ports"] = PORT
        pool.kube.api.create(holders[-1])
    wait_for("the ports are taken", lambda: len(bound(pool, "holder-")) == len(holders), 20)
    made = gated("none", 2)
    for each in made:
        each["spec"]["nodeSelector"] = {RACK: "r0"}
        each["spec"]["containers"][0]["ports"] = PORT
    pool.kube.api.create_all(made)

    def is_told() -> bool:
        notes = ((get_pod(pool, "none-0") or {}).get("metadata") or {}).get("annotations") or {}
        return str(notes.get(keys.REASON, "")).startswith("topology: no node holds it")

    # Each place is tried for as long as kube-scheduler may take to look again.
    wait_for("it is told", is_told, 240)

    def holds_nothing() -> bool:
        if claims(pool):
            return False
        time.sleep(3)
        return not claims(pool)

    wait_for("nothing is held", holds_nothing, 90)
    assert not bound(pool, "none-")


def test_a_member_behind_a_gate_of_others_keeps_all_back_and_one_without_a_gate_does_not(
    pool: Cluster,
) -> None:
    made = gated("gate", 3)
    made[1]["spec"]["schedulingGates"].append({"name": "example.org/quota"})
    made[2]["spec"]["schedulingGates"] = []
    pool.kube.api.create_all(made)

    def reason() -> str:
        notes = ((get_pod(pool, "gate-0") or {}).get("metadata") or {}).get("annotations") or {}
        return str(notes.get(keys.REASON, ""))

    wait_for("it is told", lambda: "gate-1 is behind the gate example.org/quota" in reason(), 20)
    assert not claims(pool)
    assert not bound(pool, "gate-")
    left = {"spec": {"schedulingGates": [{"name": keys.GATE}]}}
    pool.kube.api.patch(f"{PODS}/gate-1", left)
    wait_bound(pool, "gate-", 3)
