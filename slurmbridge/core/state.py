"""The state of the bridge: what it has been told, and its book of claims.

Only functions of this package change it, and only while `Machine.handle` runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from slurmbridge.core.action import Action
from slurmbridge.core.settings import Settings
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
from slurmbridge.pool.view import NodeView, Window

NO_GPUS = GpuUse()


class Phase(StrEnum):
    """Where a claim is in its life.

    asking -> held -> bound -> ending -> (gone) is the good way. queued: a placeholder waits in
    Slurm. doubt: asked, no clear answer. covering: the pod runs, its claim is being made again.
    lost: Slurm has ended the claim, the pod has to go. lingering: the pod object is gone, its
    processes may not be.
    """

    ASKING = "asking"
    DOUBT = "doubt"
    QUEUED = "queued"
    HELD = "held"
    BOUND = "bound"
    COVERING = "covering"
    LOST = "lost"
    LINGERING = "lingering"
    ENDING = "ending"


@dataclass(slots=True)
class Entry:
    """One claim in the book, by pod UID.

    since: when the phase began. op ids in `waiters` are answered when the phase is settled.
    looking: a second look is under way since then. gpus: what is charged to the pod even when no
    Slurm job stands behind it. why: reason of the loss, for the user.
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
    looking: float | None = None
    pod_looking: float | None = None
    ended_at: float | None = None
    evicted_at: float | None = None
    linger_until: float = 0.0
    why: str = ""
    stray: bool = False
    cause: str = ""

    def move(self, phase: Phase, now: float) -> None:
        """Go to another phase."""
        self.phase, self.since, self.looking = phase, now, None


@dataclass(slots=True)
class State:
    """Everything that the core knows."""

    settings: Settings
    term: str
    now: float = 0.0
    snapshot: SlurmSnapshot | None = None
    poll_failed: str = ""
    interval_s: float = 1.0
    pods: dict[str, PodRecord] = field(default_factory=dict)
    kube_nodes: dict[str, KubeNode] = field(default_factory=dict)
    pods_listed: bool = False
    nodes_listed: bool = False
    book: dict[str, Entry] = field(default_factory=dict)
    bound_since: dict[str, float] = field(default_factory=dict)
    orphans: dict[int, float] = field(default_factory=dict)
    jobs_on: dict[str, list[SlurmJob]] = field(default_factory=dict)
    ours: dict[int, ClaimId] = field(default_factory=dict)
    kube_of: dict[str, str] = field(default_factory=dict)
    slurm_of: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    windows: dict[str, tuple[Window, ...]] = field(default_factory=dict)
    ledgers: dict[str, NodeLedger] = field(default_factory=dict)
    views: dict[str, NodeView] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)
    held_changed: bool = True
    index: ViewIndex | None = None
    generation: int = 0
    evictions: list[float] = field(default_factory=list)
    breaker_since: float | None = None
    breaker_confirmed: float | None = None
    wake_after: dict[str, tuple[float, float]] = field(default_factory=dict)
    annotated: dict[str, str] = field(default_factory=dict)
    annotated_at: float = 0.0
    told: dict[tuple[str, str], float] = field(default_factory=dict)
    out: list[Action] = field(default_factory=list)

    @property
    def is_synced(self) -> bool:
        """Whether both sides have been read once: before that nothing is decided."""
        return self.pods_listed and self.nodes_listed and self.snapshot is not None

    @property
    def age_s(self) -> float:
        """Age of the last reading of slurmctld."""
        return float("inf") if self.snapshot is None else self.now - self.snapshot.began

    @property
    def is_stale(self) -> bool:
        """Whether the reading is too old to make new claims on."""
        return self.age_s > max(self.settings.freshness.stale, 2 * self.interval_s)

    def touch(self, slurm_node: str) -> None:
        """Mark a node for a new ledger and view."""
        if slurm_node:
            self.dirty.add(slurm_node)

    def owner_of(self, job: SlurmJob) -> ClaimId | None:
        """Whose claim a job is, or None."""
        return claim_of(job, self.settings.policy.cluster, self.settings.owner_uid)

    def drop(self, entry: Entry) -> None:
        """Take an entry out of the book."""
        self.book.pop(entry.uid, None)
        self.held_changed = True
        self.touch(entry.slurm_node)

    def charges(self) -> Mapping[str, list[Charge]]:
        """What the book holds, by Slurm node."""
        found: dict[str, list[Charge]] = {}
        for entry in self.book.values():
            if entry.gpus.total:
                charge = Charge(entry.uid, entry.gpus, entry.job_id)
                found.setdefault(entry.slurm_node, []).append(charge)
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
