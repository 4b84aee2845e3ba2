"""Pods keep their claims whatever their nodes are called, and stop in time at their own end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.scene import PODS, claims, clear, get_pod, is_bound, settled, wait_for
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e

POOL, NAME = "example.com/pool", "example.com/slurm-node"
LINGER_S = 4


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    """4 nodes in the pool by a label, with their Slurm names as another."""
    started = cluster(
        SlurmConfig(nodes=4, gpus_per_node=4),
        scheduler=False,
        labels=lambda _, name: {POOL: "yes", NAME: name},
    )
    sections = {
        "rules": {"lingerS": LINGER_S},
        "pool": {"selector": {POOL: "yes"}, "slurmNodeLabel": NAME},
    }
    with Product(started, sections=sections) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def _label(pool: Cluster, node: str, labels: dict[str, str | None]) -> None:
    body = {"metadata": {"labels": labels}}
    pool.kube.api.patch(f"/api/v1/nodes/{node}", body)


@pytest.mark.parametrize("change", [{POOL: None}, {NAME: "elsewhere"}])
def test_a_label_that_changes_ends_no_claim_of_a_new_leader(
    pool: Cluster, product: Product, change: dict[str, str | None]
) -> None:
    pool.kube.api.create(pod("keeps", gpus=2))
    wait_for("it runs", lambda: is_bound(pool, "keeps") and settled(pool), 20)
    node = str((get_pod(pool, "keeps") or {})["spec"]["nodeName"])
    before = claims(pool)
    _label(pool, node, change)
    product.kill9_bridge(0)
    product.start_bridge(0)
    product.wait_bridge(0)
    wait_for("it leads", lambda: product.metrics("bridge")["slurmbridge_leader"] == 1, 40)
    wait_for("it knows the pod", lambda: product.cli("status")["podsBound"] == 1, 20)
    time.sleep(2 * LINGER_S)
    assert claims(pool) == before
    assert "deletionTimestamp" not in (get_pod(pool, "keeps") or {})["metadata"]
    _label(pool, node, {POOL: "yes", NAME: node})
    pool.kube.api.delete(f"{PODS}/keeps")
    wait_for("its claim is given back", lambda: not claims(pool), 30)


def test_a_claim_lasts_through_the_grace_of_its_pod_and_the_pod_is_stopped_in_time(
    pool: Cluster,
) -> None:
    body = pod("ends", gpus=1, stop_s=1.0, annotations={"slurmbridge.dev/duration": "5m"})
    body["spec"]["terminationGracePeriodSeconds"] = 20
    pool.kube.api.create(body)
    wait_for("it runs", lambda: is_bound(pool, "ends") and settled(pool), 20)
    (job_id,) = claims(pool)
    assert pool.slurm.job_field(job_id, "TimeLimit") == "00:07:00"
    # The rest of its time is a minute.
    pool.slurm.run("scontrol", "update", f"jobid={job_id}", "timelimit=1")
    wait_for(
        "it is stopped",
        lambda: (
            "deletionTimestamp" in (get_pod(pool, "ends") or {"metadata": {}})["metadata"]
            or get_pod(pool, "ends") is None
        ),
        70,
    )
    assert pool.slurm.job_field(job_id, "JobState") in ("RUNNING", "COMPLETING", "CANCELLED")
    wait_for("its claim is given back", lambda: not claims(pool), 30)
    assert pool.slurm.job_field(job_id, "JobState").startswith("CANCELLED")
