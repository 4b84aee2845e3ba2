"""A chaos run (ten minutes, or `SLURMBRIDGE_CHAOS_MINUTES`), and its judge on builds without a guard.

The judge must be able to fail: on a product from which one guard was taken out it finds the GPU
with two owners, and in the same story with the guard it finds nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.e2e.scene import PODS, bound, claims, get_pod, is_bound, submit, wait_for
from tests.support.altered import WITHOUT
from tests.support.chaos.judge import Causes, Judge
from tests.support.chaos.run import ALL_KINDS_MINUTES, Plan, run
from tests.support.cluster import Cluster
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.e2e


MINUTES = float(os.environ.get("SLURMBRIDGE_CHAOS_MINUTES", "10"))
HOLLOW = int(os.environ.get("SLURMBRIDGE_CHAOS_HOLLOW", "0"))
"""0: two real nodes with agents, as `make chaos` has them; else so many hollow ones without."""


@pytest.mark.timeout(90 * MINUTES + 1200)
def test_under_load_and_faults_no_promise_is_broken() -> None:
    report = run(Plan(minutes=MINUTES, seed=7, hollow=HOLLOW))
    told = report.as_json()
    print(json.dumps(told))
    assert report.double_owned == []
    assert report.judge.bare == []
    assert report.judge.wrong_evictions == []
    assert report.leaked == []
    assert report.stuck == []
    # Otherwise it has shown nothing.
    assert told["samples"] > 60 * MINUTES
    assert told["pods_bound"] - told["pods_excused"] > MINUTES
    assert sum(report.faults.values()) > 5 * MINUTES
    assert MINUTES < ALL_KINDS_MINUTES or report.not_done == []
    if not HOLLOW:
        assert told["device_samples"] > 60 * MINUTES
        assert told["pods_on_devices"] > 2 * MINUTES
        assert told["jobs_on_devices"] > MINUTES


@contextlib.contextmanager
def product_without(guard: str) -> Iterator[Cluster]:
    """One node with 8 GPUs and the product with a guard taken out, "" for none."""
    config = SlurmConfig(nodes=1, gpus_per_node=8)
    env = {WITHOUT: guard} if guard else {}
    with Cluster(config, scheduler=False) as cluster, Product(cluster, altered=True, env=env):
        yield cluster


@pytest.mark.parametrize("guard", ["", "own-book"])
def test_trusting_slurm_alone_gives_the_gpus_of_a_pod_that_still_stops_to_the_next(
    guard: str,
) -> None:
    """Slurm has ended a claim and says free; our own book says that its pod still runs."""
    with product_without(guard) as one_node, Judge(one_node.checker, Causes()) as judge:
        api = one_node.kube.api
        api.create(pod("first", gpus=4, grace_s=40, stop_s=8))
        wait_for("it runs", lambda: is_bound(one_node, "first"), 20)
        uid = (get_pod(one_node, "first") or {})["metadata"]["uid"]
        (claim,) = claims(one_node)
        judge.causes.cancelled.add(claim)
        one_node.slurm.run("scancel", str(claim))
        wait_for("it is told to go", lambda: _is_going(one_node, "first"), 20)
        api.create(pod("second", gpus=4))
        wait_for("the second is bound", lambda: is_bound(one_node, "second"), 60)
        at_once = (get_pod(one_node, "first") or {}).get("metadata", {}).get("uid") == uid
        samples = judge.samples
        wait_for("it was looked at", lambda: judge.samples > samples + 3, 20)
    found = [text for text in judge.double_owned if text.startswith("shared-index")]
    assert bool(found) == bool(guard), judge.double_owned
    assert at_once == bool(guard)


@pytest.mark.parametrize("guard", ["", "grace-period"])
def test_ending_a_claim_before_its_containers_gives_their_gpus_to_a_native_job(
    guard: str,
) -> None:
    with product_without(guard) as one_node, Judge(one_node.checker, Causes()) as judge:
        api = one_node.kube.api
        api.create(pod("slow", gpus=8, grace_s=40, stop_s=8))
        wait_for("it runs", lambda: is_bound(one_node, "slow"), 20)
        judge.causes.deleted.add((get_pod(one_node, "slow") or {})["metadata"]["uid"])
        submit(one_node, "--gres=gpu:8", "--mem=100", seconds=20)
        api.delete(f"{PODS}/slow")
        wait_for("the job has them", lambda: one_node.checker.sample().native_running == 1, 60)
        samples = judge.samples
        wait_for("it was looked at", lambda: judge.samples > samples + 3, 20)
        still_stopping = bool(bound(one_node, "slow"))
    found = [text for text in judge.double_owned if text.startswith("taken")]
    assert bool(found) == bool(guard), judge.double_owned
    assert still_stopping == bool(guard)


def _is_going(pool: Cluster, name: str) -> bool:
    return "deletionTimestamp" in (get_pod(pool, name) or {}).get("metadata", {})
