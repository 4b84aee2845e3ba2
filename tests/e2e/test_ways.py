"""Other ways to run the product: whole nodes, sites with defer, TLS everywhere, live reload."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.e2e.scene import (
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
    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e


def test_with_granularity_node_pods_and_native_jobs_never_meet_on_a_node(
    cluster: ClusterFactory,
) -> None:
    pool = cluster(SlurmConfig(nodes=4), scheduler=False)
    often = {"rules": {"nodeAnnotationS": 1}}
    with Product(pool, policy={"granularity": "node"}, sections=often) as product:
        submit(pool, "--gres=gpu:1", "--mem=100", "--nodelist=gpu001")
        wait_for("a native job runs", lambda: pool.checker.sample().native_running == 1, 15)
        # One after the other: pods that come at the same moment cannot know of each other.
        for i in range(6):
            pool.kube.api.create(pod(f"p{i}", gpus=2))
            wait_for("it is bound", lambda n=f"p{i}": is_bound(pool, n), 20)
        nodes = {p["spec"]["nodeName"] for p in bound(pool)}
        assert "gpu001" not in nodes
        node = next(iter(nodes))
        wait_for("the node says who owns its GPUs", lambda: _owners(pool, node), 10)
        told = {g["pod"] for g in product.cli("who", node)["gpus"] if g["state"] == "claim"}
        assert told == {
            f"default/{p['metadata']['name']}" for p in bound(pool) if p["spec"]["nodeName"] == node
        }
        # Pods share what is Kubernetes' already, so that the other nodes stay whole.
        assert len(nodes) == 2
        submit(pool, "--gres=gpu:1", "--mem=100", count=30)
        pool.kube.api.create_all([pod(f"q{i}", gpus=2) for i in range(8)])
        time.sleep(8)
        sample = pool.checker.sample()
        assert sample.violations == ()
        claimed = set(claims(pool))
        for node in pool.slurm.node_names:
            jobs = {j for (n, _), owners in sample.owners.items() if n == node for j in owners}
            assert not (jobs & claimed and jobs - claimed), node
        clear(pool)


def _owners(pool: Cluster, node: str) -> bool:
    """Whether the node annotation names exactly the claims that Slurm holds there."""
    notes = pool.kube.api.get(f"/api/v1/nodes/{node}")["metadata"].get("annotations", {})
    if "slurmbridge.dev/pool" not in notes:
        return False
    value = json.loads(notes["slurmbridge.dev/pool"])
    assert (value["version"], value["slurmNode"]) == (1, node)
    named = {int(owner[6:]) for owner in value["gpus"] if owner.startswith("claim:")}
    owners = pool.checker.sample().owners
    return named == {job for (name, _), jobs in owners.items() if name == node for job in jobs}


def test_a_site_with_defer_gets_its_claims_through_the_queue(cluster: ClusterFactory) -> None:
    pool = cluster(
        SlurmConfig(nodes=4, extra=("SchedulerParameters=defer,bf_interval=2",)), scheduler=False
    )
    with Product(pool):
        pool.kube.api.create_all([pod(f"d{i}", gpus=2) for i in range(4)])
        wait_for("all are bound", lambda: len(bound(pool)) == 4, 60)
        assert pool.checker.sample().violations == ()
        clear(pool)


def test_tls_with_client_certificates_between_all_parts(cluster: ClusterFactory) -> None:
    pool = cluster(SlurmConfig(nodes=2), scheduler=False)
    with Product(pool, tls=True) as product:
        pool.kube.api.create(pod("secret", gpus=1))
        wait_for("it is bound", lambda: is_bound(pool, "secret"), 15)
        wait_for("it says so", lambda: product.cli("status")["podsBound"] == 1, 10)
        clear(pool)


def test_a_changed_configuration_is_taken_and_a_bad_one_is_not(cluster: ClusterFactory) -> None:
    pool = cluster(SlurmConfig(nodes=2), scheduler=False)
    with Product(pool) as product:
        path = product.config_path()
        config: dict[str, Any] = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump(config | {"policy": config["policy"] | {"granlarity": 1}}))
        wait_for(
            "the bad one is refused",
            lambda: product.metrics().get('slurmbridge_config_reloads_total{result="bad"}') == 1,
            15,
        )
        rule = {"namespaces": ["team-*"], "accounts": ["x"]}
        config["policy"]["identities"] = [rule]
        path.write_text(yaml.safe_dump(config))
        wait_for(
            "the good one is taken",
            lambda: product.metrics().get('slurmbridge_config_reloads_total{result="ok"}') == 1,
            15,
        )
        pool.kube.api.create(pod("stranger", gpus=1))
        wait_for(
            "its namespace is not covered",
            lambda: "identity rule" in condition(pool, "stranger"),
            10,
        )
        assert (get_pod(pool, "stranger") or {})["spec"].get("nodeName") is None
        assert settled(pool)
        clear(pool)
