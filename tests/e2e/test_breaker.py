"""Many claims vanish at once on a real cluster: nobody is evicted before a person has looked."""

from __future__ import annotations

import dataclasses
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.scene import bound, claims, clear, settled, wait_for
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e

PODS = 12


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    """4 nodes with 4 GPUs; more than 3 lost claims at once open the breaker."""
    started = cluster(SlurmConfig(nodes=4, gpus_per_node=4), scheduler=False)
    with Product(started, sections={"eviction": {"atLeast": 3}}) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    pool = product.cluster
    pool.kube.api.create_all([pod(f"p{i:02d}", gpus=1) for i in range(PODS)])
    wait_for("all run", lambda: len(bound(pool)) == PODS and settled(pool), 30, 0.2)
    yield pool
    clear(pool)


def _is_open(product: Product) -> bool:
    return product.metrics()["slurmbridge_breaker_open"] == 1


def _evicted(pool: Cluster) -> list[str]:
    return [p["metadata"]["name"] for p in bound(pool) if "deletionTimestamp" in p["metadata"]]


def _stays_whole(pool: Cluster, seconds: float) -> None:
    """For so long every pod runs on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert (len(bound(pool)), _evicted(pool)) == (PODS, [])
        time.sleep(0.3)


def test_all_claims_are_cancelled_and_a_person_decides(pool: Cluster, product: Product) -> None:
    pool.slurm.run("scancel", "--name=slurmbridge-test")
    wait_for("the breaker opens", lambda: _is_open(product), 20, 0.2)
    _stays_whole(pool, 5)
    told: dict[str, Any] = product.cli("breaker", "show")
    assert told["open"]
    assert len(told["lost"]) == PODS
    assert product.cli("status")["breaker"]["open"]
    # It was a slip, says the person: the claims are made again, on the GPUs that the pods have.
    product.cli("breaker", "dismiss")
    wait_for("each has a claim again", lambda: settled(pool), 30, 0.3)
    _stays_whole(pool, 3)
    wait_for("it is closed", lambda: not _is_open(product), 20, 0.3)
    assert pool.checker.sample().violations == ()
    # It was meant so, says the person the next time.
    pool.slurm.run("scancel", "--name=slurmbridge-test")
    wait_for("the breaker opens again", lambda: _is_open(product), 20, 0.2)
    _stays_whole(pool, 3)
    product.cli("breaker", "confirm")
    wait_for("all are evicted", lambda: not bound(pool), 30, 0.3)
    wait_for("it is closed", lambda: not _is_open(product), 20, 0.3)


def _restart_with(pool: Cluster, nodes: int) -> None:
    """With other nodes in slurm.conf: a reconfigure is not enough (22.05 dies of it)."""
    pool.slurm.stop_slurmctld()
    pool.slurm.config = dataclasses.replace(pool.slurm.config, nodes=nodes)
    pool.slurm.write_config()
    pool.slurm.start_slurmctld()


def test_nodes_that_are_taken_out_of_slurm_conf_cost_no_pod(
    pool: Cluster, product: Product
) -> None:
    """A slip in slurm.conf: three of four nodes are gone for Slurm, and their jobs with them."""
    _restart_with(pool, nodes=1)
    try:
        wait_for("the breaker opens", lambda: _is_open(product), 40, 0.2)
        _stays_whole(pool, 6)
        lost = product.cli("breaker", "show")["lost"]
        assert 4 <= len(lost) <= PODS
    finally:
        _restart_with(pool, nodes=4)
    _stays_whole(pool, 4)
    product.cli("breaker", "dismiss")
    wait_for("each has a claim again", lambda: settled(pool), 40, 0.3)
    _stays_whole(pool, 3)
    wait_for("it is closed", lambda: not _is_open(product), 20, 0.3)


def test_a_controller_that_is_restored_from_an_old_state_costs_no_pod(
    pool: Cluster, product: Product
) -> None:
    """From before all of these claims: slurmctld has forgotten them, and they are made again."""
    state = pool.slurm.conf_path.parent.parent / "state"
    old = state.with_name("state.old")
    names = {p["metadata"]["name"] for p in bound(pool)}
    for name in names:
        pool.kube.api.delete(f"/api/v1/namespaces/default/pods/{name}")
    wait_for("none is left", lambda: not claims(pool), 30, 0.2)
    pool.slurm.stop_slurmctld()
    shutil.copytree(state, old)
    pool.slurm.start_slurmctld()
    pool.slurm.wait_scheduling()
    pool.kube.api.create_all([pod(f"q{i:02d}", gpus=1) for i in range(PODS)])
    wait_for("all run", lambda: len(bound(pool)) == PODS and settled(pool), 40, 0.2)
    pool.slurm.stop_slurmctld()
    shutil.rmtree(state)
    shutil.move(old, state)
    pool.slurm.start_slurmctld()
    assert not claims(pool)
    wait_for("every pod has a claim again", lambda: settled(pool), 60, 0.3)
    _stays_whole(pool, 3)
    assert pool.checker.sample().violations == ()
    assert not _is_open(product)
