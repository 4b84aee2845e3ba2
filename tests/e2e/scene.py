"""Words of the end-to-end tests: pods and jobs thrown in, conditions waited for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.support.cluster import Cluster
    from tests.support.product import Product

PODS = "/api/v1/namespaces/default/pods"


def wait_for(what: str, ready: Callable[[], Any], timeout_s: float, every_s: float = 0.05) -> float:
    """Seconds until `ready` is true; AssertionError with what it returned last."""
    began = time.monotonic()
    last: Any = None
    while time.monotonic() - began < timeout_s:
        last = ready()
        if last:
            return time.monotonic() - began
        time.sleep(every_s)
    raise AssertionError(f"not within {timeout_s:g} s: {what} (last: {last!r})")


def stays(what: str, holds: Callable[[], object], seconds: float, since: float) -> None:
    """Every look that has ended within so many seconds of `since` finds it so.

    since: a moment of `time.monotonic` before what may end it began; a look that ends later is of
    nobody knows when.
    """
    while True:
        held = holds()
        if time.monotonic() - since > seconds:
            return
        assert held, f"not for {seconds:g} s: {what}"
        time.sleep(0.2)


def get_pod(cluster: Cluster, name: str) -> dict[str, Any] | None:
    """A pod of the default namespace, or None."""
    return cluster.kube.api.find(f"{PODS}/{name}")


def bound(cluster: Cluster, prefix: str = "") -> list[dict[str, Any]]:
    """Live bound pods whose names begin with `prefix`."""
    return [
        p
        for p in cluster.kube.api.items(PODS)
        if p["metadata"]["name"].startswith(prefix)
        and p["spec"].get("nodeName")
        and p["status"].get("phase") not in ("Succeeded", "Failed")
    ]


def asks_for_gpus(pod: dict[str, Any]) -> bool:
    """Whether a pod has a GPU in its limits."""
    containers = pod["spec"]["containers"]
    return any("nvidia.com/gpu" in c["resources"].get("limits", {}) for c in containers)


def is_bound(cluster: Cluster, name: str) -> bool:
    """Whether a pod has a node."""
    pod = get_pod(cluster, name)
    return bool(pod and pod["spec"].get("nodeName"))


def condition(cluster: Cluster, name: str, kind: str = "PodScheduled") -> str:
    """`Reason: message` of a pod's condition, "" when there is none."""
    pod = get_pod(cluster, name)
    for entry in (pod or {}).get("status", {}).get("conditions", []):
        if entry["type"] == kind:
            return f"{entry.get('reason', '')}: {entry.get('message', '')}"
    return ""


def events_of(cluster: Cluster, name: str) -> dict[str, str]:
    """Events on a pod: reason -> last message."""
    items = cluster.kube.api.items("/api/v1/namespaces/default/events")
    named = (e for e in items if e["involvedObject"].get("name") == name)  # some name none
    return {e["reason"]: e.get("message", "") for e in named}


def event_of(cluster: Cluster, name: str, reason: str) -> str:
    """Message of an event on a pod; events are written behind everything else."""
    wait_for(f"{name} is told {reason}", lambda: reason in events_of(cluster, name), 20, 0.2)
    return events_of(cluster, name)[reason]


def submit(cluster: Cluster, *options: str, seconds: float = 3600, count: int = 1) -> list[int]:
    """Native batch jobs that sleep; their ids."""

    def one(_: int) -> int:
        done = cluster.slurm.run(
            *("sbatch", "--parsable", "--output=/dev/null", "--chdir=/", *options),
            f"--wrap=exec sleep {seconds:g}",
            user="nobody",
        )
        return int(done.strip().partition(";")[0])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(count)))


def claims(cluster: Cluster, states: str = "R,PD") -> dict[int, str]:
    """Claims in Slurm by job id -> comment, read without our code."""
    text = cluster.slurm.run(
        *("squeue", "-h", "-a", "--name=slurmbridge-test", f"--states={states}", "--format=%A %k")
    )
    rows = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return {int(job): comment for job, _, comment in rows}


def settled(cluster: Cluster) -> bool:
    """Whether every live bound pod has exactly one claim, and every claim exactly one pod, now."""
    pods = {p["metadata"]["uid"] for p in bound(cluster) if asks_for_gpus(p)}
    uids = [c.partition(" pod=")[2].partition(" ")[0] for c in claims(cluster).values()]
    return sorted(uids) == sorted(pods)


def assert_each_pod_has_one_claim(cluster: Cluster) -> None:
    """As `settled`, once what is given back has ended in Slurm too."""
    wait_for("each pod has one claim and each claim one pod", lambda: settled(cluster), 30)


def delete_all(cluster: Cluster, names: Iterable[str] | None = None) -> None:
    """Delete pods (all of the namespace when no names are given) and wait until they are gone."""
    wanted = [p["metadata"]["name"] for p in cluster.kube.api.items(PODS)]
    if names is not None:
        wanted = [n for n in wanted if n in set(names)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: cluster.kube.api.delete(f"{PODS}/{n}"), wanted))
    gone = set(wanted)
    wait_for(
        "pods are gone",
        lambda: not gone & {p["metadata"]["name"] for p in cluster.kube.api.items(PODS)},
        30,
    )


def wait_seen_free(product: Product, gpus: int) -> None:
    """What has just ended may still be in the bridge's last reading."""
    wait_for(
        "the pool is seen free", lambda: product.cli("status")["gpus"]["free"] == gpus, 30, 0.3
    )


def clear(cluster: Cluster) -> None:
    """No pods, no jobs, no claims: the next test finds an empty pool."""
    delete_all(cluster)
    cluster.slurm.run("scancel", "--user=nobody", check=False)
    wait_for(
        "no job is left",
        lambda: not cluster.slurm.run("squeue", "-h", "-a", "--format=%A").strip(),
        40,
        0.2,
    )
