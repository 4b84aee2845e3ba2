"""Gangs on real components: 64 nodes in 8 racks and 2 zones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import PODS, bound, claims, clear, events_of, get_pod, submit, wait_for
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e
NODES, PER_RACK = 64, 8
ZONE, RACK = "topology.kubernetes.io/zone", "example.org/rack"


def labels(i: int, name: str) -> dict[str, str]:
    return {ZONE: f"z{i // 32}", RACK: f"r{i // PER_RACK}"}


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    started = cluster(SlurmConfig(nodes=NODES, gpus_per_node=8), scheduler=False, labels=labels)
    policy = Path(__file__).parents[2] / "manifests/planned/policy.yaml"
    started.kube.kubectl("apply", "-f", str(policy))
    opted = {"metadata": {"labels": {"slurmbridge.dev/planned": "true"}}}
    started.kube.api.patch("/api/v1/namespaces/default", opted)
    probe = f"{PODS}?dryRun=All"

    def is_gated() -> bool:
        made = started.kube.api.request("POST", probe, pod("p", gpus=1))
        return "schedulingGates" in made["spec"]

    wait_for("the policy is in force", is_gated, 20, 0.2)
    with Product(started, sections={"pool": {"topologyLabels": [ZONE, RACK]}}) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def gang(name: str, size: int, gpus: int, kind: str = "own", wish: str = "") -> list[dict]:
    """Pods of a gang as the controllers of its kind make them."""
    made = []
    for i in range(size):
        notes, marks = {keys.TOPOLOGY: wish} if wish else {}, {}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": f"uid-{name}"}
        if kind == "own":
            notes |= {keys.GROUP: name, keys.GROUP_SIZE: str(size), keys.RANK: str(i)}
        elif kind == "indexed":
            notes |= {keys.GROUP_SIZE: str(size)}
            marks |= {"batch.kubernetes.io/job-completion-index": str(i)}
        elif kind == "podgroup":
            marks |= {
                "pod-group.scheduling.sigs.k8s.io/name": name,
                "pod-group.scheduling.sigs.k8s.io/min-available": str(size),
            }
        elif kind == "jobset":
            notes |= {keys.GROUP_SIZE: str(size)}
            marks |= {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/job-global-index": str(i),
            }
        body = pod(f"{name}-{i}", gpus=gpus, annotations=notes, labels=marks)
        if kind == "indexed":
            body["metadata"]["ownerReferences"] = [owner | {"controller": True}]
        made.append(body)
    return made


def racks_of(pods: list[dict[str, Any]]) -> list[int]:
    """Rack of each pod, by rank."""
    ordered = sorted(pods, key=lambda p: int(p["metadata"]["name"].rpartition("-")[2]))
    return [(int(p["spec"]["nodeName"][3:]) - 1) // PER_RACK for p in ordered]


def all_or_none(pool: Cluster, sizes: dict[str, int]) -> dict[str, int]:
    """Gangs of which some pods and not all have lost their gates: name -> how many."""
    off: dict[str, int] = {}
    for each in pool.kube.api.items(PODS):
        name = each["metadata"]["name"].rpartition("-")[0]
        if name in sizes and not each["spec"].get("schedulingGates"):
            off[name] = off.get(name, 0) + 1
    return {name: n for name, n in off.items() if n < sizes[name]}


def test_a_gang_lands_in_one_rack_with_its_ranks_in_order_and_all_at_once(
    pool: Cluster, product: Product
) -> None:
    pool.kube.api.create_all(gang("a", 8, 8))
    wait_for("all are bound", lambda: len(bound(pool, "a-")) == 8, 20)
    assert len(set(racks_of(bound(pool, "a-")))) == 1
    nodes = [p["spec"]["nodeName"] for p in bound(pool, "a-")]
    assert len(set(nodes)) == 8
    told = product.cli("explain", "default/a-3")["group"]
    assert told["size"] == 8
    assert told["level"] == "rack"
    assert [m["pod"] for m in told["members"]] == [f"default/a-{i}" for i in range(8)]
    assert "claimed together in rack" in events_of(pool, "a-0")["GangPlaced"]


def test_a_gang_that_is_not_complete_claims_nothing_and_says_what_it_waits_for(
    pool: Cluster,
) -> None:
    pool.kube.api.create_all(gang("b", 4, 8)[:3])
    wait_for(
        "it is told",
        lambda: "waits for all of its 4 pods" in _reason(pool, "b-0"),
        15,
    )
    assert not claims(pool)
    pool.kube.api.create(gang("b", 4, 8)[3])
    wait_for("all are bound", lambda: len(bound(pool, "b-")) == 4, 15)


def _reason(pool: Cluster, name: str) -> str:
    made = get_pod(pool, name) or {}
    return made.get("metadata", {}).get("annotations", {}).get(keys.REASON, "")


def test_a_required_rack_that_cannot_be_met_stays_pending_with_the_short_level_named(
    pool: Cluster, product: Product
) -> None:
    pool.kube.api.create_all(gang("c", 9, 8, wish="required:rack"))
    wait_for("it is told", lambda: "no rack holds it" in _reason(pool, "c-0"), 15)
    assert "lacks room for 1 pod (8 GPUs)" in _reason(pool, "c-0")
    assert not claims(pool)
    assert "no rack holds it" in product.cli("explain", "default/c-0")["group"]["waits"]


def test_two_gangs_that_do_not_both_fit_never_hold_half_each(pool: Cluster) -> None:
    # 6 whole nodes are free.
    submit(pool, "--gres=gpu:8", "--mem=100", count=NODES - 6)
    wait_for("58 nodes are busy", lambda: pool.checker.sample().gpus_used == 58 * 8, 40)
    time.sleep(2)
    one, two = gang("x", 4, 8), gang("y", 4, 8)
    pool.kube.api.create_all([p for pair in zip(one, two, strict=True) for p in pair])
    wait_for("one is bound", lambda: len(bound(pool, "x-")) + len(bound(pool, "y-")) == 4, 20)
    time.sleep(3)
    first = "x-" if bound(pool, "x-") else "y-"
    assert len(bound(pool, first)) == 4
    # The other one waits in Slurm's queue, as one job, and holds nothing.
    assert len(claims(pool, "R")) == 4
    assert len(claims(pool, "PD")) == 1
    for i in range(4):
        pool.kube.api.delete(f"{PODS}/{first}{i}")
    other = "y-" if first == "x-" else "x-"
    wait_for("the other one follows", lambda: len(bound(pool, other)) == 4, 30)


def test_a_member_that_is_replaced_comes_back_to_its_rack(pool: Cluster, product: Product) -> None:
    wait_for("the pool is seen free", lambda: product.cli("status")["gpus"]["free"] == 512, 20, 0.5)
    pool.kube.api.create_all(gang("m", 6, 8, kind="indexed"))
    wait_for("all are bound", lambda: len(bound(pool, "m-")) == 6, 20)
    (rack,) = set(racks_of(bound(pool, "m-")))
    pool.kube.api.delete(f"{PODS}/m-2")
    wait_for("it is gone", lambda: get_pod(pool, "m-2") is None, 15)
    pool.kube.api.create(gang("m", 6, 8, kind="indexed")[2])
    wait_for("it is bound again", lambda: len(bound(pool, "m-")) == 6, 20)
    assert set(racks_of(bound(pool, "m-"))) == {rack}


def test_twenty_mixed_gangs_among_native_jobs_with_bridge_and_extender_killed_in_the_middle(
    pool: Cluster, product: Product
) -> None:
    kinds = ("own", "indexed", "podgroup", "jobset")
    sizes = {f"g{i}": 2 + i % 5 for i in range(20)}
    submit(pool, "--gres=gpu:3", "--mem=100", count=12)
    partial: list[dict[str, int]] = []
    with pool.checker.watch(0.5) as watch:
        for i, (name, size) in enumerate(sizes.items()):
            pool.kube.api.create_all(gang(name, size, 1 + i % 4, kinds[i % 4]))
            if i == 8:
                wait_for("some are claimed", lambda: len(claims(pool)) >= 4, 30, 0.01)
                product.kill9_bridge()
                product.kill9_extender()
                product.start_bridge()
                product.start_extender()
        product.wait_bridge()
        product.wait_extender()
        every = sum(sizes.values())

        def all_are_bound() -> bool:
            found = {n: len(bound(pool, f"{n}-")) for n in sizes}
            partial.append({n: c for n, c in found.items() if 0 < c < sizes[n]})
            return sum(found.values()) == every

        wait_for("all are bound", all_are_bound, 90, 0.3)
    assert watch.violations == []
    assert len(claims(pool)) == every
    for name in sizes:
        racks = racks_of(bound(pool, f"{name}-"))
        assert len(set(racks)) == 1, (name, racks)
    # While their bindings run gangs are bound one after the other, but none stays half bound.
    assert partial[-1] == {}
    assert all_or_none(pool, sizes) == {}
