"""What the core wants done. Carried out by `slurmbridge.app`; answers come back as events."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from slurmbridge.pool.claim import ClaimId, ClaimRequest, GroupRequest
from slurmbridge.topology.generation import Sources


class Action(msgspec.Struct, frozen=True):
    """Root of all actions. cause: id that follows one pod through the logs."""


class Allocate(Action, frozen=True):
    """Make an immediate claim -> Allocated, AllocateRefused, AllocateUnknown."""

    uid: str
    request: ClaimRequest
    cause: str = ""


class Queue(Action, frozen=True):
    """Put a placeholder into Slurm's queue (sites with defer) -> Queued or the answers above."""

    uid: str
    request: ClaimRequest
    cause: str = ""


class AllocateGroup(Action, frozen=True):
    """Make one immediate claim for a whole gang -> GroupAllocated, GroupRefused."""

    uid: str
    request: GroupRequest
    cause: str = ""


class QueueGroup(Action, frozen=True):
    """Put a placeholder for a whole gang into Slurm's queue -> GroupQueued, GroupRefused."""

    uid: str
    request: GroupRequest
    cause: str = ""


class Cover(Action, frozen=True):
    """Claim for a pod that is running without one -> Covered, CoverRefused.

    indices: exactly these GPUs; None: any.
    """

    uid: str
    request: ClaimRequest
    indices: tuple[int, ...] | None
    cause: str = ""


class LookJob(Action, frozen=True):
    """Second, targeted look at a claim -> JobLooked."""

    uid: str
    job_id: int


class LookPod(Action, frozen=True):
    """Second, targeted look at a pod -> PodLooked."""

    uid: str
    namespace: str
    name: str


class End(Action, frozen=True):
    """End a claim of ours -> Ended. why: for the log."""

    claim_id: ClaimId
    job_id: int
    why: str


class Extend(Action, frozen=True):
    """Let a claim end later -> Extended. ends: Unix seconds by slurmctld's clock."""

    claim_id: ClaimId
    job_id: int
    ends: float


class Lift(Action, frozen=True):
    """Nominate a node for a pod, then take its gate off and annotate it, in one write -> Lifted.

    gate "": it has none any more, it is only nominated and annotated. kube_node "": not nominated.
    """

    uid: str
    namespace: str
    name: str
    kube_node: str
    gate: str
    annotations: Mapping[str, str | None]
    cause: str = ""


class LookGroup(Action, frozen=True):
    """Read the object that tells a group's size -> GroupLooked.

    paths: of the API, without `/`; the first one that is there counts. part: see `SizeFrom`.
    asked: when, by the machine's clock; the answer says it again.
    """

    key: str
    paths: tuple[str, ...]
    part: str = ""
    asked: float = 0.0


class Evict(Action, frozen=True):
    """Evict a pod, with its own grace -> Evicted."""

    uid: str
    namespace: str
    name: str
    grace_s: int
    why: str


class Reply(Action, frozen=True):
    """Answer a ClaimAsked. reason "": granted. unavailable: try again, nothing was decided."""

    op: int
    job_id: int = 0
    gpus: str = ""
    reason: str = ""
    text: str = ""
    unavailable: bool = False


class Tell(Action, frozen=True):
    """A Kubernetes Event on a pod (namespace given) or on a node (namespace empty)."""

    namespace: str
    name: str
    uid: str
    reason: str
    message: str
    warning: bool = False


class BuildTopology(Action, frozen=True):
    """Build the next generation of the topology, beside the events -> TopologyBuilt."""

    sources: Sources


class LogTopology(Action, frozen=True):
    """Write down what the pool's topology is now: its levels, closest first, and what is wrong."""

    levels: tuple[str, ...]
    problems: tuple[str, ...]


class LogPlan(Action, frozen=True):
    """Write down where a gang was laid, and what room it was laid in.

    gang: its key. level, domain: of the whole; "" when its members came beside others, which stand
    on `beside`. seats: (pod, GPUs, Kubernetes node) by rank. room: (node, free GPUs) of all nodes
    that any of them might use then, in the order of the view.
    """

    gang: str
    level: str
    domain: str
    seats: tuple[tuple[str, int, str], ...]
    room: tuple[tuple[str, int], ...]
    beside: tuple[str, ...] = ()


class LogGang(Action, frozen=True):
    """Write down in which claims, and where, members of a gang are let go.

    gang: its key. level, domain: the lowest that holds all members that have a place; "" where none
    does, or that is not known yet. seats: (pod, Kubernetes node, job) of those that are let go now.
    """

    gang: str
    level: str
    domain: str
    seats: tuple[tuple[str, str, int], ...]


class AnnotatePod(Action, frozen=True):
    """Merge annotations into a pod (None removes)."""

    uid: str
    namespace: str
    name: str
    annotations: Mapping[str, str | None]


class AnnotateNode(Action, frozen=True):
    """Set the pool annotation of a node."""

    name: str
    value: str


class DrainNode(Action, frozen=True):
    """Drain a node in Slurm, unless someone else has; the next readings show it."""

    slurm_node: str
    reason: str


class ResumeNode(Action, frozen=True):
    """Take back a drain of ours, if it is still ours (`slurmbridge.pool.drain`)."""

    slurm_node: str
    cluster: str


class ShowNode(Action, frozen=True):
    """Set the condition `SlurmReady` of a node. since: Unix seconds of the change of status."""

    name: str
    status: str
    reason: str
    message: str
    since: float


class PollNow(Action, frozen=True):
    """Read slurmctld soon; the poller's budget still holds."""
