"""Kubernetes objects for tests, as plain dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.kube_api import Object

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GPU = "nvidia.com/gpu"
HOLLOW = "hollow.test/kubelet"
"""Node label: the hollow kubelet acts for this node. Taken off, the node's kubelet is dead."""

HOLLOW_READY = "hollow kubelets: ready"
"""What the process of the hollow kubelets prints once it has seen all nodes and pods."""


def node(
    name: str,
    *,
    gpus: int = 8,
    cpus: int = 64,
    memory_mb: int = 512_000,
    labels: Mapping[str, str] | None = None,
    pods: int = 110,
    hollow: bool = True,
) -> Object:
    """A Ready node with its capacity in the status, as a kubelet registers it. memory_mb: MiB."""
    amounts = {"cpu": str(cpus), "memory": f"{memory_mb}Mi", "pods": str(pods)}
    if gpus:
        amounts[GPU] = str(gpus)
    all_labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    all_labels |= {HOLLOW: "true"} if hollow else {}
    now = "2026-01-01T00:00:00Z"
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "hollow node of a test",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": all_labels | dict(labels or {})},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [ready],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        },
    }


def pod(
    name: str,
    *,
    gpus: int = 0,
    namespace: str = "default",
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    gates: Iterable[str] = (),
    node_name: str = "",
    cpus: str = "1",
    memory: str = "1Gi",
    grace_s: int = 5,
    run_s: float | None = None,
    stop_s: float | None = None,
    spec: Mapping[str, Any] | None = None,
) -> Object:
    """A pod with one container.

    Args:
        gates: names of scheduling gates.
        grace_s: terminationGracePeriodSeconds.
        run_s: the hollow kubelet ends it as Succeeded after so many seconds; None: it runs on.
        stop_s: its containers take so long to stop; None: 0.2 s.
        spec: more fields of the spec, or other values of ours.

    """
    notes = dict(annotations or {})
    if run_s is not None:
        notes["hollow.test/run-s"] = f"{run_s:g}"
    if stop_s is not None:
        notes["hollow.test/stop-s"] = f"{stop_s:g}"
    limits = {GPU: str(gpus)} if gpus else {}
    body: Object = {
        "terminationGracePeriodSeconds": grace_s,
        "containers": [
            {
                "name": "main",
                "image": "registry.invalid/main",
                "resources": {"requests": {"cpu": cpus, "memory": memory}, "limits": limits},
            }
        ],
    }
    if gates:
        body["schedulingGates"] = [{"name": gate} for gate in gates]
    if node_name:
        body["nodeName"] = node_name
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": notes,
            "labels": dict(labels or {}),
        },
        "spec": body | dict(spec or {}),
    }
