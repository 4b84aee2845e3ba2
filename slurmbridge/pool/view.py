"""The view: what the extender scores on. Immutable, made by the bridge, streamed to N extenders.

A view says of every pool node what is free *now* and what Slurm has promised to others later. It
holds no pod that is only being considered: filter and prioritize are functions of (pod, view).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from slurmbridge.pool.record import GpuCount

_V = TypeVar("_V")


class Terms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who may use a reservation, and how; read by `slurmbridge.pool.reserved`.

    flex, magnetic, maint: flags of the reservation. user: whether the user of our claims may use
    it; None: not known. accounts: those that may, with "-" before them those that may not; (): any.
    exact: an account that is not named may not use it, even if it is below one that is.
    """

    flex: bool = False
    magnetic: bool = False
    maint: bool = False
    user: bool | None = None
    accounts: tuple[str, ...] = ()
    exact: bool = True


class Window(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A time in which a node is reserved in Slurm. end None: for ever. Unix seconds.

    cpus: so many CPUs of the node at most, 0: the whole node.
    """

    reservation: str
    start: float
    end: float | None
    terms: Terms = Terms()
    cpus: int = 0


class NodeView(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One pool node.

    blocked: "" when Slurm may run new work there, else a short stable text (`DRAIN`, `DOWN`,
        `unknown to Slurm`): why no new pod may come.
    total: GPUs by type that both sides agree on. free: free GPUs by type: owned by nobody, not
        completing, not unknown.
    native_jobs: native jobs that hold anything on the node (matters for granularity node).
    claimed: GPUs in claims of ours.
    plan_start: Unix seconds at which the first pending Slurm job is planned to start here.
    agent: with granularity gpu: whether the node agent is registered and fresh. Always True
        where no agent is asked for.
    domains: where the node stands, closest first (`("r7", "zone-a")`); each name is unique within
        its level. Empty: not known.
    partitions: of Slurm, that the node is in, sorted. Empty: not known.
    """

    kube_node: str
    slurm_node: str
    total: tuple[GpuCount, ...] = ()
    free: tuple[GpuCount, ...] = ()
    cpus_free: int = 0
    memory_free_mib: int = 0
    blocked: str = ""
    native_jobs: int = 0
    claimed: int = 0
    plan_start: float | None = None
    windows: tuple[Window, ...] = ()
    agent: bool = True
    domains: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()

    @property
    def free_total(self) -> int:
        """Free GPUs of all types."""
        return sum(g.count for g in self.free)


class HeldClaim(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A claim whose pod is not bound yet: only its node is open to the pod."""

    uid: str
    kube_node: str
    job_id: int


class View(msgspec.Struct, frozen=True):
    """All pool nodes at one moment.

    term: which leader made it (generations of different terms cannot be compared).
    generation: grows by one with each change in this term.
    as_of: Unix seconds, the bridge's clock, when the reading of slurmctld behind it began.
    interval_s: current poll interval of the bridge (the age that is normal).
    nodes: by Kubernetes node name. held: by pod UID.
    """

    term: str
    generation: int
    as_of: float
    interval_s: float
    nodes: Mapping[str, NodeView]
    held: Mapping[str, HeldClaim] = {}


class ViewDelta(msgspec.Struct, frozen=True):
    """What changed since generation `base`; None in a mapping: gone."""

    term: str
    base: int
    generation: int
    as_of: float
    interval_s: float
    nodes: Mapping[str, NodeView | None] = {}
    held: Mapping[str, HeldClaim | None] = {}


def apply_delta(view: View, delta: ViewDelta) -> View | None:
    """The view after the change, or None when the delta does not fit (ask for a whole view)."""
    if delta.term != view.term or delta.base != view.generation:
        return None
    return View(
        term=view.term,
        generation=delta.generation,
        as_of=delta.as_of,
        interval_s=delta.interval_s,
        nodes=_merge(view.nodes, delta.nodes),
        held=_merge(view.held, delta.held),
    )


def _merge(old: Mapping[str, _V], change: Mapping[str, _V | None]) -> Mapping[str, _V]:
    if not change:
        return old
    merged = dict(old)
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged
