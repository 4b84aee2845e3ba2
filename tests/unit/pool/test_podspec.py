"""Pods and nodes as they come from the API server, in our words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from slurmbridge.pool import keys
from slurmbridge.pool.podspec import FAULT_CHARS, read_node, read_pod
from slurmbridge.pool.raw import RawNode, RawPod
from slurmbridge.pool.record import GpuRequest, KubeNode, PodRecord

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.10gb"
POOL = {GPU: "", MIG: "1g.10gb"}


def box(limits: Any = None, *, requests: Any = None, **more: Any) -> dict[str, Any]:
    """A container; limits or requests may be a number of GPUs."""
    resources = {}
    for key, value in (("limits", limits), ("requests", requests)):
        if value is not None:
            resources[key] = value if isinstance(value, dict) else {GPU: str(value)}
    return {"name": "c", "image": "i", "resources": resources, **more}


def sidecar(limits: Any = None, **more: Any) -> dict[str, Any]:
    return box(limits, restartPolicy="Always", **more)


def pod(*containers: dict[str, Any], init: Any = (), **spec: Any) -> PodRecord:
    body = {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", "resourceVersion": "7"},
        "spec": {"containers": list(containers), "initContainers": list(init), **spec},
        "status": {"phase": "Pending"},
    }
    return read(body)


def read(body: dict[str, Any]) -> PodRecord:
    return read_pod(msgspec.json.decode(json.dumps(body), type=RawPod), POOL)


GPUS = {
    "one container": (pod(box(2)), 2),
    "containers run together": (pod(box(2), box(1), box()), 3),
    "request without limit": (pod(box(requests=2)), 2),
    "limit without request": (pod(box(limits=2)), 2),
    "request counts where both are given": (pod(box(limits=4, requests=3)), 3),
    "an init container before": (pod(box(1), init=[box(4)]), 4),
    "a smaller init container before": (pod(box(4), init=[box(1)]), 4),
    "init containers run one by one": (pod(box(1), init=[box(2), box(3)]), 3),
    "a sidecar runs beside": (pod(box(2), init=[sidecar(1)]), 3),
    # kubernetes#134880: 3 at the peak (sidecar and init), 2 later.
    "sidecar 1, init 2, main 1": (pod(box(1), init=[sidecar(1), box(2)]), 3),
    "init 2 before the sidecar 1, main 1": (pod(box(1), init=[box(2), sidecar(1)]), 2),
    "init between two sidecars": (pod(box(1), init=[sidecar(1), box(3), sidecar(2)]), 4),
    "sidecars alone": (pod(box(), init=[sidecar(1), sidecar(2)]), 3),
    "JSON number in place of text": (pod(box({GPU: 2})), 2),
    "exponent": (pod(box("2e0")), 2),
    "CPU-only containers beside": (pod(box({"cpu": "1"}), box(1)), 1),
}


@pytest.mark.parametrize(("record", "expected"), GPUS.values(), ids=GPUS)
def test_gpus_of_a_pod(record: PodRecord, expected: int) -> None:
    assert (record.gpu, record.fault) == (GpuRequest(count=expected), "")


def test_the_resource_name_decides_the_gres_type() -> None:
    assert pod(box({MIG: "3"})).gpu == GpuRequest(count=3, type="1g.10gb")


NO_GPU = {
    "no resources at all": pod({"name": "c"}),
    "CPU only": pod(box({"cpu": "1", "memory": "1Gi"})),
    "zero GPUs": pod(box(0), init=[sidecar(0)]),
    "GPUs that are not in the pool": pod(box({"amd.com/gpu": "3"})),
    "absurd quantities that are none of our business": pod(box({"amd.com/gpu": "-1", "cpu": "x"})),
    "no container": pod(),
    "null lists": read({"metadata": {}, "spec": {"containers": None}, "status": {}}),
    "empty object": read({}),
}


@pytest.mark.parametrize("record", NO_GPU.values(), ids=NO_GPU)
def test_pods_without_pool_gpus_are_left_alone(record: PodRecord) -> None:
    assert (record.gpu, record.fault) == (None, "")


FAULTS = {
    "negative": (pod(box("-1")), "negative"),
    "fraction": (pod(box("1.5")), "whole numbers"),
    "a billion": (pod(box("1e9")), "cannot be on one node"),
    "garbage": (pod(box("many")), "expected a Kubernetes quantity"),
    "exponent bomb": (pod(box("1e999999999")), "expected a Kubernetes quantity"),
    "too many in sum": (pod(*[box(1000)] * 5), "cannot be on one node"),
    "one bad container among good ones": (pod(box(1), box("x")), "expected a Kubernetes"),
    "bad init container": (pod(box(1), init=[box("x")]), "expected a Kubernetes"),
    "two kinds in one pod": (pod(box(1), box({MIG: "1"})), "one kind of pool GPU"),
    "GPUs as overhead": (pod(box(1), overhead={GPU: "1"}), "pod overhead"),
    "GPUs of the whole pod": (pod(box(1), resources={"limits": {GPU: "1"}}), "pod-level"),
    "unreadable CPU of a GPU pod": (pod(box({GPU: "1", "cpu": "x"})), "expected a Kubernetes"),
    "absurd CPU of a GPU pod": (pod(box({GPU: "1", "cpu": "1e20"})), "CPUs cannot be"),
    "absurd memory of a GPU pod": (pod(box({GPU: "1", "memory": "1e29"})), "MiB cannot be"),
    "negative memory of a GPU pod": (pod(box({GPU: "1", "memory": "-1"})), "negative"),
}


@pytest.mark.parametrize(("record", "text"), FAULTS.values(), ids=FAULTS)
def test_a_request_that_cannot_be_served_is_a_fault_and_no_crash(
    record: PodRecord, text: str
) -> None:
    assert record.gpu is None
    assert text in record.fault
    assert len(record.fault) <= FAULT_CHARS


SIZES = {
    "halves": (pod(box({"cpu": "500m"}), box({"cpu": "600m"})), 2, 0),
    "requests, not limits": (
        pod(box({"cpu": "8", "memory": "8Gi"}, requests={"cpu": "1", "memory": "1Gi"})),
        1,
        1024,
    ),
    "init container is larger": (pod(box({"cpu": "1"}), init=[box({"cpu": "3"})]), 3, 0),
    "sidecar beside": (pod(box({"cpu": "1"}), init=[sidecar({"cpu": "2"})]), 3, 0),
    "overhead comes on top": (
        pod(box({"cpu": "1", "memory": "1Gi"}), overhead={"cpu": "250m", "memory": "120Mi"}),
        2,
        1144,
    ),
    "pod-level requests replace the sum": (
        pod(box({"cpu": "1", "memory": "9Gi"}), resources={"requests": {"cpu": "6"}}),
        6,
        9216,
    ),
    "pod-level limit where nothing else is said": (
        pod(box(), resources={"limits": {"memory": "2Gi"}}),
        0,
        2048,
    ),
    "pod-level and overhead": (
        pod(box(), resources={"requests": {"cpu": "2"}}, overhead={"cpu": "1"}),
        3,
        0,
    ),
}


@pytest.mark.parametrize(("record", "cpus", "memory"), SIZES.values(), ids=SIZES)
def test_cpus_and_memory_of_a_pod(record: PodRecord, cpus: int, memory: int) -> None:
    assert (record.cpus, record.memory_mib) == (cpus, memory)


def test_all_else_that_we_need_of_a_pod_is_read() -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "train-0",
            "namespace": "team-a",
            "uid": "1-2-3",
            "resourceVersion": "99",
            "creationTimestamp": "2026-11-30T15:00:00Z",
            "deletionTimestamp": "2026-11-30T15:10:45Z",
            "deletionGracePeriodSeconds": 45,
            "labels": {"app": "x"},
            "annotations": {
                "slurmbridge.dev/account": "ml",
                "leaderworkerset.sigs.k8s.io/size": "4",
                "kubernetes.io/config.mirror": "abc",
            },
            "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:metadata": {}}}],
        },
        "spec": {
            "containers": [box(1)],
            "nodeName": "n1",
            "serviceAccountName": "builder",
            "schedulerName": "gpu-scheduler",
            "priority": -5,
            "schedulingGates": [{"name": "slurmbridge.dev/claim"}, {"name": "other"}],
            "activeDeadlineSeconds": 600,
            "terminationGracePeriodSeconds": 45,
        },
        "status": {
            "phase": "Running",
            "nominatedNodeName": "n2",
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"},
            ],
        },
    }
    raw = msgspec.json.decode(json.dumps(body), type=RawPod)
    assert read_pod(raw, POOL) == PodRecord(
        uid="1-2-3",
        namespace="team-a",
        name="train-0",
        phase="Running",
        node="n1",
        gpu=GpuRequest(count=1),
        annotations={"slurmbridge.dev/account": "ml"},
        service_account="builder",
        scheduler="gpu-scheduler",
        priority=-5,
        gates=("slurmbridge.dev/claim", "other"),
        active_deadline_s=600,
        grace_s=45,
        created=1796050800.0,
        deleting_since=1796051400.0,
        waiting_on_us=True,
        resource_version="99",
        nominated="n2",
        is_static=True,
    )


def test_of_what_a_user_may_make_endlessly_long_a_part_is_kept() -> None:
    notes = {keys.ACCOUNT: "x" * 200_000, "slurmbridge.dev/other": "y", keys.GATE: "z"}
    gates = [{"name": f"g{i}"} for i in range(5_000)]
    kept = read(
        {
            "metadata": {"annotations": notes},
            "spec": {"containers": [box(1)], "schedulingGates": [*gates, {"name": keys.GATE}]},
        }
    )
    assert {k: len(v) for k, v in kept.annotations.items()} == {keys.ACCOUNT: 4096, keys.CLAIM: 1}
    assert (len(kept.gates), kept.gates[0]) == (64, keys.GATE)
    assert kept.gpu is not None


def test_a_node_selector_beyond_all_sense_is_told_and_not_kept() -> None:
    wanted = {f"label-{i}": "x" for i in range(65)}
    record = pod(box(1), nodeSelector=wanted)
    assert (record.gpu, record.fit.selector) == (None, ())
    assert "nodeSelector has more than 64 labels" in record.fault
    assert len(pod(box(1), nodeSelector=dict([*wanted.items()][:64])).fit.selector) == 64
    assert pod(box(), nodeSelector=wanted).fault == ""


def test_a_pod_without_a_phase_counts_as_unknown_and_not_as_over() -> None:
    record = read({"metadata": {"creationTimestamp": None}, "status": {"phase": None}})
    assert (record.phase, record.is_over, record.created) == ("Unknown", False, 0.0)


def test_no_grace_is_not_the_default_grace() -> None:
    assert pod(box(1), terminationGracePeriodSeconds=0).grace_s == 0
    assert pod(box(1)).grace_s == 30


WAITING = {
    "refused by kube-scheduler": ("False", "Unschedulable", True),
    "behind a gate": ("False", "SchedulingGated", False),
    "scheduler error": ("False", "SchedulerError", False),
    "scheduled": ("True", None, False),
}


@pytest.mark.parametrize(("status", "reason", "expected"), WAITING.values(), ids=WAITING)
def test_only_a_pod_that_was_tried_and_refused_waits_on_us(
    status: str, reason: str | None, expected: bool
) -> None:
    condition = {"type": "PodScheduled", "status": status, "reason": reason}
    assert read({"status": {"conditions": [condition]}}).waiting_on_us is expected


def test_a_refusal_by_an_extender_that_does_not_know_the_claim_yet_is_told_apart() -> None:
    message = "0/2 nodes are available: 1 cordoned, 1 slurmbridge: the pod waits for its claim."
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    assert read({"status": {"conditions": [refused | {"message": message}]}}).claim_unseen
    assert not read({"status": {"conditions": [refused | {"message": "1 cordoned"}]}}).claim_unseen
    # This one knows it: the claim's node is refused by kube-scheduler itself.
    message = "0/2: 1 cordoned, 1 slurmbridge: the pod's claim is on another node."
    assert not read({"status": {"conditions": [refused | {"message": message}]}}).claim_unseen
    message = "0/2: 1 cordoned, 1 slurmbridge: not enough free GPUs."
    assert read({"status": {"conditions": [refused | {"message": message}]}}).claim_unseen


@pytest.mark.parametrize("text", ["yesterday", "2026-11-30T15:00:00", ""])
def test_a_time_that_cannot_be_read_is_no_time(text: str) -> None:
    record = read({"metadata": {"creationTimestamp": text, "deletionTimestamp": text}})
    assert (record.created, record.deleting_since) == (0.0, None)


NODE = {
    "metadata": {
        "name": "n1",
        "uid": "u1",
        "resourceVersion": "5",
        "labels": {"rack": "r1"},
        "annotations": {"slurmbridge.dev/pool": "{}", "volumes": "x"},
    },
    "spec": {"unschedulable": True},
    "status": {
        "allocatable": {
            "cpu": "127500m",
            "memory": "1056270152Ki",
            "pods": "110",
            "hugepages-2Mi": "0",
            "attachable-volumes.kubernetes.io/x": "3",
            GPU: "8",
            MIG: "-2",
        },
        "conditions": [
            {"type": "MemoryPressure", "status": "False"},
            {"type": "Ready", "status": "True"},
        ],
    },
}


def node(body: dict[str, Any], resources: Any = None) -> KubeNode:
    return read_node(msgspec.json.decode(json.dumps(body), type=RawNode), resources)


def test_a_node_offers_what_it_can_rounded_down() -> None:
    assert node(NODE) == KubeNode(
        name="n1",
        uid="u1",
        ready=True,
        unschedulable=True,
        gpus={GPU: 8},
        cpus=127,
        memory_mib=1031513,
        labels={"rack": "r1"},
        annotations={"slurmbridge.dev/pool": "{}"},
        resource_version="5",
    )


def test_a_number_of_gpus_that_cannot_be_read_is_unknown_and_not_zero() -> None:
    assert MIG not in node(NODE).gpus


def test_only_the_resources_asked_for_are_read() -> None:
    assert node(NODE, {"amd.com/gpu"}).gpus == {}


def test_a_node_that_says_nothing_is_not_ready_and_offers_nothing() -> None:
    assert node({}) == KubeNode(name="", uid="", ready=False, unschedulable=False, gpus={})
    bad = node({"status": {"allocatable": {"cpu": "x", "memory": "-1"}, "conditions": None}})
    assert (bad.cpus, bad.memory_mib, bad.ready) == (0, 0, False)
