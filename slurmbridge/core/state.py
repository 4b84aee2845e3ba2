"""The state of the bridge: what it has been told, and its book of claims.

Only functions of this package change it, and only while `Machine.handle` runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from slurmbridge.core.action import Action, Reply
from slurmbridge.core.agents import AgentSeen
from slurmbridge.core.aside import Asides
from slurmbridge.core.groupcount import GroupCounts
from slurmbridge.core.nodewatch import NodeWatch
from slurmbridge.core.settings import Settings
from slurmbridge.core.waiting import Waiting
from slurmbridge.pool.claim import Claim, ClaimId, ClaimRequest, claim_of
from slurmbridge.pool.index import ViewIndex
from slurmbridge.pool.ledger import Charge, NodeLedger
from slurmbridge.pool.record import (
    GpuCount,
    GpuUse,
    KubeNode,
    PodRecord,
    SlurmJob,
    SlurmSnapshot,
)
from slurmbridge.pool.view import HeldClaim, NodeView, Window
from slurmbridge.topology.index import TopologyIndex

NO_GPUS = GpuUse()
UNKNOWN_PROMISES = 2
"""Askers of another leader's days may still bind with an adopted claim; how many is not known."""


class Phase(StrEnum):
    """Where a pod's claim is in its life.

    asking -> held -> bound -> ending is the good way. queued: a placeholder waits in Slurm. doubt:
    asked, no clear answer. covering: the pod has no claim in Slurm, one is being made. lost: Slurm
    has ended the claim, the pod has to go. lingering: the pod is over or gone, its processes may
    not be. aside: a fault of ours came up with the pod (`core.aside`). ending: the pod needs it no
    more (`State.ending`; never the phase of an `Entry`).
    """

    ASKING = "asking"
    DOUBT = "doubt"
    QUEUED = "queued"
    HELD = "held"
    BOUND = "bound"
    COVERING = "covering"
    LOST = "lost"
    LINGERING = "lingering"
    ASIDE = "aside"
    ENDING = "ending"


@dataclass(slots=True)
class Entry:
    """What the book says of one pod.

    since: when the phase began. waiters: op ids that wait for an answer (phase asking).
    gpus: what is charged to the pod even when no Slurm job stands behind it. why: reason of the
    loss, for the user. stray: the pod was not bound through us.

    sure_at: when we last learnt that Slurm holds the claim. boot: start of the slurmctld that was
    asked for it, or was last seen to hold it. suspect: a reading that began later did not show it
    running (phase aside: the last reading). looking: a targeted look is under way since then.
    missing_at: when a targeted look last found no such job.
    promised: how many askers were told to bind and have not said that they could not.
    pod_looking: a look at the pod is under way since then. asked_at: a Cover is under way since
    then. cover_since: when the first of them was asked. cover_gpus_known: the GPUs to cover are
    those of a claim that we had, not only what the pod's annotations say. refused: why the last
    Cover was refused for good.
    confirmed: a person has said that this loss is real.
    planned: claimed before kube-scheduler has seen the pod. lift_at: its gate is being taken off
    since then.
    is_let_go: of a gang's member: its gate was taken off, or it was woken, for this claim.
    is_woken: the latter.
    is_wanted: somebody has asked to bind it, so that kube-scheduler can use the node. is_useless:
    kube-scheduler cannot.
    left_at: `State.moment` at which we learnt that the pod is over or gone. boot_id: of its node at
    that moment.
    group: UID of the gang's claim that the pod lives in, "" for a claim of its own. `gpus` is then
    the pod's share of it on its node. with_gang: UID of the member whose loss takes this pod along,
    though its own claim may be well.
    """

    uid: str
    ref: str
    kube_node: str
    slurm_node: str
    phase: Phase
    since: float
    request: ClaimRequest | None = None
    claim: Claim | None = None
    job_id: int = 0
    gpus: GpuUse = NO_GPUS
    waiters: list[int] = field(default_factory=list)
    promised: int = 0
    sure_at: float = 0.0
    boot: float = 0.0
    suspect: bool = False
    looking: float | None = None
    missing_at: float | None = None
    pod_looking: float | None = None
    asked_at: float | None = None
    cover_since: float = 0.0
    cover_gpus_known: bool = False
    refused: str = ""
    evicted_at: float | None = None
    linger_until: float = 0.0
    told_kept: bool = False
    why: str = ""
    stray: bool = False
    cause: str = ""
    planned: bool = False
    lift_at: float | None = None
    is_let_go: bool = False
    is_woken: bool = False
    is_wanted: bool = False
    is_useless: bool = False
    confirmed: bool = False
    left_at: int = 0
    boot_id: str = ""
    group: str = ""
    with_gang: str = ""

    @property
    def claim_uid(self) -> str:
        """Whose the claim is, by its identity in Slurm: the pod's, or its gang's."""
        return self.group or self.uid

    def move(self, phase: Phase, now: float) -> None:
        """Go to another phase."""
        self.phase, self.since, self.confirmed = phase, now, False
        self.suspect, self.looking, self.missing_at, self.asked_at = False, None, None, None

    @property
    def is_uncovered(self) -> bool:
        """Whether a pod (or what is left of it) uses GPUs that Slurm may give to others."""
        if self.phase is Phase.LINGERING:
            return not self.job_id
        if self.phase is Phase.ASIDE:
            return self.suspect
        return self.phase in (Phase.COVERING, Phase.LOST)


@dataclass(slots=True)
class Ending:
    """A claim that is to end: asked again until a reading no longer shows it.

    gpus: charged until then. asked: when its end was last asked for.
    """

    claim_id: ClaimId
    job_id: int
    slurm_node: str
    gpus: GpuUse
    since: float
    asked: float
    why: str


@dataclass(slots=True)
class Found:
    """A pod's claim that the first reading showed: of an earlier leader, or older than what we see.

    at: when. moment: `State.moment` then. let_go: why the pod is to have it no more; "" as yet.
    """

    at: float
    moment: int
    let_go: str = ""


@dataclass(slots=True)
class Orphan:
    """A claim in Slurm whose pod we do not know.

    looked: when the API server was last asked, at first when the claim was first seen. gone_at:
    since when it is known that there is no pod. left_at: `State.moment` at which that was learnt.
    seen_at: when a reading was last found to show it.
    """

    looked: float
    seen_at: float = 0.0
    gone_at: float | None = None
    left_at: int = 0
    told_kept: bool = False


class Gone(NamedTuple):
    """A deleted pod. may_run: it still counted as running on a node when it vanished."""

    at: float
    may_run: bool


@dataclass(slots=True)
class Missed:
    """A pod that a list did not show. looked: when the API server was last asked for it.

    listed: when the last such list came in. confirmed: a person has said that such pods are really
    gone.
    """

    looked: float = float("-inf")
    listed: float = 0.0
    confirmed: bool = False


class Eviction(NamedTuple):
    """One that was asked for. loss: UID of the claim that was lost. confirmed: by a person."""

    at: float
    loss: str
    confirmed: bool


class Woken(NamedTuple):
    """When a refused pod was woken, and for how long it is not woken again."""

    at: float
    pause: float


@dataclass(slots=True)
class State:
    """Everything that the core knows.

    book: by pod UID; by_node: the same entries by Slurm node; by_job: job id -> UID of the claim (a
    pod's, or a gang's); sharing: UID of a gang's claim -> UIDs of the pods in the book that live in
    it. ending: claims that are to end, by job id. orphans: by job id and UID; found: too. live:
    claims of pods in the last reading that hold or wait for something and are not completing, by
    pod UID; live_groups: those of gangs, by their UIDs. ours: all of them, by job id. slurm_of,
    kube_of: nodes of the pool by their names on the other side; several: Kubernetes nodes that are
    several Slurm nodes. may_be: the Slurm names that each Kubernetes node may have, in the pool or
    not; hosts: the Kubernetes nodes that each Slurm node may be, none where they are deleted.
    held_back: nodes out of use until their pods have gone. nodes_since: when nodes were listed
    first; deleted: when Node objects were missed since. missed: pods that a list did not show, by
    UID: there until a look has told. in_use: moment, and the nodes that had pods then (`has_pods`).
    by_group: moment, and the pods of each group then (`pods_of_group`).
    loose: pods that may have to be in the book and are not. robbed: UIDs of claims whose job id
    turned out to be a younger claim's. evictions: of the last minute. moment: number of the event
    that is being handled, > 0. agents: by Kubernetes node name.
    domains: where each node stands, by Kubernetes name, closest first, as `placed_by` has it.
    partitions_on: those that each Slurm node is in, sorted.
    """

    settings: Settings
    term: str
    now: float = 0.0
    ahead_s: float = 0.0
    moment: int = 0
    agents: dict[str, AgentSeen] = field(default_factory=dict)
    snapshot: SlurmSnapshot | None = None
    poll_failed: str = ""
    interval_s: float = 1.0
    pods: dict[str, PodRecord] = field(default_factory=dict)
    gone: dict[str, Gone] = field(default_factory=dict)
    missed: dict[str, Missed] = field(default_factory=dict)
    kube_nodes: dict[str, KubeNode] = field(default_factory=dict)
    in_use: tuple[int, frozenset[str]] = (0, frozenset())
    by_group: tuple[int, dict[str, list[PodRecord]]] = (0, {})
    domains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    placed_by: TopologyIndex | None = None
    pods_listed: bool = False
    nodes_listed: bool = False
    nodes_since: float = float("inf")
    deleted: dict[str, float] = field(default_factory=dict)
    audited: bool = False
    book: dict[str, Entry] = field(default_factory=dict)
    by_node: dict[str, dict[str, Entry]] = field(default_factory=dict)
    by_job: dict[int, str] = field(default_factory=dict)
    sharing: dict[str, set[str]] = field(default_factory=dict)
    ending: dict[int, Ending] = field(default_factory=dict)
    orphans: dict[tuple[int, str], Orphan] = field(default_factory=dict)
    found: dict[tuple[int, str], Found] = field(default_factory=dict)
    jobs_on: dict[str, list[SlurmJob]] = field(default_factory=dict)
    ours: dict[int, ClaimId] = field(default_factory=dict)
    live: dict[str, list[SlurmJob]] = field(default_factory=dict)
    live_groups: dict[str, list[SlurmJob]] = field(default_factory=dict)
    kube_of: dict[str, str] = field(default_factory=dict)
    slurm_of: dict[str, str] = field(default_factory=dict)
    several: dict[str, tuple[str, ...]] = field(default_factory=dict)
    may_be: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hosts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    held_back: frozenset[str] = frozenset()
    starts: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    windows: dict[str, tuple[Window, ...]] = field(default_factory=dict)
    partitions_on: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ledgers: dict[str, NodeLedger] = field(default_factory=dict)
    views: dict[str, NodeView] = field(default_factory=dict)
    held: dict[str, HeldClaim] = field(default_factory=dict)
    loose: set[str] = field(default_factory=set)
    robbed: set[str] = field(default_factory=set)
    dirty: set[str] = field(default_factory=set)
    view_changed: bool = True
    index: ViewIndex | None = None
    generation: int = 0
    evictions: list[Eviction] = field(default_factory=list)
    breaker_since: float | None = None
    woken: dict[str, Woken] = field(default_factory=dict)
    annotated: dict[str, str] = field(default_factory=dict)
    annotated_at: float = 0.0
    told: dict[tuple[str, str], float] = field(default_factory=dict)
    waiting: Waiting = field(default_factory=Waiting)
    nodes: NodeWatch = field(default_factory=NodeWatch)
    shares: GroupCounts = field(default_factory=GroupCounts)
    aside: Asides = field(default_factory=Asides)
    pruned_at: float = 0.0
    out: list[Action] = field(default_factory=list)

    @property
    def is_synced(self) -> bool:
        """Whether both sides have been read once and compared: before that nothing is decided."""
        return self.audited

    @property
    def wall(self) -> float:
        """The host's clock: only to compare with times that Slurm tells (ends, plans, windows)."""
        return self.now + self.ahead_s

    @property
    def slurm_wall(self) -> float:
        """The clock of slurmctld, as far as known: what it ends at a time ends by that."""
        if self.snapshot is None or not self.snapshot.config.told_at:
            return self.wall
        return self.snapshot.config.told_at + self.now - self.snapshot.ended

    @property
    def defers(self) -> bool:
        """Whether Slurm grants nothing at once (`SchedulerParameters=defer`)."""
        return self.snapshot is not None and "defer" in self.snapshot.config.scheduler_parameters

    @property
    def age_s(self) -> float:
        """Age of the last reading of slurmctld."""
        return float("inf") if self.snapshot is None else self.now - self.snapshot.began

    @property
    def is_stale(self) -> bool:
        """Whether the reading is too old to make new claims on."""
        return self.age_s > max(self.settings.freshness.stale, 2 * self.interval_s)

    @property
    def boot(self) -> float:
        """Start of the slurmctld that was last read."""
        return 0.0 if self.snapshot is None else self.snapshot.config.boot_time

    def claim_id(self, uid: str) -> ClaimId:
        """The identity of a pod's claim."""
        return ClaimId(self.settings.policy.cluster, uid)

    def claim_id_of(self, entry: Entry) -> ClaimId:
        """The identity of the claim that a pod lives in."""
        kind = "group" if entry.group else "pod"
        return ClaimId(self.settings.policy.cluster, entry.claim_uid, kind)

    def entries_of(self, claim_uid: str) -> list[Entry]:
        """Who lives in a claim: the pod that it was made for, or the members of the gang."""
        entry = self.book.get(claim_uid)
        if entry is not None and not entry.group:
            return [entry]
        return [self.book[uid] for uid in sorted(self.sharing.get(claim_uid, ()))]

    def lives_in(self, claim_uid: str, job_id: int, but: Entry | None = None) -> bool:
        """Whether a pod of the book (another than `but`) lives in this job of a claim."""
        entry = self.book.get(claim_uid)
        if entry is not None and not entry.group:
            return entry is not but and entry.job_id == job_id
        members = self.sharing.get(claim_uid, ())
        return any(e is not but and e.job_id == job_id for e in map(self.book.get, members) if e)

    def deleted_since(self, kube_node: str) -> float | None:
        """Since when a node is known to have no object; None: it has one, or nobody has looked."""
        if not self.nodes_listed or kube_node in self.kube_nodes:
            return None
        return self.deleted.get(kube_node, self.nodes_since)

    def pods_of_group(self, key: str) -> list[PodRecord]:
        """Pods that say that they are of a group: one pass over all pods for an event."""
        if self.by_group[0] != self.moment:
            found: dict[str, list[PodRecord]] = {}
            for pod in self.pods.values():
                if pod.group is not None:
                    found.setdefault(pod.group.key, []).append(pod)
            self.by_group = (self.moment, found)
        return self.by_group[1].get(key, [])

    def has_pods(self, kube_node: str) -> bool:
        """Whether pods are known on a node that are to stay."""
        if self.in_use[0] != self.moment:
            pods = self.pods.values()
            there = {p.node for p in pods if not p.is_over and p.deleting_since is None}
            self.in_use = (self.moment, frozenset(there))
        return kube_node in self.in_use[1]

    def lived(self) -> dict[str, set[str]]:
        """By Kubernetes node: the Slurm nodes on which its pods have claims."""
        found: dict[str, set[str]] = {}
        for entry in self.book.values():
            if entry.kube_node and entry.slurm_node:
                found.setdefault(entry.kube_node, set()).add(entry.slurm_node)
        return found

    def touch(self, slurm_node: str) -> None:
        """Mark a node for a new ledger and view."""
        if slurm_node:
            self.dirty.add(slurm_node)

    def user_of(self, slurm_node: str, claim_uid: str, index: int) -> str:
        """UID of the pod that has a GPU of a claim; "" for a share of a gang's that none has."""
        if claim_uid not in self.sharing:
            return claim_uid if claim_uid not in self.live_groups else ""
        for entry in self.by_node.get(slurm_node, {}).values():
            if entry.group == claim_uid and index in (entry.gpus.indices or ()):
                return entry.uid
        return ""

    def owner_of(self, job: SlurmJob) -> ClaimId | None:
        """Whose claim a job is, or None."""
        return claim_of(job, self.settings.policy.cluster, self.settings.owner_uid)

    def is_claim_of(self, job: SlurmJob | None, uid: str) -> bool:
        """Whether a job is the claim with that UID (`Entry.claim_uid`)."""
        owner = None if job is None else self.owner_of(job)
        return owner is not None and owner.uid == uid

    def once(self, what: str, about: str, every_s: float) -> bool:
        """True at most once in `every_s`."""
        if self.now - self.told.get((what, about), float("-inf")) < every_s:
            return False
        self.told[what, about] = self.now
        return True

    def put(self, entry: Entry) -> None:
        """Take an entry into the book, in place of the pod's last one."""
        old = self.book.get(entry.uid)
        if old is not None and old is not entry:
            self.drop(old)
        self.waiting.remove(entry.uid)
        self.book[entry.uid] = entry
        if entry.group:
            self.sharing.setdefault(entry.group, set()).add(entry.uid)
        self.by_node.setdefault(entry.slurm_node, {})[entry.uid] = entry
        self.set_job(entry, entry.job_id)

    def drop(self, entry: Entry) -> None:
        """Take an entry out of the book. Nobody who waits for it is left without an answer."""
        self.leave_group(entry)
        self.book.pop(entry.uid, None)
        self.loose.add(entry.uid)
        self.waiting.consider.add(entry.uid)
        on_node = self.by_node.get(entry.slurm_node, {})
        on_node.pop(entry.uid, None)
        if not on_node:
            self.by_node.pop(entry.slurm_node, None)
        self._forget_job(entry)
        for op in entry.waiters:
            text = "the pod's state changed meanwhile"
            self.out.append(Reply(op, reason="unavailable", text=text, unavailable=True))
        entry.waiters.clear()
        self.held.pop(entry.uid, None)
        self.view_changed = True
        self.touch(entry.slurm_node)

    def set_job(self, entry: Entry, job_id: int) -> None:
        """Change which job is a pod's claim; 0: none.

        Where another claim had this id, slurmctld has forgotten that claim.
        """
        self._forget_job(entry)
        entry.job_id = job_id
        if job_id:
            other = self.by_job.get(job_id, entry.claim_uid)
            if other != entry.claim_uid:
                self.robbed.add(other)
            self.by_job[job_id] = entry.claim_uid
        self.settle_view(entry)

    def _forget_job(self, entry: Entry) -> None:
        """The pod has this job no more; others of its gang may have it still."""
        uid = entry.claim_uid
        if self.by_job.get(entry.job_id) == uid and not self.lives_in(uid, entry.job_id, entry):
            del self.by_job[entry.job_id]

    def leave_group(self, entry: Entry) -> None:
        """The pod lives in its gang's claim no more: from now on it is one for itself."""
        if not entry.group:
            return
        self.set_job(entry, 0)
        members = self.sharing[entry.group]
        members.discard(entry.uid)
        if not members:
            del self.sharing[entry.group]
        entry.group = ""

    def move(self, entry: Entry, phase: Phase) -> None:
        """Put an entry of the book into another phase."""
        entry.move(phase, self.now)
        self.settle_view(entry)

    def settle_view(self, entry: Entry) -> None:
        """Bring what others see of an entry up to date."""
        if entry.phase in (Phase.HELD, Phase.QUEUED):
            self.held[entry.uid] = HeldClaim(entry.uid, entry.kube_node, entry.job_id)
        else:
            self.held.pop(entry.uid, None)
        self.view_changed = True
        self.touch(entry.slurm_node)

    def charges(self, nodes: AbstractSet[str]) -> dict[str, list[Charge]]:
        """What the book holds on some nodes, by Slurm node."""
        found: dict[str, list[Charge]] = {}
        for name in nodes:
            for entry in self.by_node.get(name, {}).values():
                if entry.gpus.total or entry.is_uncovered:
                    charge = Charge(entry.claim_uid, entry.gpus, entry.job_id, entry.is_uncovered)
                    found.setdefault(name, []).append(charge)
        for ticket in self.waiting.tickets.values():
            for name, count in ticket.now.items():
                if name in nodes:
                    gpus = GpuUse((GpuCount("", count),))
                    found.setdefault(name, []).append(Charge(ticket.uid, gpus, ticket.job_id))
        for ending in self.ending.values():
            if ending.slurm_node in nodes:
                charge = Charge(ending.claim_id.uid, ending.gpus, ending.job_id)
                found.setdefault(ending.slurm_node, []).append(charge)
        return found


def asked_gpus(pod: PodRecord) -> GpuUse:
    """A pod's request as a use without indices."""
    if pod.gpu is None:
        return GpuUse()
    return GpuUse(counts=(GpuCount(pod.gpu.type, pod.gpu.count),))


def index_jobs(jobs: Iterable[SlurmJob]) -> dict[str, list[SlurmJob]]:
    """Jobs that hold something, by node, in order of their ids."""
    found: dict[str, list[SlurmJob]] = {}
    for job in sorted(jobs, key=lambda j: j.id):
        if job.state.holds_resources:
            for name in job.nodes:
                found.setdefault(name, []).append(job)
    return found


def is_live(job: SlurmJob) -> bool:
    """Whether a claim holds or waits for something, and has not been ended."""
    holds = job.state.holds_resources or job.state.base == "PENDING"
    return holds and "COMPLETING" not in job.state.flags


def is_running(job: SlurmJob) -> bool:
    """Whether a claim covers its pod. Flags such as SIGNALING or RESIZING take nothing from it."""
    return job.state.base == "RUNNING" and "COMPLETING" not in job.state.flags
