"""The bridge fails over one pod: it goes on without that one, whose claim stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import PODS, claims, events_of, get_pod, is_bound, wait_for
from tests.support.altered import FAILS
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e


@pytest.fixture(name="product")
def _product(cluster: ClusterFactory) -> Iterator[Product]:
    """Two nodes; the core fails over pods with the rank `poison`."""
    started = cluster(SlurmConfig(nodes=2, gpus_per_node=8), scheduler=False)
    with Product(started, altered=True, env={FAILS: "poison"}) as running:
        yield running


def _poison(product: Product, name: str) -> None:
    change: dict[str, Any] = {"metadata": {"annotations": {keys.RANK: "poison"}}}
    product.cluster.kube.api.patch(f"{PODS}/{name}", change)


def _set_aside(product: Product) -> float | None:
    """How many are; None while the core is being started anew."""
    return product.metrics().get("slurmbridge_set_aside")


def test_a_pod_over_which_the_bridge_fails_is_set_aside_and_all_others_are_served(
    product: Product,
) -> None:
    pool = product.cluster
    api = pool.kube.api
    with pool.checker.watch(0.2) as watch:
        api.create(pod("bad", gpus=2))
        wait_for("it runs", lambda: is_bound(pool, "bad"), 20)
        (claim,) = claims(pool)
        _poison(product, "bad")
        wait_for("it is set aside", lambda: _set_aside(product) == 1, 20, 0.3)
        assert product.metrics()["slurmbridge_leader"] == 1
        (aside,) = product.cli("status")["setAside"]
        assert (aside["kind"], aside["ref"]) == ("pod", "default/bad")
        assert "a fault over default/bad" in aside["error"]
        # Others are served, and all GPUs but its two are to be had.
        api.create_all([pod(f"good{i}", gpus=6) for i in range(2)])
        api.create(pod("rest", gpus=1))
        names = ("good0", "good1", "rest")
        wait_for("others run", lambda: all(is_bound(pool, name) for name in names), 30, 0.2)
        wait_for("it is told", lambda: "SetAside" in events_of(pool, "bad"), 20, 0.3)
        # A bridge that is started anew finds it again, and keeps its claim as well.
        product.kill9_bridge(0)
        product.start_bridge(0)
        api.create(pod("later", gpus=1))
        wait_for("another runs", lambda: is_bound(pool, "later"), 40, 0.2)
        assert _set_aside(product) == 1
        assert claim in claims(pool, "R")
        assert (get_pod(pool, "bad") or {})["status"]["phase"] == "Running"
        api.delete(f"{PODS}/bad")
        wait_for("its claim ends", lambda: claim not in claims(pool), 60, 0.3)
        assert product.cli("status")["setAside"] == []
    assert watch.double_owned == []
