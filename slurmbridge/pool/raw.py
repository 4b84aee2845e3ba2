"""Pods and nodes as the API server writes them: only the fields that matter here.

Decoded straight from JSON bytes by msgspec, which skips the other nine tenths of an object without
building anything. The same structs read a list, a watch event, and the pod or node inside a
kube-scheduler `ExtenderArgs` (all are `core/v1`). Every field may be absent or null: older servers
write `creationTimestamp: null`, and an absent list may be written as null too.

`slurmbridge.pool.podspec` refines them into `PodRecord` and `KubeNode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec

from slurmbridge.pool.quantity import Number

Amounts = Mapping[str, Number]
"""Resource name -> quantity."""


def unix_time(text: str | None) -> float | None:
    """Unix seconds of an RFC 3339 time; None when absent or unreadable."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()


class _Raw(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """Base of all: camel-case JSON names; gc=False, since such trees cannot hold a cycle."""


class RawOwner(_Raw, frozen=True):
    """One of `metadata.ownerReferences`; controller: the one that manages the object."""

    kind: str = ""
    name: str = ""
    uid: str = ""
    api_version: str = ""
    controller: bool | None = None


class RawMeta(_Raw, frozen=True):
    """`metadata` of any object. Times are RFC 3339 texts."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    owner_references: tuple[RawOwner, ...] | None = None


class RawResources(_Raw, frozen=True):
    """`resources` of a container or (from Kubernetes 1.32) of a whole pod."""

    requests: Amounts | None = None
    limits: Amounts | None = None


class RawContainer(_Raw, frozen=True):
    """A container; restart_policy `Always` on an init container makes it a sidecar."""

    resources: RawResources | None = None
    restart_policy: str | None = None


class RawGate(_Raw, frozen=True):
    """One of `spec.schedulingGates`."""

    name: str = ""


class RawSchedulingGroup(_Raw, frozen=True):
    """`spec.schedulingGroup` (Kubernetes >= 1.36): the built-in PodGroup of the pod."""

    pod_group_name: str | None = None


class RawToleration(_Raw, frozen=True):
    """One of `spec.tolerations` of a pod."""

    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class RawRequirement(_Raw, frozen=True):
    """One of `matchExpressions` or `matchFields`."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None


class RawTerm(_Raw, frozen=True):
    """One of `nodeSelectorTerms`."""

    match_expressions: tuple[RawRequirement, ...] | None = None
    match_fields: tuple[RawRequirement, ...] | None = None


class RawNodeSelector(_Raw, frozen=True):
    """A node selector; one of its terms has to hold."""

    node_selector_terms: tuple[RawTerm, ...] | None = None


class RawNodeAffinity(_Raw, frozen=True):
    """`nodeAffinity` of a pod: what it requires."""

    required_during_scheduling_ignored_during_execution: RawNodeSelector | None = None


class RawAffinity(_Raw, frozen=True):
    """`spec.affinity` of a pod."""

    node_affinity: RawNodeAffinity | None = None


class RawPodSpec(_Raw, frozen=True):
    """`spec` of a pod."""

    containers: tuple[RawContainer, ...] | None = None
    init_containers: tuple[RawContainer, ...] | None = None
    overhead: Amounts | None = None
    resources: RawResources | None = None
    node_name: str | None = None
    service_account_name: str | None = None
    scheduler_name: str | None = None
    priority: int | None = None
    scheduling_gates: tuple[RawGate, ...] | None = None
    node_selector: Mapping[str, str] | None = None
    scheduling_group: RawSchedulingGroup | None = None
    tolerations: tuple[RawToleration, ...] | None = None
    affinity: RawAffinity | None = None
    active_deadline_seconds: int | None = None
    termination_grace_period_seconds: int | None = None


class RawCondition(_Raw, frozen=True):
    """A condition of a pod or node."""

    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class RawPodStatus(_Raw, frozen=True):
    """`status` of a pod."""

    phase: str | None = None
    conditions: tuple[RawCondition, ...] | None = None
    nominated_node_name: str | None = None


class RawPod(_Raw, frozen=True):
    """A pod."""

    metadata: RawMeta = RawMeta()
    spec: RawPodSpec = RawPodSpec()
    status: RawPodStatus = RawPodStatus()


class RawTaint(_Raw, frozen=True):
    """One of `spec.taints` of a node."""

    key: str = ""
    value: str | None = None
    effect: str | None = None


class RawNodeSpec(_Raw, frozen=True):
    """`spec` of a node."""

    unschedulable: bool | None = None
    taints: tuple[RawTaint, ...] | None = None


class RawNodeInfo(_Raw, frozen=True, rename={"boot_id": "bootID"}):
    """`status.nodeInfo` of a node. boot_id: another one after each boot."""

    boot_id: str = ""


class RawNodeStatus(_Raw, frozen=True):
    """`status` of a node."""

    allocatable: Amounts | None = None
    conditions: tuple[RawCondition, ...] | None = None
    node_info: RawNodeInfo | None = None


class RawNode(_Raw, frozen=True):
    """A node."""

    metadata: RawMeta = RawMeta()
    spec: RawNodeSpec = RawNodeSpec()
    status: RawNodeStatus = RawNodeStatus()
