"""What a pod asks for, and what a node offers, in our words.

The sum over a pod's containers follows Kubernetes (component-helpers `resource.PodRequests`,
KEP-753 sidecars, KEP-2837 pod-level resources): containers and sidecars run together; each ordinary
init container runs alone with the sidecars that started before it; the pod needs the larger of the
two, plus its overhead. Pod-level requests replace the sum for CPU and memory, and never name GPUs.
What a container asks is its request, or its limit where there is no request.

A GPU request that cannot be read is a `fault` in words for the pod's owner, never an exception: one
odd pod must not stop the reading of all others. Only pods that name a pool GPU can have a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from slurmbridge.pool import keys
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.group import group_of
from slurmbridge.pool.keys import PREFIX
from slurmbridge.pool.nodefit import ANYWHERE, NodeFit, Requirement, Taint, Toleration
from slurmbridge.pool.quantity import (
    MAX_COUNT,
    NANO,
    Number,
    amount,
    parse_count,
    whole_cpus,
    whole_mib,
)
from slurmbridge.pool.raw import (
    Amounts,
    RawCondition,
    RawContainer,
    RawNode,
    RawNodeInfo,
    RawPod,
    RawPodSpec,
    RawResources,
    unix_time,
)
from slurmbridge.pool.reason import Reason
from slurmbridge.pool.record import GpuRequest, KubeNode, PodRecord

DEFAULT_GRACE_S: Final = 30
"""Kubernetes' default of terminationGracePeriodSeconds."""
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Taint by which an operator vouches that a machine is off (non-graceful node shutdown)."""
UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"
"""Taint of a cordoned node, which says so besides."""
OURS: Final = "slurmbridge: "
"""How each reason of the extender begins (`slurmbridge.pool.reason`)."""
MIRROR_KEY: Final = "kubernetes.io/config.mirror"
"""Annotation of the kubelet on the API copy of a static pod; such a pod cannot be evicted."""
FAULT_CHARS: Final = 240
"""Longest fault text: it goes into annotations, events and scheduler messages."""
NOTE_CHARS: Final = 4096
"""What is kept of an annotation; Kubernetes takes 256 KiB for all, and a user makes many pods."""
MOST_ITEMS: Final = 64
"""Labels of a node selector, and scheduling gates: far more than anybody uses."""
_OUR_NOTES: Final = keys.USER_KEYS | keys.OUR_KEYS

_Reader = Callable[[Number], int]
"""Reads one quantity into a unit of its own; raises ParseError."""


def read_pod(
    raw: RawPod,
    resources: Mapping[str, str],
) -> PodRecord:
    """The record of a pod.

    Args:
        raw: the pod as received.
        resources: pool GPU resource -> Slurm GRES type, "" for any: `{"nvidia.com/gpu": ""}`.

    Returns:
        A record; `gpu` is None and `fault` is "" when it asks for no pool GPU (0 is none), `gpu`
        is None and `fault` says why when the request cannot be served as it is written. What a user
        may make as long as etcd takes is cut: annotations at `NOTE_CHARS`, a node selector and
        gates at `MOST_ITEMS`.

    Cost: about 5 us.

    """
    meta, spec, status = raw.metadata, raw.spec, raw.status
    gpu, fault = _gpus(spec, resources)
    selector = spec.node_selector or {}
    if len(selector) > MOST_ITEMS:
        selector = {}
        if gpu is not None:
            gpu, fault = None, f"nodeSelector has more than {MOST_ITEMS} labels"
    cpus = memory = 0
    try:
        cpus, memory = _cpus_and_memory(spec)
    except ParseError as error:
        if gpu is not None:
            gpu, fault = None, str(error)[:FAULT_CHARS]
    deleting = unix_time(meta.deletion_timestamp)
    if deleting is not None:
        # Kubernetes writes the moment at which the grace period ends.
        deleting -= meta.deletion_grace_period_seconds or 0
    grace = spec.termination_grace_period_seconds
    gates = [gate.name for gate in spec.scheduling_gates or ()]
    annotations = meta.annotations or {}
    return PodRecord(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        phase=status.phase or "Unknown",
        node=spec.node_name or "",
        gpu=gpu,
        cpus=cpus,
        memory_mib=memory,
        fault=fault,
        annotations={k: v[:NOTE_CHARS] for k, v in annotations.items() if k in _OUR_NOTES},
        service_account=spec.service_account_name or "",
        scheduler=spec.scheduler_name or "default-scheduler",
        priority=spec.priority or 0,
        gates=tuple(sorted(gates, key=keys.GATE.__ne__)[:MOST_ITEMS]),
        active_deadline_s=spec.active_deadline_seconds,
        grace_s=DEFAULT_GRACE_S if grace is None else grace,
        created=unix_time(meta.creation_timestamp) or 0.0,
        deleting_since=deleting,
        waiting_on_us=_is_unschedulable(status.conditions or ()),
        claim_unseen=_is_unschedulable(status.conditions or (), by_us=True),
        resource_version=meta.resource_version,
        nominated=status.nominated_node_name or "",
        is_static=MIRROR_KEY in annotations,
        fit=_fit(spec, selector),
        group=group_of(raw),
        bound_at=_bound_at(status.conditions or ()) if spec.node_name else None,
    )


def read_node(raw: RawNode, resources: Collection[str] | None = None) -> KubeNode:
    """The record of a node.

    Args:
        raw: the node as received.
        resources: which extended resources to read; None: all whose name has a domain.

    Returns:
        A record. A resource whose allocatable number cannot be read is left out of `gpus`
        (unknown, as if the device plugin had not registered); CPUs and memory are rounded down.

    """
    meta = raw.metadata
    allocatable = raw.status.allocatable or {}
    gpus: dict[str, int] = {}
    for name, value in allocatable.items():
        if (name in resources) if resources is not None else _is_extended(name):
            try:
                gpus[name] = parse_count(value)
            except ParseError:
                continue
    conditions = {c.type: c for c in raw.status.conditions or ()}
    ready, ours = conditions.get("Ready"), conditions.get(keys.SLURM_READY)
    return KubeNode(
        name=meta.name,
        uid=meta.uid,
        ready=ready is not None and ready.status == "True",
        unschedulable=bool(raw.spec.unschedulable),
        gpus=gpus,
        cpus=_floor(allocatable.get("cpu"), NANO),
        memory_mib=_floor(allocatable.get("memory"), NANO << 20),
        labels=meta.labels or {},
        annotations={k: v for k, v in (meta.annotations or {}).items() if k.startswith(PREFIX)},
        resource_version=meta.resource_version,
        ready_changed=None if ready is None else unix_time(ready.last_transition_time),
        fenced=any(taint.key == OUT_OF_SERVICE for taint in raw.spec.taints or ()),
        taints=tuple(
            Taint(taint.key, taint.value or "", taint.effect or "")
            for taint in raw.spec.taints or ()
            if taint.key != UNSCHEDULABLE
        ),
        slurm_ready=None if ours is None else (ours.status, ours.reason or "", ours.message or ""),
        boot_id=(raw.status.node_info or RawNodeInfo()).boot_id,
    )


def _fit(spec: RawPodSpec, labels: Mapping[str, str]) -> NodeFit:
    """What the pod says of nodes; of more than `MOST_ITEMS` kube-scheduler alone is the judge."""
    selector = tuple(sorted(labels.items()))
    tolerations = tuple(
        sorted(
            Toleration(t.key or "", t.operator or "Equal", t.value or "", t.effect or "")
            for t in (spec.tolerations or ())[:MOST_ITEMS]
        )
    )
    node = None if spec.affinity is None else spec.affinity.node_affinity
    required = None if node is None else node.required_during_scheduling_ignored_during_execution
    if required is None:
        return NodeFit(selector, tolerations) if selector or tolerations else ANYWHERE
    terms = tuple(
        tuple(
            Requirement(each.key, each.operator, each.values or (), is_field)
            for is_field, found in ((False, term.match_expressions), (True, term.match_fields))
            for each in found or ()
        )
        for term in required.node_selector_terms or ()
    )
    is_short = sum(1 + len(term) for term in terms) <= MOST_ITEMS
    return NodeFit(selector, tolerations, terms if is_short else None)


def _gpus(spec: RawPodSpec, resources: Mapping[str, str]) -> tuple[GpuRequest | None, str]:
    """What the pod asks of the pool, and what is wrong with it."""
    found: dict[str, int] = {}
    faults: list[str] = []
    for name in resources:
        try:
            count = _peak(spec, name, parse_count)
        except ParseError as error:
            faults.append(f"{name}: {error}")
            continue
        if count > MAX_COUNT:
            faults.append(f"{name}: more than {MAX_COUNT} GPUs cannot be on one node")
        elif count:
            found[name] = count
    faults += [
        f"{name}: pool GPUs cannot be asked for as {where}; ask for them in a container"
        for where, amounts in _misplaced(spec)
        for name in resources
        if str(amounts.get(name, "0")) != "0"
    ]
    if len(found) > 1:
        names = " and ".join(sorted(found))
        faults.append(f"the pod asks for {names}; one pod can have one kind of pool GPU")
    if faults:
        return None, "; ".join(faults)[:FAULT_CHARS]
    for name, count in found.items():
        return GpuRequest(count=count, type=resources[name]), ""
    return None, ""


def _misplaced(spec: RawPodSpec) -> Iterable[tuple[str, Amounts]]:
    """Places where Kubernetes accepts a resource name but never a device."""
    if spec.overhead:
        yield "pod overhead", spec.overhead
    if spec.resources is not None:
        yield "pod-level resources", spec.resources.requests or {}
        yield "pod-level resources", spec.resources.limits or {}


def _cpus_and_memory(spec: RawPodSpec) -> tuple[int, int]:
    """Whole CPUs and MiB of the pod.

    Raises:
        ParseError: a quantity cannot be read, or is beyond belief.

    """
    totals = []
    for name in ("cpu", "memory"):
        whole = _asked(spec.resources, name)
        total = _peak(spec, name, amount) if whole is None else amount(whole)
        if spec.overhead and name in spec.overhead:
            total += amount(spec.overhead[name])
        totals.append(total)
    return whole_cpus(totals[0]), whole_mib(totals[1])


def _peak(spec: RawPodSpec, name: str, read: _Reader) -> int:
    """The most of one resource that the pod ever needs at once, over its whole life."""
    sidecars = peak = 0
    for container in spec.init_containers or ():
        need = _need(container, name, read)
        if container.restart_policy == "Always":
            sidecars += need
            peak = max(peak, sidecars)
        else:
            peak = max(peak, sidecars + need)
    together = sidecars + sum(_need(c, name, read) for c in spec.containers or ())
    return max(peak, together)


def _need(container: RawContainer, name: str, read: _Reader) -> int:
    text = _asked(container.resources, name)
    return 0 if text is None else read(text)


def _asked(resources: RawResources | None, name: str) -> Number | None:
    """The request of a resource, or its limit where it has no request; None: neither."""
    if resources is None:
        return None
    request = (resources.requests or {}).get(name)
    return (resources.limits or {}).get(name) if request is None else request


def _floor(value: Number | None, unit: int) -> int:
    """Capacity in whole units, rounded down; what cannot be read is no capacity."""
    try:
        return amount(value) // unit if value is not None else 0
    except ParseError:
        return 0


def _is_extended(name: str) -> bool:
    """Whether a resource name has a domain that is not Kubernetes' own (`nvidia.com/gpu`)."""
    domain, slash, _ = name.partition("/")
    return bool(slash) and not domain.endswith("kubernetes.io")


def _is_unschedulable(conditions: Iterable[RawCondition], *, by_us: bool = False) -> bool:
    """Whether kube-scheduler has tried and refused the pod (a gated pod it has not tried).

    by_us: and an extender has judged it as one without a claim. Of one with a claim it says only
    that other nodes are not the claim's.
    """
    return any(
        c.type == "PodScheduled"
        and c.status == "False"
        and c.reason == "Unschedulable"
        and (not by_us or OURS in (c.message or "").replace(Reason.CLAIMED_ELSEWHERE.text, ""))
        for c in conditions
    )


def _bound_at(conditions: Iterable[RawCondition]) -> float | None:
    """When the pod was bound, as the API server noted it then."""
    times = (
        c.last_transition_time
        for c in conditions
        if c.type == "PodScheduled" and c.status == "True"
    )
    return unix_time(next(times, None))
