"""Node state between a real Kubernetes and a real Slurm: carried over, and never back again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.scene import PODS, claims, clear, condition, get_pod, is_bound, submit, wait_for
from tests.support.kube_api import STRATEGIC
from tests.support.kube_objects import HOLLOW, node, pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e

OURS = "slurmbridge: cluster test: node"


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    """12 nodes; silence is carried over after 4 s, wellness after 2 s; at most 2 silent ones."""
    started = cluster(SlurmConfig(nodes=12, gpus_per_node=4), scheduler=False)
    sync = {"notReadyS": 4, "resumeS": 2, "share": 0.2}
    sections = {"nodeSync": sync, "rules": {"nodeAnnotationS": 1, "lingerS": 3}}
    with Product(started, sections=sections) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    pool = product.cluster
    yield pool
    clear(pool)
    for name in pool.slurm.node_names:
        _ready(pool, name, True)
        _cordon(pool, name, False)
    pool.slurm.run(*_update("gpu[001-012]", "state=resume"), check=False)
    wait_for("all nodes are usable", lambda: not _drained(pool), 30, 0.2)


def _cordon(pool: Cluster, name: str, value: bool) -> None:
    pool.kube.api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": value}})


def _ready(pool: Cluster, name: str, value: bool) -> None:
    """As the node controller tells that a kubelet is silent, or the kubelet that it is not."""
    entry = {
        "type": "Ready",
        "status": "True" if value else "Unknown",
        "reason": "KubeletReady" if value else "NodeStatusUnknown",
        "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    body = {"status": {"conditions": [entry]}}
    pool.kube.api.patch(f"/api/v1/nodes/{name}/status", body, STRATEGIC)


def _update(name: str, *changes: str) -> tuple[str, ...]:
    return ("scontrol", "update", f"nodename={name}", *changes)


def _drained(pool: Cluster) -> dict[str, str]:
    """Node -> reason of all that are drained or down, read without our code."""
    text = pool.slurm.run("sinfo", "-h", "-N", "-p", "claims", "-o", "%N|%T|%E")
    rows = [line.split("|") for line in text.splitlines()]
    return {n: why for n, state, why in rows if state.startswith(("drain", "down", "fail"))}


def _shown(pool: Cluster, name: str) -> dict[str, Any]:
    """The condition SlurmReady of a node."""
    found = pool.kube.api.get(f"/api/v1/nodes/{name}")["status"]["conditions"]
    return next((c for c in found if c["type"] == "SlurmReady"), {})


def _spec(pool: Cluster, name: str) -> dict[str, Any]:
    return pool.kube.api.get(f"/api/v1/nodes/{name}")["spec"]


def test_a_cordon_is_a_drain_and_its_end_is_the_end_of_the_drain(
    pool: Cluster, product: Product
) -> None:
    pool.kube.api.create(pod("stays", gpus=1))
    wait_for("it runs", lambda: is_bound(pool, "stays"), 15)
    name = (get_pod(pool, "stays") or {})["spec"]["nodeName"]
    _cordon(pool, name, True)
    wait_for("it is drained", lambda: name in _drained(pool), 15, 0.2)
    assert _drained(pool) == {name: f"{OURS} {name} is cordoned"}
    wait_for(
        "Kubernetes is shown why",
        lambda: _shown(pool, name).get("reason") == "DrainedForKubernetes",
        20,
    )
    wait_for(
        "status names it", lambda: product.cli("status")["nodeSync"]["drained"] == [name], 10, 0.5
    )
    assert len(claims(pool)) == 1
    _cordon(pool, name, False)
    wait_for("it is resumed", lambda: not _drained(pool), 20, 0.2)
    wait_for("Kubernetes is shown", lambda: _shown(pool, name).get("status") == "True", 20)
    # Running pods have not noticed.
    assert len(claims(pool)) == 1
    assert "deletionTimestamp" not in (get_pod(pool, "stays") or {})["metadata"]


def test_a_drain_by_an_operator_is_shown_is_no_cordon_and_stays_his(pool: Cluster) -> None:
    name = "gpu003"
    pool.slurm.run(*_update(name, "state=drain", "reason=bad dimm"))
    wait_for("it is shown", lambda: _shown(pool, name).get("reason") == "Drained", 20)
    assert "bad dimm" in _shown(pool, name)["message"]
    notes = pool.kube.api.get(f"/api/v1/nodes/{name}")["metadata"]["annotations"]
    wait_for(
        "the annotation says so",
        lambda: "bad dimm" in pool.kube.api.get(f"/api/v1/nodes/{name}")["metadata"]["annotations"]
        ["slurmbridge.dev/pool"],
        20,
    )  # fmt: skip
    assert notes
    # Neither a cordon nor its end makes it ours.
    _cordon(pool, name, True)
    time.sleep(4)
    _cordon(pool, name, False)
    time.sleep(5)
    assert _drained(pool) == {name: "bad dimm"}
    assert "unschedulable" not in _spec(pool, name)
    assert "taints" not in _spec(pool, name)
    pool.slurm.run(*_update(name, "state=resume"))
    wait_for("it is shown", lambda: _shown(pool, name).get("status") == "True", 20)


def test_a_drain_of_ours_that_an_operator_takes_over_is_his(pool: Cluster) -> None:
    name = "gpu004"
    _cordon(pool, name, True)
    wait_for("it is drained", lambda: name in _drained(pool), 15, 0.2)
    pool.slurm.run(*_update(name, "state=drain", "reason=fan broken"))
    _cordon(pool, name, False)
    time.sleep(6)
    assert _drained(pool) == {name: "fan broken"}


def test_a_restarted_bridge_takes_back_what_the_last_one_did_and_nothing_else(
    pool: Cluster, product: Product
) -> None:
    _cordon(pool, "gpu005", True)
    wait_for("it is drained", lambda: "gpu005" in _drained(pool), 15, 0.2)
    product.kill9_bridge()
    pool.slurm.run(*_update("gpu006", "state=drain", "reason=slurmbridge"))
    other = "slurmbridge: cluster other: node gpu007 is cordoned"
    pool.slurm.run(*_update("gpu007", "state=drain", f"reason={other}"))
    _cordon(pool, "gpu005", False)
    product.start_bridge()
    product.wait_bridge()
    wait_for("ours is taken back", lambda: "gpu005" not in _drained(pool), 30, 0.2)
    time.sleep(4)
    assert _drained(pool) == {"gpu006": "slurmbridge", "gpu007": other}


def test_a_slurmctld_that_forgets_a_drain_is_told_again(pool: Cluster) -> None:
    _cordon(pool, "gpu008", True)
    wait_for("it is drained", lambda: "gpu008" in _drained(pool), 15, 0.05)
    pool.slurm.kill9_slurmctld()
    pool.slurm.start_slurmctld()
    wait_for("it is drained", lambda: "gpu008" in _drained(pool), 40, 0.2)


def test_a_silent_node_is_drained_after_a_while_and_many_are_not(
    pool: Cluster, product: Product
) -> None:
    _ready(pool, "gpu001", False)
    wait_for("it is drained", lambda: "gpu001" in _drained(pool), 25, 0.2)
    assert _drained(pool) == {"gpu001": f"{OURS} gpu001 is not ready"}
    _ready(pool, "gpu001", True)
    wait_for("it is resumed", lambda: not _drained(pool), 25, 0.2)
    for name in pool.slurm.node_names:
        _ready(pool, name, False)
    wait_for("they are held back", lambda: len(_held(product)) == 12, 30, 0.5)
    time.sleep(3)
    assert not _drained(pool)
    assert product.metrics()["slurmbridge_node_drains_held"] == 12
    for name in pool.slurm.node_names[2:]:
        _ready(pool, name, True)
    wait_for("the two that are left", lambda: set(_drained(pool)) == {"gpu001", "gpu002"}, 30, 0.2)


def _held(product: Product) -> list[str]:
    held: list[str] = product.cli("status")["nodeSync"]["held"]
    return held


def test_a_node_that_is_down_in_slurm_or_away_is_shown(pool: Cluster) -> None:
    pool.slurm.run(*_update("gpu009", "state=down", "reason=psu"))
    wait_for("down", lambda: _shown(pool, "gpu009").get("reason") == "Down", 20)
    pool.slurm.run(*_update("gpu010", "state=fail", "reason=ecc"))
    wait_for("failing", lambda: _shown(pool, "gpu010").get("reason") == "Failing", 20)
    # A cordon, and its end, leave both as they are.
    for name in ("gpu009", "gpu010"):
        _cordon(pool, name, True)
    time.sleep(3)
    for name in ("gpu009", "gpu010"):
        _cordon(pool, name, False)
    time.sleep(5)
    assert _drained(pool) == {"gpu009": "psu", "gpu010": "ecc"}


def test_a_node_object_that_is_deleted_and_made_again_under_another_name(pool: Cluster) -> None:
    api, name = pool.kube.api, "gpu011"
    _cordon(pool, name, True)
    wait_for("it is drained", lambda: name in _drained(pool), 15, 0.2)
    api.delete(f"/api/v1/nodes/{name}")
    time.sleep(5)
    assert name in _drained(pool)
    again = node("renamed-11", gpus=4, labels={"slurmbridge.dev/slurm-node": name})
    made = api.create(again)
    api.patch("/api/v1/nodes/renamed-11/status", {"status": again["status"]}, STRATEGIC)
    wait_for("our drain is taken back", lambda: not _drained(pool), 20, 0.2)
    wait_for("it is shown", lambda: _shown(pool, "renamed-11").get("status") == "True", 20)
    assert made["metadata"]["name"] == "renamed-11"
    api.delete("/api/v1/nodes/renamed-11")
    pool.kube.create_nodes([name], gpus=4)


def test_a_node_with_more_gpus_in_kubernetes_than_in_slurm_takes_no_pods(
    pool: Cluster, product: Product
) -> None:
    status = {"capacity": {"nvidia.com/gpu": "16"}, "allocatable": {"nvidia.com/gpu": "16"}}
    for name in pool.slurm.node_names:
        pool.kube.api.patch(f"/api/v1/nodes/{name}/status", {"status": status}, STRATEGIC)
    wait_for("all are closed", lambda: product.cli("status")["blockedNodes"] == 12, 10, 0.3)
    pool.kube.api.create(pod("nowhere", gpus=1))
    wait_for(
        "it is told why",
        lambda: "gpu_count" in product.cli("explain", "default/nowhere")["waits"]["nodes"],
        15,
        0.5,
    )
    assert not is_bound(pool, "nowhere")
    for value in status.values():
        value["nvidia.com/gpu"] = "4"
    for name in pool.slurm.node_names:
        pool.kube.api.patch(f"/api/v1/nodes/{name}/status", {"status": status}, STRATEGIC)
    wait_for("it is bound", lambda: is_bound(pool, "nowhere"), 30)


@pytest.mark.parametrize("end", ["back", "fenced", "deleted"])
def test_a_pod_on_an_unreachable_node_keeps_its_claim_until_the_node_is(
    pool: Cluster, end: str
) -> None:
    """Deleted by force, as whoever waits for a dead node does: only an end of the node counts."""
    api = pool.kube.api
    api.create(pod("cut-off", gpus=4))
    wait_for("it runs", lambda: is_bound(pool, "cut-off"), 15)
    name = (get_pod(pool, "cut-off") or {})["spec"]["nodeName"]
    labels = {"metadata": {"labels": {HOLLOW: None}}}
    api.patch(f"/api/v1/nodes/{name}", labels)
    _ready(pool, name, False)
    time.sleep(1)
    # Still there, its node silent: nothing is known, nothing is done.
    time.sleep(6)
    assert len(claims(pool)) == 1
    api.delete(f"{PODS}/cut-off", grace_s=0)
    wait_for("the object is gone", lambda: get_pod(pool, "cut-off") is None, 20)
    time.sleep(8)
    assert len(claims(pool)) == 1
    taint = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}
    if end == "back":
        _ready(pool, name, True)
    elif end == "fenced":
        api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": [taint]}})
    else:
        api.delete(f"/api/v1/nodes/{name}")
    wait_for("the claim is given back", lambda: not claims(pool), 25, 0.2)
    if end == "deleted":
        pool.kube.create_nodes([name], gpus=4)
    else:
        api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
        api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": {HOLLOW: "true"}}})


def test_a_native_job_whose_epilog_hangs_is_told_of_and_its_node_takes_no_pods(
    pool: Cluster, product: Product, tmp_path: Path
) -> None:
    name, hold, epilog = "gpu009", tmp_path / "hold", tmp_path / "epilog.sh"
    hold.touch()
    epilog.write_text(f"#!/bin/sh\nwhile [ -e {hold} ]; do sleep 0.1; done\n")
    epilog.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (job,) = submit(pool, "-w", name, "--gres=gpu:1", "--mem=10")
    wait_for("it runs", lambda: pool.slurm.job_field(job, "JobState") == "RUNNING", 30)
    pool.slurm.reconfigure(epilog=str(epilog))
    try:
        pool.slurm.run("scancel", str(job))
        age = "slurmbridge_completing_seconds"
        wait_for("its end is told", lambda: product.metrics("bridge")[age] >= 3, 30, 0.3)
        node = product.cli("who", name)
        assert (node["blocked"], node["state"]) == ("COMPLETING", "IDLE+COMPLETING")
        assert {gpu["state"] for gpu in node["gpus"]} & {"releasing", "unknown"}
        assert "free" not in {gpu["state"] for gpu in node["gpus"]}
        wish = {"nodeSelector": {"kubernetes.io/hostname": name}}
        pool.kube.api.create(pod("waits", gpus=1, spec=wish))
        wait_for("it is refused", lambda: condition(pool, "waits").startswith("Unsched"), 30)
        assert not is_bound(pool, "waits")
        hold.unlink()
        wait_for("it is over", lambda: product.metrics("bridge")[age] == 0, 30, 0.3)
        wait_for("the pod has its place", lambda: is_bound(pool, "waits"), 40, 0.3)
    finally:
        hold.unlink(missing_ok=True)
        pool.slurm.reconfigure(epilog="")
