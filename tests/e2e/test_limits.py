"""Limits of accounts and QOS, kept by a Slurm with slurmdbd: pods and native jobs count together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from slurmbridge.pool import keys
from tests.e2e.scene import (
    PODS,
    bound,
    claims,
    clear,
    events_of,
    get_pod,
    is_bound,
    submit,
    wait_for,
)
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e
NATIVE = ("--account=ml", "--qos=four", "--mem=100")
"""A native job of the account and the QOS that pods have here by default."""
RULE = {"namespaces": ["default"], "accounts": ["ml", "unknown"], "qos": ["four", "others"]}


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    """Two nodes with 8 GPUs, of which the QOS `four` may have 4 at a time."""
    pool = cluster(SlurmConfig(nodes=2, bf_interval_s=1, accounting=True), scheduler=False)
    accounts(pool, "add account ml", "add qos four set GrpTRES=gres/gpu=4", "add qos others")
    for user in ("root", "nobody"):
        accounts(pool, f"add user {user} account=ml set qos=normal,four")
    with Product(pool, policy={"identities": [RULE]}) as running:
        yield running


def accounts(pool: Cluster, *lines: str) -> None:
    for line in lines:
        pool.slurm.run("sacctmgr", "-i", *line.split())


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def gated(name: str, gpus: int, **notes: str) -> dict[str, Any]:
    return pod(name, gpus=gpus, annotations=notes, gates=[keys.GATE])


def gang(name: str, size: int, gpus: int, notes: dict[str, str]) -> list[dict[str, Any]]:
    own = notes | {keys.GROUP: name, keys.GROUP_SIZE: str(size)}
    return [gated(f"{name}-{i}", gpus, **own) for i in range(size)]


def told(pool: Cluster, name: str) -> str:
    made = get_pod(pool, name) or {}
    return str(made.get("metadata", {}).get("annotations", {}).get(keys.REASON, ""))


def running(pool: Cluster, *options: str) -> int:
    job = submit(pool, *NATIVE, *options)[0]
    wait_for("it runs", lambda: slurm_says(pool, job).startswith("RUNNING"), 30)
    return job


def unscheduled(pool: Cluster, name: str) -> str:
    return events_of(pool, name).get("FailedScheduling", "")


def slurm_says(pool: Cluster, job: int) -> str:
    return pool.slurm.run("squeue", "-h", f"--jobs={job}", "--format=%T %r").strip()


def test_pods_and_native_jobs_of_a_qos_have_its_gpus_together(
    pool: Cluster, product: Product
) -> None:
    """A pod over the limit waits and is told, with the gate and without, until there is room."""
    native = running(pool, "--gres=gpu:2")
    pool.kube.api.create_all([gated("a", 1), pod("b", gpus=1)])
    wait_for("both are bound", lambda: len(bound(pool)) == 2, 30)
    late = submit(pool, *NATIVE, "--gres=gpu:1")[0]
    wait_for("a job waits", lambda: slurm_says(pool, late) == "PENDING QOSGrpGRES", 30)
    pool.slurm.run("scancel", str(late))
    pool.kube.api.create_all([gated("c", 1), pod("d", gpus=1)])
    refusal = "account ml, QOS four: salloc: error: .*: Job violates accounting/QOS policy"
    wait_for("c is told", lambda: re.search(refusal, told(pool, "c")), 30, 0.2)
    wait_for("d is told", lambda: re.search(refusal, unscheduled(pool, "d")), 30, 0.2)
    assert re.search(refusal, product.cli("explain", "default/c")["waits"]["text"])
    assert {p["metadata"]["name"] for p in bound(pool)} == {"a", "b"}
    pool.slurm.run("scancel", str(native))
    wait_for("these are bound too", lambda: len(bound(pool)) == 4, 60)
    assert pool.checker.sample().violations == ()


def test_gangs_over_the_limit_wait_in_slurms_queue_until_it_allows_them(pool: Cluster) -> None:
    """Also one that asked for its claim at once."""
    native = running(pool, "--gres=gpu:3")
    pool.kube.api.create_all(gang("g", 2, 1, {keys.MODE: "queued"}) + gang("h", 2, 1, {}))
    waits = re.compile(r"waits in Slurm's queue as job (\d+) \(QOSGrpGRES\)")
    jobs = set()
    for name in ("g-0", "g-1", "h-0", "h-1"):
        wait_for("it says so", lambda n=name: waits.search(told(pool, n)), 30, 0.2)
        jobs |= {int(number) for number in waits.findall(told(pool, name))}
    assert set(claims(pool)) == jobs
    assert {slurm_says(pool, job) for job in jobs} == {"PENDING QOSGrpGRES"}
    pool.slurm.run("scancel", str(native))
    wait_for("all are bound", lambda: len(bound(pool)) == 4, 60)
    assert set(claims(pool)) == jobs
    assert pool.checker.sample().violations == ()


def test_who_may_not_use_an_account_or_a_qos_is_told_which_and_keeps_nobody_else_waiting(
    pool: Cluster, product: Product
) -> None:
    wrong = {
        "account": ({keys.ACCOUNT: "unknown"}, "account unknown, QOS four: .*Invalid account"),
        "qos": ({keys.QOS: "others"}, "account ml, QOS others: .*Invalid qos specification"),
    }
    before = refusals(product)
    for word, (notes, _) in wrong.items():
        made = [gated(f"{word}-alone", 1, **notes), pod(f"{word}-free", gpus=1, annotations=notes)]
        pool.kube.api.create_all([*made, *gang(f"{word}-gang", 2, 1, notes)])
    for word, (_, text) in wrong.items():
        for name in (f"{word}-alone", f"{word}-gang-0", f"{word}-gang-1"):
            wait_for(name, lambda n=name, t=text: re.search(t, told(pool, n)), 30, 0.2)
        free = f"{word}-free"
        wait_for(free, lambda n=free, t=text: re.search(t, unscheduled(pool, n)), 30, 0.2)
    pool.kube.api.create(gated("right", 1))
    wait_for("another is bound", lambda: is_bound(pool, "right"), 30)
    assert len(claims(pool)) == 1
    # Eight askers, each after growing pauses; one without any would ask a hundred times a second.
    assert 6 <= refusals(product) - before <= 120
    assert product.metrics()["slurmbridge_breaker_open"] == 0


def refusals(product: Product) -> int:
    log = product.log("bridge-0")
    return log.count('"claim refused"') + log.count('"gang refused"') + log.count("gang not queued")


def test_without_slurmdbd_pods_are_bound_and_released_and_with_it_limits_change_again(
    pool: Cluster,
) -> None:
    pool.kube.api.create(gated("before", 2))
    wait_for("it is bound", lambda: is_bound(pool, "before"), 30)
    pool.slurm.kill9_slurmdbd()
    pool.kube.api.create(gated("with", 2))
    wait_for("it is bound beside it", lambda: is_bound(pool, "with"), 30)
    pool.kube.api.create(gated("over", 2))
    wait_for("the limit holds", lambda: "account ml, QOS four" in told(pool, "over"), 30, 0.2)
    pool.kube.api.delete(f"{PODS}/before")
    wait_for("the next one has its place", lambda: is_bound(pool, "over"), 60)
    pool.kube.api.create(gated("more", 4))
    pool.slurm.start_slurmdbd()
    accounts(pool, "modify qos four set GrpTRES=gres/gpu=8")
    wait_for("it is bound under the new limit", lambda: is_bound(pool, "more"), 60)
    assert len(claims(pool)) == 3
    assert pool.checker.sample().violations == ()
