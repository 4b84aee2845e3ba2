"""Reservations of a real Slurm: who may use them gets in, and nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import bound, clear, get_pod, wait_for
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e
ACCOUNTS = ["bio", "phys", "chem"]
NAMES = ["mine", "theirs", "soon", "repair"]


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    pool = cluster(SlurmConfig(nodes=3, bf_interval_s=1), scheduler=False)
    rule = {"namespaces": ["*"], "accounts": ACCOUNTS, "reservations": NAMES}
    with Product(pool, policy={"identities": [rule]}) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)
    for name in (*NAMES, "magnet"):
        product.cluster.slurm.run("scontrol", "delete", f"ReservationName={name}", check=False)
    wait_for("none is seen", lambda: not _seen(product), 20, 0.2)


def _seen(product: Product) -> set[str]:
    """Names of the reservations that the bridge knows of."""
    rows = [product.cli("who", name)["reservations"] for name in product.cluster.slurm.node_names]
    return {row["reservation"] for each in rows for row in each}


def reserve(product: Product, name: str, nodes: str, **fields: str) -> None:
    options = {"StartTime": "now", "Duration": "120", "Nodes": nodes} | fields
    text = [f"{key}={value}" for key, value in options.items()]
    product.cluster.slurm.run("scontrol", "create", "reservation", f"ReservationName={name}", *text)
    wait_for("the bridge knows it", lambda: name in _seen(product), 20, 0.2)


def start(pool: Cluster, name: str, gpus: int = 8, **notes: str) -> None:
    notes = {keys.DURATION: "30m"} | notes
    pool.kube.api.create(pod(name, gpus=gpus, annotations=notes, gates=[keys.GATE]))


def placed(pool: Cluster, name: str) -> tuple[str, str]:
    """Node and Slurm reservation of a pod, once it is bound."""
    wait_for(f"{name} is bound", lambda: bound(pool, name), 30)
    (made,) = bound(pool, name)
    job = made["metadata"]["annotations"][keys.CLAIM].partition("/")[0]
    wait_for("its job is seen", lambda: pool.slurm.job_field(job, "JobState") == "RUNNING", 20)
    named = pool.slurm.run("squeue", "-h", f"--jobs={job}", "--format=%v").strip()
    return made["spec"]["nodeName"], named


def told(pool: Cluster, name: str, text: str) -> None:
    def reason() -> str:
        made: dict[str, Any] = get_pod(pool, name) or {}
        said = str(made["metadata"].get("annotations", {}).get(keys.REASON, ""))
        return said if text in said else ""

    wait_for(f"{name} is told {text}", reason, 40, 0.2)


def test_accounts_decide_who_gets_in_and_a_refusal_names_the_reservation(
    pool: Cluster, product: Product
) -> None:
    reserve(product, "mine", "gpu001", Accounts="phys")
    reserve(product, "theirs", "gpu[002-003]", Users="nobody")
    start(pool, "other", **{keys.RESERVATION: "mine", keys.ACCOUNT: "chem"})
    start(pool, "foreign", **{keys.RESERVATION: "theirs", keys.ACCOUNT: "phys"})
    start(pool, "outside", **{keys.ACCOUNT: "phys"})
    told(pool, "other", "may not use the Slurm reservation asked for: mine")
    told(pool, "foreign", "may not use the Slurm reservation asked for: theirs")
    told(pool, "outside", "reserved in Slurm (mine, theirs)")
    assert not bound(pool)
    start(pool, "member", **{keys.RESERVATION: "mine", keys.ACCOUNT: "phys"})
    assert placed(pool, "member") == ("gpu001", "mine")
    assert len(bound(pool)) == 1


def test_a_flex_reservation_is_used_before_it_begins_and_a_magnetic_one_without_its_name(
    pool: Cluster, product: Product
) -> None:
    reserve(product, "soon", "gpu001", Users="root", StartTime="now+10minutes", Flags="FLEX")
    reserve(product, "magnet", "gpu002", Accounts="phys", Flags="MAGNETIC")
    reserve(product, "theirs", "gpu003", Users="nobody", Flags="MAGNETIC")
    start(pool, "drawn", **{keys.ACCOUNT: "phys"})
    assert placed(pool, "drawn") == ("gpu002", "magnet")
    start(pool, "early", **{keys.RESERVATION: "soon", keys.DURATION: "3h"})
    assert placed(pool, "early") == ("gpu001", "soon")


def test_a_gang_is_let_into_the_maintenance_of_its_own_and_cores_kept_for_others_leave_the_rest(
    pool: Cluster, product: Product
) -> None:
    reserve(product, "repair", "gpu[001-002]", Users="root", Flags="MAINT,IGNORE_JOBS")
    reserve(product, "theirs", "gpu003", Users="nobody", CoreCnt="8")
    for rank in range(2):
        own = {keys.GROUP: "g", keys.GROUP_SIZE: "2", keys.RANK: str(rank)}
        start(pool, f"g-{rank}", **own, **{keys.RESERVATION: "repair"})
    assert {placed(pool, f"g-{rank}") for rank in range(2)} == {
        ("gpu001", "repair"),
        ("gpu002", "repair"),
    }
    start(pool, "beside")
    assert placed(pool, "beside") == ("gpu003", "(null)")
    assert pool.checker.sample().violations == ()
