"""What Slurm and Kubernetes told us, as frozen typed records.

Slurm side: one record per node, job, reservation and partition, as read by `slurmbridge.slurm`.
Kubernetes side: the few fields of a pod or node that matter here, as read by `slurmbridge.kube`.

Times are Unix seconds (UTC), memory is MiB, CPUs are Slurm CPUs (hardware threads or cores, as the
site configured), None is "not known or not set"; unknown is never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from slurmbridge.pool.group import Group
from slurmbridge.pool.nodefit import ANYWHERE, NodeFit, Taint


class GpuCount(msgspec.Struct, frozen=True, gc=False):
    """So many GPUs of a type on a node. type is "" where Slurm does not type them."""

    type: str
    count: int


class GpuUse(msgspec.Struct, frozen=True):
    """GPUs in use on one node, by a job or by all.

    counts: by type; indices: node-wide GRES indices in ascending order, or None where Slurm
    does not number the GPUs (GRES without File=). len(indices) is the sum of counts when given.
    shared: indices in use through gres/shard or gres/mps (whole GPU charged).
    """

    counts: tuple[GpuCount, ...] = ()
    indices: tuple[int, ...] | None = None
    shared: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """All GPUs in use, over all types."""
        return sum(c.count for c in self.counts)


class NodeState(msgspec.Struct, frozen=True):
    """Base state and flags in upper case (`MIXED`, {`DRAIN`, `PLANNED`}), Slurm's long names."""

    base: str
    flags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """`MIXED+DRAIN+PLANNED`: base, then flags in alphabetical order."""
        return "+".join((self.base, *sorted(self.flags)))


class SlurmNode(msgspec.Struct, frozen=True):
    """One node of `scontrol show node -d`.

    gpus_used is None when Slurm did not say (no GresUsed): unknown, never free.
    fault: what of its GRES could not be read ("" when all could); its GPUs are unknown then.
    cpus_total leaves out specialised cores where Slurm reports CPUEfctv. features: the active ones.
    """

    name: str
    state: NodeState
    cpus_total: int
    cpus_used: int
    memory_mib: int
    memory_used_mib: int
    gpus: tuple[GpuCount, ...]
    gpus_used: GpuUse | None
    partitions: tuple[str, ...] = ()
    reason: str = ""
    address: str = ""
    hostname: str = ""
    boot_time: float | None = None
    fault: str = ""
    features: tuple[str, ...] = ()

    @property
    def gpu_total(self) -> int:
        """GPUs of all types that Slurm may give out."""
        return sum(g.count for g in self.gpus)


class JobState(msgspec.Struct, frozen=True):
    """Base state and flags of a job, upper case (`RUNNING`, {`COMPLETING`})."""

    base: str
    flags: frozenset[str] = frozenset()

    @property
    def holds_resources(self) -> bool:
        """Whether slurmctld still counts the job's GPUs as taken, or may: unknown counts."""
        if "COMPLETING" in self.flags or "STAGE_OUT" in self.flags:
            return True
        return self.base not in FINISHED_STATES and self.base != "PENDING"

    @property
    def is_finished(self) -> bool:
        """Whether the job is over and its GPUs are given back."""
        return self.base in FINISHED_STATES and not self.holds_resources


FINISHED_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


class SlurmJob(msgspec.Struct, frozen=True):
    """One job (of an array: one task; of a het job: one component).

    gpus: node name -> GPUs held there. None: the job holds nodes but Slurm has not told us how
    many GPUs (unknown: every GPU of its nodes that nobody else owns counts as held).
    planned_nodes and start: of a pending job, what backfill has promised.
    gpus_wanted: GPUs per the request of a pending job, over all nodes; None when not known.
    tasks: how many jobs the record stands for: 1, or the waiting tasks of an array that slurmctld
    keeps as one record (each of them wants gpus_wanted).
    """

    id: int
    name: str
    comment: str
    user_id: int
    account: str
    partition: str
    qos: str
    state: JobState
    nodes: tuple[str, ...] = ()
    gpus: Mapping[str, GpuUse] | None = None
    start: float | None = None
    end: float | None = None
    submitted: float | None = None
    restarts: int = 0
    planned_nodes: tuple[str, ...] = ()
    num_nodes: int = 0
    gpus_wanted: int | None = None
    reservation: str = ""
    reason: str = ""
    priority: int = 0
    preempted_at: float | None = None
    user: str = ""
    tasks: int = 1


class Reservation(msgspec.Struct, frozen=True):
    """One reservation. end None: no end. flags upper case as scontrol prints them.

    users, accounts, groups: who may use it; a name with "-" before it may not.
    """

    name: str
    start: float
    end: float | None
    nodes: tuple[str, ...]
    flags: frozenset[str] = frozenset()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    tres: str = ""
    partition: str = ""
    state: str = ""
    groups: tuple[str, ...] = ()


class Partition(msgspec.Struct, frozen=True):
    """One partition. max_time_min None: unlimited.

    preempt_mode: what may be done to its jobs when others preempt them (OFF: nothing).
    exclusive: whole nodes only (OverSubscribe=EXCLUSIVE).
    billing_weights: TRESBillingWeights as text, "" when Slurm has none, None when not known.
    """

    name: str
    state: str
    nodes: tuple[str, ...]
    max_time_min: int | None = None
    allow_accounts: tuple[str, ...] | None = None
    allow_qos: tuple[str, ...] | None = None
    priority_tier: int = 1
    preempt_mode: str = "OFF"
    exclusive: bool = False
    hidden: bool = False
    billing_weights: str | None = None


EXCLUDING: Final = ("22.05.", "24.11.")
"""Versions of Slurm on which it was tried that a claim outlives the removal of a node that it
excluded (tests/integration/slurm/test_claims_others.py)."""


class SlurmConfig(msgspec.Struct, frozen=True):
    """The part of slurmctld's configuration that decides how claims are made.

    boot_time: start of the running slurmctld: a change means that claims of the last seconds
    may be lost (shared facts: state is saved every few seconds). told_at: Unix seconds by
    slurmctld's clock when it said so; 0: not known. slurm_uid: of `slurm_user`. associations:
    whether accounts are those of Slurm's database, one below another.
    """

    cluster: str
    version: str
    boot_time: float
    scheduler_parameters: frozenset[str] = frozenset()
    preempt_type: str = "preempt/none"
    preempt_mode: str = "OFF"
    select_type: str = ""
    select_parameters: frozenset[str] = frozenset()
    priority_type: str = "priority/basic"
    min_job_age_s: int = 300
    slurm_user: str = ""
    told_at: float = 0.0
    slurm_uid: int | None = None
    associations: bool = False

    @property
    def may_exclude(self) -> bool:
        """Whether a job may name nodes that it excludes: a removed one might end it elsewhere."""
        return self.version.startswith(EXCLUDING)


class SlurmSnapshot(msgspec.Struct, frozen=True):
    """One whole reading of slurmctld: all of it, or it does not exist.

    began, ended: when the first question was asked and the last answer was in (Unix seconds,
    our clock). Facts older than `began` are in it; facts younger than `ended` are not; in
    between they may be.
    cost_s: seconds of slurmctld's time that the reading took, as measured from outside.
    """

    began: float
    ended: float
    config: SlurmConfig
    nodes: Mapping[str, SlurmNode]
    jobs: Mapping[int, SlurmJob]
    reservations: tuple[Reservation, ...] = ()
    partitions: Mapping[str, Partition] = {}
    cost_s: float = 0.0


class GpuRequest(msgspec.Struct, frozen=True):
    """GPUs asked by a pod: `type` is the Slurm GRES type, "" for any."""

    count: int
    type: str = ""


class PodRecord(msgspec.Struct, frozen=True):
    """What we need of a pod.

    phase: Pending, Running, Succeeded, Failed, Unknown. fault: why its GPU request cannot be
    read ("" when it can): such a pod gets a verdict, never a claim.
    gpu: None when it asks for no pool GPU. cpus is in whole Slurm CPUs rounded up.
    annotations: only keys of `slurmbridge.pool.keys`.
    waiting_on_us: kube-scheduler has said unschedulable;
    claim_unseen: since an extender did not know yet of a claim for the pod.
    deleting_since: when its deletion was asked for. nominated: status.nominatedNodeName.
    is_static: the API copy of a kubelet's static pod: it cannot be evicted.
    fit: what it says of nodes. group: which pods it starts together with. bound_at: when
    it was bound, by the API server's clock, in whole seconds.
    """

    uid: str
    namespace: str
    name: str
    phase: str
    node: str = ""
    gpu: GpuRequest | None = None
    cpus: int = 0
    memory_mib: int = 0
    fault: str = ""
    annotations: Mapping[str, str] = {}
    service_account: str = ""
    scheduler: str = "default-scheduler"
    priority: int = 0
    gates: tuple[str, ...] = ()
    active_deadline_s: int | None = None
    grace_s: int = 30
    created: float = 0.0
    deleting_since: float | None = None
    waiting_on_us: bool = False
    claim_unseen: bool = False
    resource_version: str = ""
    nominated: str = ""
    is_static: bool = False
    fit: NodeFit = ANYWHERE
    group: Group | None = None
    bound_at: float | None = None

    @property
    def ref(self) -> str:
        """`namespace/name`, for people."""
        return f"{self.namespace}/{self.name}"

    @property
    def is_over(self) -> bool:
        """Whether its containers have ended for good."""
        return self.phase in ("Succeeded", "Failed")


class KubeNode(msgspec.Struct, frozen=True):
    """What we need of a Kubernetes node. gpus: allocatable by extended resource name.

    ready_changed: when its condition Ready last changed, None where Kubernetes does not say.
    fenced: somebody has vouched that the machine is off (taint node.kubernetes.io/out-of-service).
    slurm_ready: status, reason and message of the condition that we write.
    boot_id: of the node's kernel, "" when not known. taints: but for that of a cordon.
    """

    name: str
    uid: str
    ready: bool
    unschedulable: bool
    gpus: Mapping[str, int]
    cpus: int = 0
    memory_mib: int = 0
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    resource_version: str = ""
    ready_changed: float | None = None
    fenced: bool = False
    slurm_ready: tuple[str, str, str] | None = None
    boot_id: str = ""
    taints: tuple[Taint, ...] = ()

    def takes(self, fit: NodeFit) -> bool:
        """Whether kube-scheduler may put a pod here, as far as is easily known."""
        if not self.ready or self.unschedulable:
            return False
        return fit.admits(self.name, self.labels, self.taints)
