"""etcd is restored from a backup beside a Slurm that knows nothing of it: no promise is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import (
    PODS,
    bound,
    claims,
    clear,
    get_pod,
    is_bound,
    settled,
    submit,
    wait_for,
)
from tests.support.kube_objects import pod
from tests.support.product import NAMESPACE, Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e

HELD = "example.org/held"
"""A gate of somebody else, who takes it off after the backup, and once more after the restore."""
LEASES_S = {"the leader begins anew": 5, "the leader leads on": 60}
"""Duration of the Lease: shorter or longer than the API server is away."""


@pytest.fixture(scope="module", params=LEASES_S.values(), ids=LEASES_S)
def product(request: pytest.FixtureRequest, cluster: ClusterFactory) -> Iterator[Product]:
    """4 nodes with 8 GPUs, two bridges."""
    started = cluster(SlurmConfig(nodes=4, gpus_per_node=8), scheduler=False)
    lease = {"namespace": NAMESPACE, "durationS": request.param, "renewS": 1}
    sections = {"rules": {"lingerS": 5}, "kube": {"lease": lease}}
    with Product(started, sections=sections, bridges=2) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def _let_go(pool: Cluster, names: list[str]) -> None:
    """Take the gate off that is not ours."""
    for name in names:
        waits = get_pod(pool, name) or {}
        gates = [g for g in waits["spec"].get("schedulingGates", []) if g["name"] != HELD]
        pool.kube.api.patch(f"{PODS}/{name}", {"spec": {"schedulingGates": gates or None}})


def _uid(pool: Cluster, name: str) -> str:
    return str((get_pod(pool, name) or {"metadata": {"uid": "gone"}})["metadata"]["uid"])


def _are_bound(pool: Cluster, names: list[str]) -> bool:
    return set(names) <= {p["metadata"]["name"] for p in bound(pool)}


def _on(node: str, name: str, gpus: int, *gates: str) -> dict[str, Any]:
    where = {"nodeSelector": {"kubernetes.io/hostname": node}}
    return pod(name, gpus=gpus, gates=gates, spec=where)


def test_what_is_unbound_by_a_restore_is_bound_again_and_nothing_is_lost(
    pool: Cluster, product: Product
) -> None:
    api = pool.kube.api
    kept, back = [f"kept{i}" for i in range(4)], ["back", "taken"]
    api.create_all(_on("gpu004", name, 2) for name in kept)
    api.create_all([_on("gpu001", "back", 2), _on("gpu002", "taken", 2)])
    wait_for("the first are bound", lambda: _are_bound(pool, kept + back), 30)
    uids = {name: _uid(pool, name) for name in kept}
    again = ["reactive0", "reactive1", "planned0", "planned1"]
    for name in again:
        gates = (keys.GATE, HELD) if "planned" in name else (HELD,)
        api.create(_on("gpu003", name, 1, *gates))
    saved = pool.kube.save_etcd()

    # What the backup knows nothing of.
    api.create_all(_on("gpu003", f"never{i}", 1) for i in range(2))
    _let_go(pool, again)
    since = [*again, "never0", "never1"]
    wait_for("all are bound", lambda: _are_bound(pool, since), 30)
    for name in back:
        api.delete(f"{PODS}/{name}")
    wait_for("their claims have ended", lambda: len(claims(pool)) == len(kept + since), 30)
    submit(pool, "--gres=gpu:8", "--mem=100", "--nodelist=gpu002")
    wait_for("it runs", lambda: pool.checker.sample().native_running == 1, 30)

    with pool.checker.watch(0.5) as watch:
        pool.kube.kill9_scheduler()
        pool.kube.restore_etcd(saved)
        pool.kube.start_scheduler(product.scheduler_config())
        _let_go(pool, again)
        wait_for("all are bound again", lambda: _are_bound(pool, again), 60, 0.3)
        wait_for("who finds its GPUs taken goes", lambda: not is_bound(pool, "taken"), 30, 0.3)
        wait_for("claims and pods match", lambda: settled(pool), 30, 0.3)
    assert watch.double_owned == []
    wait_for("no promise is broken", lambda: pool.checker.sample().violations == (), 10, 0.3)
    # One that somebody had deleted is covered where its GPUs are free, or evicted.
    assert {p["metadata"]["name"] for p in bound(pool)} - {"back"} == {*kept, *again}
    assert pool.checker.sample().native_running == 1
    assert {name: _uid(pool, name) for name in kept} == uids
