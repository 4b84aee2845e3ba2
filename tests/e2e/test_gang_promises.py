"""Gangs and what Slurm has promised to others: reservations to come, and their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import PODS, bound, clear, event_of, wait_for
from tests.e2e.test_gang_queue import gang, jobs_of_gangs, queued, reason
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    pool = cluster(SlurmConfig(nodes=4, bf_interval_s=1), scheduler=False)
    policy = {"identities": [{"namespaces": ["*"], "reservations": ["ours"]}]}
    with Product(pool, policy=policy) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)
    for name in ("upgrade", "ours"):
        product.cluster.slurm.run("scontrol", "delete", f"reservation={name}", check=False)


def reserve(pool: Cluster, name: str, *more: str) -> None:
    pool.slurm.run("scontrol", "create", f"reservation={name}", "users=root", *more)


def nodes_of(pool: Cluster, prefix: str) -> set[str]:
    return {p["spec"]["nodeName"] for p in bound(pool, prefix)}


def test_before_a_maintenance_only_a_gang_that_ends_in_time_is_started(
    pool: Cluster, product: Product
) -> None:
    nodes = "nodes=gpu[001-004]"
    reserve(pool, "upgrade", "starttime=now+30minutes", "duration=60", nodes, "flags=maint")
    wait_for(
        "the bridge has read it",
        lambda: product.cli("who", "gpu001")["reservations"],
        40,
        0.3,
    )
    pool.kube.api.create_all(gang("late", 2, 8))
    job = queued(pool, "late")
    pool.kube.api.create_all(gang("soon", 4, 8, **{keys.DURATION: "10m"}))
    wait_for("the short one is bound", lambda: len(bound(pool, "soon-")) == 4, 40)
    # All four live in one allocation.
    assert list(jobs_of_gangs(pool, "R").values()) == ["RUNNING gpu[001-004]"]
    assert list(jobs_of_gangs(pool, "PD")) == [job]
    assert not bound(pool, "late-")
    assert pool.checker.sample().violations == ()


def test_in_its_own_reservation_a_gang_goes_to_its_nodes_and_waits_for_its_nodes(
    pool: Cluster, product: Product
) -> None:
    reserve(pool, "ours", "starttime=now", "duration=120", "nodes=gpu[003-004]")
    wait_for("it is read", lambda: product.cli("who", "gpu003")["reservations"], 40, 0.3)
    notes = {keys.RESERVATION: "ours", keys.DURATION: "20m"}
    pool.kube.api.create_all(gang("first", 2, 8, **notes))
    wait_for("it is bound", lambda: len(bound(pool, "first-")) == 2, 40)
    assert nodes_of(pool, "first-") == {"gpu003", "gpu004"}
    pool.kube.api.create_all(gang("next", 2, 8, **notes))
    job = queued(pool, "next")
    assert "waits in Slurm's queue" in reason(pool, "next-1")
    for i in range(2):
        pool.kube.api.delete(f"{PODS}/first-{i}")
    wait_for("the next one follows", lambda: len(bound(pool, "next-")) == 2, 60)
    assert nodes_of(pool, "next-") == {"gpu003", "gpu004"}
    assert list(jobs_of_gangs(pool)) == [job]


def test_a_claim_that_an_operator_makes_smaller_lets_its_whole_gang_go(
    pool: Cluster, product: Product
) -> None:
    """It runs on with one node, whose member has lost the other as by any end of the claim."""
    pool.kube.api.create_all(gang("shrinks", 2, 8))
    wait_for("it is bound", lambda: len(bound(pool, "shrinks-")) == 2, 30)
    (job,) = jobs_of_gangs(pool, "R")
    pool.slurm.run("scontrol", "update", f"JobId={job}", "NumNodes=1")
    assert pool.slurm.job_field(job, "JobState") == "RUNNING"
    wait_for("both are told", lambda: all(_told(pool, i) for i in range(2)), 30)
    assert any("Slurm holds other GPUs" in _told(pool, i) for i in range(2))
    wait_for("both are gone", lambda: not bound(pool, "shrinks-"), 40)
    wait_for("so is the claim", lambda: not jobs_of_gangs(pool), 40)


def _told(pool: Cluster, member: int) -> str:
    return event_of(pool, f"shrinks-{member}", "ClaimLost")
