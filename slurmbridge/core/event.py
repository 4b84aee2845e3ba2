"""What can happen to the bridge. Each event is a fact with the time at which it was known."""

from __future__ import annotations

import msgspec

from slurmbridge.pool.claim import Claim
from slurmbridge.pool.group import GroupObject
from slurmbridge.pool.noderecord import NodeReport
from slurmbridge.pool.record import KubeNode, PodRecord, SlurmJob, SlurmSnapshot
from slurmbridge.topology.generation import Sources
from slurmbridge.topology.graph import Topology


class Event(msgspec.Struct, frozen=True):
    """Root of all events."""


class Polled(Event, frozen=True):
    """slurmctld was read as a whole."""

    snapshot: SlurmSnapshot
    interval_s: float = 1.0


class PollFailed(Event, frozen=True):
    """slurmctld could not be read; nothing is known to have changed."""

    text: str


class PodsListed(Event, frozen=True):
    """All pods, from a list call: what is not in it is gone."""

    pods: tuple[PodRecord, ...]


class PodChanged(Event, frozen=True):
    """A pod was added or changed."""

    pod: PodRecord


class PodGone(Event, frozen=True):
    """A pod object was deleted; `pod` is its last state."""

    pod: PodRecord


class NodesListed(Event, frozen=True):
    """All Kubernetes nodes, from a list call."""

    nodes: tuple[KubeNode, ...]


class NodeChanged(Event, frozen=True):
    """A node was added or changed."""

    node: KubeNode


class NodeGone(Event, frozen=True):
    """A node object was deleted."""

    node: KubeNode


class AgentReported(Event, frozen=True):
    """A node's agent has told its whole state.

    node: Kubernetes node name. run, sequence: which report of which run of the agent. age_s: of its
    look at the node, at least. after: `State.moment` before that look began, 0: not known.
    """

    node: str
    run: str
    sequence: int
    age_s: float
    after: int
    report: NodeReport


class AgentLost(Event, frozen=True):
    """The stream of a node's agent has ended."""

    node: str


class ClaimAsked(Event, frozen=True):
    """An extender asks for a claim: it is about to bind the pod. op: whom to answer."""

    op: int
    uid: str
    namespace: str
    name: str
    kube_node: str
    cause: str = ""


class UnboundReleased(Event, frozen=True):
    """An extender could not post the Binding and will not try again with this claim."""

    uid: str
    job_id: int


class PodLooked(Event, frozen=True):
    """A targeted GET was answered: the pod with this UID as it is, or None: there is none."""

    uid: str
    pod: PodRecord | None


class Allocated(Event, frozen=True):
    """Slurm granted a claim and we have read it back."""

    uid: str
    claim: Claim


class AllocateRefused(Event, frozen=True):
    """Slurm said no: nothing is held."""

    uid: str
    reason: str
    text: str


class AllocateUnknown(Event, frozen=True):
    """Asked, but no clear answer: a claim may exist. job_id 0: not known either."""

    uid: str
    job_id: int
    text: str


class Queued(Event, frozen=True):
    """A placeholder batch job for the pod stands in Slurm's queue."""

    uid: str
    job_id: int


class GroupQueued(Event, frozen=True):
    """A placeholder for a gang stands in Slurm's queue. uid: of the gang's claim."""

    uid: str
    job_id: int


class GroupAllocated(Event, frozen=True):
    """Slurm granted a gang's claim and we have read it back. uid: of the claim."""

    uid: str
    job: SlurmJob


class GroupRefused(Event, frozen=True):
    """Slurm does not take a gang's placeholder, or has no room for its claim: nothing is held."""

    uid: str
    reason: str
    text: str


class JobLooked(Event, frozen=True):
    """A targeted read of a job was answered; None: Slurm has no such job."""

    uid: str
    job_id: int
    job: SlurmJob | None


class Covered(Event, frozen=True):
    """A pod without a claim has one again."""

    uid: str
    claim: Claim


class CoverRefused(Event, frozen=True):
    """A pod without a claim could not be given one: someone else has its GPUs."""

    uid: str
    reason: str
    text: str


class Ended(Event, frozen=True):
    """A claim was ended, or was found not to exist any more."""

    uid: str
    job_id: int


class Extended(Event, frozen=True):
    """A claim has a new time limit."""

    uid: str
    job_id: int
    ends: float


class Lifted(Event, frozen=True):
    """A pod's gate is off, and its node is nominated (or the pod is gone)."""

    uid: str


class GroupLooked(Event, frozen=True):
    """The object of a group was read; None: it is not there, or tells no size.

    asked: `LookGroup.asked`; None: not known.
    """

    key: str
    found: GroupObject | None
    asked: float | None = None


class TopologyRead(Event, frozen=True):
    """What `scontrol show topology` prints; "" where Slurm has none.

    file: path and text of the site's own topology file, None: there is none.
    """

    text: str
    file: tuple[str, str] | None = None


class TopologyBuilt(Event, frozen=True):
    """The generation that was made of these sources."""

    sources: Sources
    topology: Topology


class Evicted(Event, frozen=True):
    """The API server has taken a pod's eviction (its grace period runs)."""

    uid: str


class ActionFailed(Event, frozen=True):
    """An action got no clear answer; the machine will try again by itself.

    what: name of the action (`End`, `Extend`, `LookJob`, `LookPod`, `Evict`, `Cover`, `Lift`,
    `QueueGroup`, `AllocateGroup`).
    """

    what: str
    uid: str
    job_id: int
    text: str


class BreakerAnswered(Event, frozen=True):
    """A person has looked at the losses: `confirm` them (evict), or not (claims again)."""

    confirm: bool


class Ticked(Event, frozen=True):
    """Time has passed."""
