"""Node groups on a real cluster: pods take what is theirs of each, and no GPU more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.e2e.scene import bound, clear, condition, get_pod, is_bound, submit, wait_for
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e

GROUPS = [
    {"name": "a", "nodes": "gpu[001-002]", "kubernetes": {"ceiling": 5}},
    {"name": "b", "selector": {"rack": "r1"}, "slurm": {"floor": "50%"}},
]
GATE = ("slurmbridge.dev/claim",)


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    """4 nodes with 4 GPUs: of the first two pods get 5 GPUs at most, of the others 4 of 8."""
    started = cluster(
        SlurmConfig(nodes=4, gpus_per_node=4),
        scheduler=False,
        labels=lambda i, _: {"rack": f"r{i // 2}"},
    )
    with Product(started, sections={"pool": {"groups": GROUPS}}) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def _on(pool: Cluster) -> dict[str, int]:
    """GPUs of bound pods by group, read without our code."""
    found = {"a": 0, "b": 0}
    for one in bound(pool):
        gpus = int(one["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        found["a" if one["spec"]["nodeName"] in ("gpu001", "gpu002") else "b"] += gpus
    return found


@pytest.mark.parametrize("gates", [(), GATE], ids=["reactive", "planned"])
def test_a_storm_of_pods_gets_just_what_is_theirs(
    pool: Cluster, product: Product, gates: tuple[str, ...]
) -> None:
    pool.kube.api.create_all([pod(f"p{i:02d}", gpus=1, gates=gates) for i in range(16)])
    wait_for("all that may be bound are", lambda: len(bound(pool)) == 9, 30, 0.2)
    time.sleep(4)
    assert _on(pool) == {"a": 5, "b": 4}
    assert pool.checker.sample().violations == ()
    groups = {g["name"]: g for g in product.cli("status")["groups"]}
    assert (groups["a"]["pods"], groups["a"]["podsMost"]) == (5, 5)
    assert (groups["b"]["pods"], groups["b"]["podsMost"]) == (4, 4)
    name = 'slurmbridge_group_gpus{group="a",what="pods"}'
    assert product.metrics()[name] == 5
    waiting = next(f"p{i:02d}" for i in range(16) if not is_bound(pool, f"p{i:02d}"))
    if gates:
        key = "slurmbridge.dev/reason"
        wait_for(
            "it is told why",
            lambda: "ceiling" in (get_pod(pool, waiting) or {})["metadata"]["annotations"].get(key, ""),
            20,
            0.3,
        )  # fmt: skip
    else:
        wait_for(
            "it is told why", lambda: "share of the node group" in condition(pool, waiting), 15
        )
    # What is left to Slurm is Slurm's.
    submit(pool, "--gres=gpu:1", "--mem=100", count=7)
    wait_for("all GPUs are used", lambda: pool.checker.sample().gpus_used == 16, 30, 0.5)
    # A pod ends, and the next one gets its place.
    first = bound(pool)[0]["metadata"]["name"]
    pool.kube.api.delete(f"/api/v1/namespaces/default/pods/{first}")
    wait_for("its place is taken", lambda: len(bound(pool)) == 9, 30, 0.2)


def test_a_gang_that_is_more_than_what_is_left_waits_as_a_whole(
    pool: Cluster, product: Product
) -> None:
    notes = {"slurmbridge.dev/group": "g", "slurmbridge.dev/group-size": "3"}
    gang = [pod(f"g{i}", gpus=4, gates=GATE, annotations=notes) for i in range(3)]
    pool.kube.api.create_all(gang)
    key = "slurmbridge.dev/reason"
    wait_for(
        "it is told why",
        lambda: (get_pod(pool, "g0") or {})["metadata"]["annotations"].get(key, ""),
        30,
        0.3,
    )
    time.sleep(3)
    assert bound(pool) == []


def test_a_changed_ceiling_holds_within_seconds_and_evicts_nobody(
    pool: Cluster, product: Product
) -> None:
    pool.kube.api.create_all([pod(f"c{i:02d}", gpus=1) for i in range(16)])
    wait_for("all that may be bound are", lambda: len(bound(pool)) == 9, 30, 0.2)
    path = product.config_path()
    text = path.read_text()
    config = yaml.safe_load(text)
    config["pool"]["groups"][0]["kubernetes"]["ceiling"] = 7
    path.write_text(yaml.safe_dump(config))
    wait_for("two more come", lambda: len(bound(pool)) == 11, 40, 0.3)
    config["pool"]["groups"][0]["kubernetes"]["ceiling"] = 1
    path.write_text(yaml.safe_dump(config))
    wait_for(
        "it is told",
        lambda: product.cli("status")["groups"][0]["over"] == ["kubernetes"],
        20,
        0.5,
    )
    time.sleep(2)
    assert _on(pool) == {"a": 7, "b": 4}
    path.write_text(text)
