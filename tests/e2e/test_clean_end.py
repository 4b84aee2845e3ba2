"""The end of pods, in all the ways in which Kubernetes ends them: no claim too early, none for ever."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.scene import (
    PODS,
    bound,
    claims,
    clear,
    get_pod,
    is_bound,
    settled,
    stays,
    submit,
    wait_for,
)
from tests.support.kube_api import STRATEGIC
from tests.support.kube_objects import GPU, HOLLOW, pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.fixtures import ClusterFactory

pytestmark = pytest.mark.e2e

LINGER_S = 4
JOBS = "/apis/batch/v1/namespaces/default/jobs"


@pytest.fixture(scope="module")
def product(cluster: ClusterFactory) -> Iterator[Product]:
    """4 nodes with 4 GPUs, and the real Job controller."""
    started = cluster(
        SlurmConfig(nodes=4, gpus_per_node=4), scheduler=False, controller_manager=True
    )
    with Product(started, sections={"rules": {"lingerS": LINGER_S}}) as running:
        yield running


@pytest.fixture(name="pool")
def _pool(product: Product) -> Iterator[Cluster]:
    yield product.cluster
    clear(product.cluster)


def _run(pool: Cluster, name: str, **fields: Any) -> str:
    """A pod of 2 GPUs that runs; its node."""
    pool.kube.api.create(pod(name, gpus=2, **fields))
    wait_for(f"{name} runs", lambda: is_bound(pool, name) and settled(pool), 20)
    return str((get_pod(pool, name) or {})["spec"]["nodeName"])


def _gone(pool: Cluster, timeout_s: float = 20) -> None:
    wait_for("its claim is given back", lambda: not claims(pool), timeout_s, 0.1)


def _finish(pool: Cluster, name: str, phase: str, reason: str = "") -> None:
    """As a kubelet tells the end of a pod."""
    body = {"status": {"phase": phase, "reason": reason}}
    pool.kube.api.patch(f"{PODS}/{name}/status", body, STRATEGIC)


def test_a_finished_pod_that_lingers_holds_no_gpu(pool: Cluster) -> None:
    _run(pool, "done", run_s=1)
    _gone(pool)
    found = get_pod(pool, "done")
    assert found is not None
    assert found["status"]["phase"] == "Succeeded"
    # All 16 GPUs are Slurm's, though the object is there for days.
    submit(pool, "--gres=gpu:4", "--mem=100", count=4)
    wait_for("all are used", lambda: pool.checker.sample().gpus_used == 16, 20, 0.3)


@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        ("Failed", ""),
        ("Failed", "Terminated"),  # graceful node shutdown
        ("Failed", "NodeShutdown"),
        ("Failed", "Evicted"),  # by the kubelet, for lack of memory or disk
        ("Failed", "DeadlineExceeded"),
        ("Failed", "OutOfnvidia.com/gpu"),
        ("Succeeded", ""),
    ],
)
def test_whatever_ended_it_a_pod_that_is_over_gives_its_claim_back(
    pool: Cluster, phase: str, reason: str
) -> None:
    _run(pool, "over")
    _finish(pool, "over", phase, reason)
    _gone(pool)
    assert get_pod(pool, "over") is not None


def test_a_deadline_ends_pod_and_claim(pool: Cluster) -> None:
    _run(pool, "short", spec={"activeDeadlineSeconds": 2})
    _gone(pool)
    assert (get_pod(pool, "short") or {})["status"]["reason"] == "DeadlineExceeded"


def test_a_pod_that_is_stuck_terminating_by_a_finalizer_holds_no_gpu_once_it_is_over(
    pool: Cluster,
) -> None:
    body = pod("stuck", gpus=2)
    body["metadata"]["finalizers"] = ["example.org/never"]
    pool.kube.api.create(body)
    wait_for("it runs", lambda: is_bound(pool, "stuck") and settled(pool), 20)
    pool.kube.api.delete(f"{PODS}/stuck")
    _gone(pool)
    assert "deletionTimestamp" in (get_pod(pool, "stuck") or {})["metadata"]
    pool.kube.api.patch(f"{PODS}/stuck", {"metadata": {"finalizers": None}})


def test_a_pod_that_is_stuck_terminating_on_a_dead_kubelet_keeps_its_claim(pool: Cluster) -> None:
    node = _run(pool, "hangs", grace_s=1)
    labels = f"/api/v1/nodes/{node}"
    pool.kube.api.patch(labels, {"metadata": {"labels": {HOLLOW: None}}})
    pool.kube.api.delete(f"{PODS}/hangs")
    time.sleep(LINGER_S + 4)
    assert len(claims(pool)) == 1
    pool.kube.api.patch(labels, {"metadata": {"labels": {HOLLOW: "true"}}})
    _gone(pool)
    assert get_pod(pool, "hangs") is None


def test_a_pod_deleted_by_force_keeps_its_claim_while_its_processes_may_live(pool: Cluster) -> None:
    _run(pool, "forced", grace_s=1)
    began = time.monotonic()
    pool.kube.api.delete(f"{PODS}/forced", grace_s=0)
    stays("its claim", lambda: len(claims(pool)) == 1, LINGER_S - 1.5, began)
    _gone(pool)


def test_a_pod_made_again_under_the_same_name_is_another_pod(pool: Cluster) -> None:
    _run(pool, "again", grace_s=1)
    (first,) = claims(pool)
    pool.kube.api.delete(f"{PODS}/again", grace_s=0)
    pool.kube.api.create(pod("again", gpus=2))
    wait_for("the second runs beside the first's claim", lambda: is_bound(pool, "again"), 10)
    wait_for("only the second's is left", lambda: settled(pool), 20)
    (second,) = claims(pool)
    assert second != first
    assert pool.checker.sample().violations == ()


def test_an_eviction_by_the_api_ends_the_claim_after_the_containers(pool: Cluster) -> None:
    _run(pool, "moved", stop_s=3, grace_s=20)
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "moved", "namespace": "default"},
    }
    began = time.monotonic()
    pool.kube.api.request("POST", f"{PODS}/moved/eviction", body)
    stays("its claim", lambda: len(claims(pool)) == 1, 2, began)
    _gone(pool)


def test_completed_init_containers_leave_the_claim_as_it_is(pool: Cluster) -> None:
    init = {"name": "warm-up", "image": "x", "resources": {"limits": {GPU: "3"}}}
    pool.kube.api.create(pod("init", gpus=1, spec={"initContainers": [init]}))
    wait_for("it runs", lambda: is_bound(pool, "init") and settled(pool), 20)
    status = {
        "initContainerStatuses": [
            {
                "name": "warm-up",
                "image": "x",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"terminated": {"exitCode": 0, "reason": "Completed"}},
            }
        ]
    }
    pool.kube.api.patch(f"{PODS}/init/status", {"status": status}, STRATEGIC)
    time.sleep(3)
    # The kubelet does not give its devices back either: they are the pod's to its end.
    assert pool.checker.sample().gpus_used == 3
    assert settled(pool)
    _finish(pool, "init", "Succeeded")
    _gone(pool)


def test_each_try_of_a_job_has_a_claim_of_its_own_and_none_is_left(pool: Cluster) -> None:
    template = pod("ignored", gpus=2, annotations={"hollow.test/exit-code": "1"}, run_s=1)
    template["spec"]["restartPolicy"] = "Never"
    spec = {
        "backoffLimit": 1,  # each further try waits twice as long, from 10 s on
        "template": {"metadata": template["metadata"], "spec": template["spec"]},
    }
    for field in ("name", "namespace"):
        spec["template"]["metadata"].pop(field)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "tries"}, "spec": spec}
    seen: dict[int, str] = {}
    pool.kube.api.request("POST", JOBS, job)

    def has_failed() -> bool:
        seen.update(claims(pool))
        found = pool.kube.api.get(f"{JOBS}/tries")["status"]
        return any(c["type"] == "Failed" and c["status"] == "True" for c in found["conditions"])

    def failed() -> bool:
        try:
            return has_failed()
        except KeyError:
            return False

    wait_for("it has given up", failed, 90, 0.1)
    _gone(pool)
    assert len(seen) == 2
    assert len(set(seen.values())) == 2
    assert bound(pool) == []
    pool.kube.api.delete(f"{JOBS}/tries")
