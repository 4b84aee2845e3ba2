"""Which group a pod belongs to, by the conventions that people use: pure look-ups, no object reads.

In this order: our own annotations, `spec.schedulingGroup` (Kubernetes >= 1.36), the coscheduling
PodGroup label (scheduler-plugins, and the older one that names the size itself), LeaderWorkerSet,
JobSet, Kubeflow training (v1 operators, MPI), and a Job whose pods say a group size. A group is
known by its kind, namespace, name *and* the UID of what made it, where a pod tells one: a second
group of the same name is another group.

The size comes from our `group-size` annotation, from the convention's own label, or from the object
that made the pods (`SizeFrom`), never from counting the pods that have come so far.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from slurmbridge.pool import keys
from slurmbridge.pool.raw import RawOwner, RawPod, unix_time

MAX_SIZE: Final = 10_000

OWN: Final = "own"
"""Kind of a group that is named by our annotation."""

POD_GROUP_VERSIONS: Final = ("v1beta1", "v1alpha2")
"""Of the built-in PodGroup: Kubernetes 1.37, and 1.36."""
POD_GROUP: Final = "scheduling.x-k8s.io/pod-group"
POD_GROUP_OLD: Final = "pod-group.scheduling.sigs.k8s.io/name"
POD_GROUP_OLD_SIZE: Final = "pod-group.scheduling.sigs.k8s.io/min-available"
LWS_NAME: Final = "leaderworkerset.sigs.k8s.io/name"
LWS_GROUP: Final = "leaderworkerset.sigs.k8s.io/group-index"
LWS_GROUP_KEY: Final = "leaderworkerset.sigs.k8s.io/group-key"
LWS_WORKER: Final = "leaderworkerset.sigs.k8s.io/worker-index"
LWS_SIZE: Final = "leaderworkerset.sigs.k8s.io/size"
JOBSET_NAME: Final = "jobset.sigs.k8s.io/jobset-name"
JOBSET_UID: Final = "jobset.sigs.k8s.io/jobset-uid"
JOBSET_ATTEMPT: Final = "jobset.sigs.k8s.io/restart-attempt"
JOBSET_PART: Final = "jobset.sigs.k8s.io/replicatedjob-name"
JOBSET_GLOBAL: Final = "jobset.sigs.k8s.io/job-global-index"
KUBEFLOW_NAME: Final = "training.kubeflow.org/job-name"
KUBEFLOW_TYPE: Final = "training.kubeflow.org/replica-type"
KUBEFLOW_ROLE: Final = "training.kubeflow.org/job-role"
KUBEFLOW_INDEX: Final = "training.kubeflow.org/replica-index"
COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"

_FIRST_ROLES: Final = ("launcher", "master", "chief", "ps")


class SizeFrom(msgspec.Struct, frozen=True):
    """The object that tells a group's size: API paths below the server's root, of one object.

    Of versions that follow each other, the newest first; a server has one of them.
    part: of a JobSet, the replicated Job that is a group of its own; "": all of it is one.
    """

    paths: tuple[str, ...]
    part: str = ""


class GroupObject(msgspec.Struct, frozen=True):
    """What the object of a group tells. size: members that start together, all of them counted.

    made: Unix seconds of its creation; a pod that was bound before is of an earlier group.
    in_order: a JobSet that makes one replicated Job only after another has started or ended: its
    pods never wait all at once, and each replicated Job is a group.
    """

    size: int
    made: float | None = None
    in_order: bool = False


class Group(msgspec.Struct, frozen=True):
    """A pod's membership.

    kind: the convention (`own`, `schedulinggroup`, `podgroup`, `lws`, `jobset`, `kubeflow`, `job`).
    name: the group's name. owner: UID (and attempt) of what made it, "" when nobody says.
    size: members that start together; None: `size_from` tells. rank: order of the member within
    the group, compared as a tuple; members without a number come by name.
    fault: what of it cannot be read.
    """

    kind: str
    namespace: str
    name: str
    owner: str = ""
    size: int | None = None
    size_from: SizeFrom | None = None
    rank: tuple[int, ...] = ()
    fault: str = ""

    @property
    def key(self) -> str:
        """What two members of one group have in common, and of two groups never."""
        return f"{self.kind}/{self.namespace}/{self.name}/{self.owner}"


def group_of(raw: RawPod) -> Group | None:
    """The group of a pod, None for a single pod."""
    meta = raw.metadata
    labels, notes = meta.labels or {}, meta.annotations or {}
    owner = next((o for o in meta.owner_references or () if o.controller), None)
    found = _named(raw, labels, notes, owner)
    if found is None:
        return None
    fault = ""
    if keys.GROUP_SIZE in notes:
        size = _number(notes[keys.GROUP_SIZE])
        if size is None or not 1 <= size <= MAX_SIZE:
            fault = f"annotation {keys.GROUP_SIZE} must be a number from 1 to {MAX_SIZE}"
        found = msgspec.structs.replace(found, size=size, size_from=None)
    if keys.RANK in notes:
        rank = _number(notes[keys.RANK])
        if rank is None:
            fault = fault or f"annotation {keys.RANK} must be a number"
        else:
            found = msgspec.structs.replace(found, rank=(rank,))
    if found.size is None and found.size_from is None and not fault:
        fault = f"the size of the group is not known: annotation {keys.GROUP_SIZE} is missing"
    return msgspec.structs.replace(found, fault=fault)


def _named(
    raw: RawPod, labels: Mapping[str, str], notes: Mapping[str, str], owner: RawOwner | None
) -> Group | None:
    """By the first convention that the pod follows."""
    namespace = raw.metadata.namespace
    index = _number(labels.get(COMPLETION_INDEX) or notes.get(COMPLETION_INDEX, ""))
    rank = () if index is None else (index,)
    by = "" if owner is None else owner.uid
    if name := notes.get(keys.GROUP, ""):
        return Group(OWN, namespace, name, by, None, _of_job(namespace, owner), rank)
    group = raw.spec.scheduling_group
    if group is not None and group.pod_group_name:
        name = group.pod_group_name
        paths = tuple(
            f"apis/scheduling.k8s.io/{version}/namespaces/{namespace}/podgroups/{name}"
            for version in POD_GROUP_VERSIONS
        )
        return Group("schedulinggroup", namespace, name, "", None, SizeFrom(paths), rank)
    if name := labels.get(POD_GROUP, ""):
        path = f"apis/scheduling.x-k8s.io/v1alpha1/namespaces/{namespace}/podgroups/{name}"
        return Group("podgroup", namespace, name, "", None, SizeFrom((path,)), rank)
    if name := labels.get(POD_GROUP_OLD, ""):
        size = _number(labels.get(POD_GROUP_OLD_SIZE, ""))
        return Group("podgroup", namespace, name, "", size, rank=rank)
    if name := labels.get(LWS_NAME, ""):
        which = labels.get(LWS_GROUP, "0")
        worker = _number(labels.get(LWS_WORKER, ""))
        size = _number(notes.get(LWS_SIZE, ""))
        unit = labels.get(LWS_GROUP_KEY, "")
        worker_rank = () if worker is None else (worker,)
        return Group("lws", namespace, f"{name}-{which}", unit, size, rank=worker_rank)
    if name := labels.get(JOBSET_NAME, ""):
        made = f"{labels.get(JOBSET_UID, '')}.{labels.get(JOBSET_ATTEMPT, '0')}"
        job = _number(labels.get(JOBSET_GLOBAL, "")) or 0
        path = f"apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets/{name}"
        part = labels.get(JOBSET_PART, "") if keys.PART in notes else ""
        which = f"{name}/{part}" if part else name
        return Group("jobset", namespace, which, made, None, SizeFrom((path,), part), (job, *rank))
    if name := labels.get(KUBEFLOW_NAME, ""):
        role = (labels.get(KUBEFLOW_TYPE) or labels.get(KUBEFLOW_ROLE, "")).lower()
        if role == "launcher" and owner is not None and owner.kind == "Job":
            # Of an MPIJob v2: made when the workers are ready, where its user asks for that.
            return None
        number = _number(labels.get(KUBEFLOW_INDEX, "")) or 0
        order = (0 if role in _FIRST_ROLES else 1, number)
        return Group("kubeflow", namespace, name, by, None, _of_owner(namespace, owner), order)
    if owner is not None and owner.kind == "Job" and keys.GROUP_SIZE in notes:
        return Group("job", namespace, owner.name, by, rank=rank)
    return None


def read_group(path: str, value: Any, part: str = "") -> GroupObject | None:
    """What an object tells of its group; None: no size. path, part: as in its `SizeFrom`.

    PodGroup: `spec.minMember`, or `spec.schedulingPolicy.gang.minCount` of the built-in one.
    JobSet: the pods of all its Jobs, or of one replicated Job. Kubeflow: all replicas; of an MPIJob
    v2 its workers. Job: as many as run at a time.
    """
    spec = value.get("spec") if isinstance(value, dict) else None
    if not isinstance(spec, dict):
        return None
    try:
        size = _size(path, spec, part)
        made = unix_time(value.get("metadata", {}).get("creationTimestamp"))
    except (TypeError, AttributeError, ValueError, LookupError):
        return None
    if size is None or not 1 <= size <= MAX_SIZE:
        return None
    return GroupObject(size, made, path.startswith("apis/jobset.x-k8s.io/") and _in_order(spec))


def _in_order(spec: dict[str, Any]) -> bool:
    """Whether a JobSet makes its Jobs one after the other (`startupPolicy`, `dependsOn`)."""
    policy = spec.get("startupPolicy")
    order = policy.get("startupPolicyOrder") if isinstance(policy, dict) else None
    return order == "InOrder" or any(job.get("dependsOn") for job in spec["replicatedJobs"])


def _size(path: str, spec: dict[str, Any], part: str) -> int | None:
    if path.startswith("apis/scheduling.x-k8s.io/"):
        return int(spec.get("minMember", 0))
    if path.startswith("apis/scheduling.k8s.io/"):
        return int(spec.get("schedulingPolicy", {}).get("gang", {}).get("minCount", 0))
    if path.startswith("apis/jobset.x-k8s.io/"):
        jobs = [j for j in spec["replicatedJobs"] if not part or j["name"] == part]
        return sum(int(j.get("replicas", 1)) * _pods_of_job(j["template"]["spec"]) for j in jobs)
    if path.startswith("apis/batch/"):
        return _pods_of_job(spec)
    for name, replicas in spec.items():
        if name.endswith("ReplicaSpecs"):
            roles = {"Worker"} if "/v2beta1/" in path else replicas.keys()
            return sum(int(replicas[role].get("replicas", 1)) for role in roles)
    return None


def _pods_of_job(spec: dict[str, Any]) -> int:
    """How many pods of a Job run at a time; fewer completions than that end it sooner."""
    parallelism = int(spec.get("parallelism", 1))
    completions = spec.get("completions")
    return parallelism if completions is None else min(parallelism, int(completions))


_KUBEFLOW: Final = {
    "PyTorchJob": "pytorchjobs",
    "TFJob": "tfjobs",
    "MPIJob": "mpijobs",
    "XGBoostJob": "xgboostjobs",
    "PaddleJob": "paddlejobs",
    "JAXJob": "jaxjobs",
}


_OBJECT_RE: Final = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", re.ASCII)
_VERSION_RE: Final = re.compile(r"kubeflow\.org/v[0-9a-z]{1,16}", re.ASCII)


def _of_owner(namespace: str, owner: RawOwner | None) -> SizeFrom | None:
    if owner is None or owner.kind not in _KUBEFLOW:
        return None
    if not _OBJECT_RE.fullmatch(owner.name) or not _VERSION_RE.fullmatch(owner.api_version):
        return None  # whoever makes a pod writes its owner references, and this becomes a path
    path = f"apis/{owner.api_version}/namespaces/{namespace}/{_KUBEFLOW[owner.kind]}/{owner.name}"
    return SizeFrom((path,))


def _of_job(namespace: str, owner: RawOwner | None) -> SizeFrom | None:
    if owner is None or (owner.kind, owner.api_version) != ("Job", "batch/v1"):
        return None
    if not _OBJECT_RE.fullmatch(owner.name):
        return None
    return SizeFrom((f"apis/batch/v1/namespaces/{namespace}/jobs/{owner.name}",))


def _number(text: str) -> int | None:
    """A non-negative number, None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
