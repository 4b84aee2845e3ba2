"""One claim, many pods: each member of a gang has its share of the GPUs on its node.

Slurm says which GPUs of each node the job holds; who of the gang gets which of them is decided
here, once, and is written on each pod as its gate comes off (`slurmbridge.dev/share`), and with its
Binding. From then on what the pods say is believed, so that a restart changes no share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from slurmbridge.core import adopted, agents, publish, settle
from slurmbridge.core.evidence import (
    is_bound_with,
    live_claims,
    others_on,
    place_of,
    uid_of_group,
    written_claim,
)
from slurmbridge.core.places import topology
from slurmbridge.core.settle import ask_of, request_for
from slurmbridge.core.spare import NO_NUMBER, Spare, promised
from slurmbridge.core.state import (
    UNKNOWN_PROMISES,
    Entry,
    Phase,
    State,
    asked_gpus,
    is_running,
)
from slurmbridge.core.waiting import GangState
from slurmbridge.pool.gpuside import choose
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob
from slurmbridge.topology.gang import Gang, Placement
from slurmbridge.topology.pack import pack


class Laid(NamedTuple):
    """left: members that there is no share for. closed: nodes of which nothing was given yet."""

    left: list[PodRecord]
    closed: list[str]


def lay(
    state: State, uid: str, job: SlurmJob, pods: list[PodRecord], seats: Mapping[str, str]
) -> Laid:
    """Give members their shares of a running claim.

    Args:
        state: the state.
        uid: of the gang's claim.
        job: it; running, with its GPUs.
        pods: members without a share, in rank order.
        seats: Slurm nodes that were meant for them, by UID; {}: where Slurm had the choice.

    """
    mates = [pod for pod in state.pods.values() if uid_of_group(pod) == uid]
    spare = Spare(state, uid, job, mates)
    closed = adopted.unclear(state, job, spare.left())
    for name in closed:
        spare.close(name)
    left = []
    # The largest first: they have the least choice.
    ways = list(zip(pods, _nodes_for(state, uid, spare, pods), strict=True))
    for pod, names in sorted(ways, key=lambda way: -asked_gpus(way[0]).total):
        meant = [seats[pod.uid]] if pod.uid in seats else []
        if not any(_take(state, uid, job, pod, name, spare) for name in chain(meant, names)):
            left.append(pod)
    return Laid(left, closed)


def adopt(state: State, uid: str, job: SlurmJob, pods: list[PodRecord]) -> None:
    """After a restart: members that are bound, or may be any moment, are found in their shares.

    A pod can say anything: what is not a share of the claim is not believed.

    Args:
        state: the state.
        uid: of the gang's claim.
        job: it; running or suspended.
        pods: all members that are not over.

    """
    said = [pod for pod in pods if is_bound_with(pod, job) and _is_open(state, pod)]
    # One that was let go in this term and has no share any more has had it taken away.
    told = [
        (pod, share)
        for pod in pods
        if pod.uid in state.book or pod.uid not in state.waiting.lifted
        if (share := promised(pod)) and share.job_id == job.id
    ]
    if not said and all(pod.uid in state.book for pod, _ in told):
        return
    spare = Spare(state, uid, job, pods)
    for pod in said:
        written = written_claim(pod)
        indices = () if written is None else written.indices or ()
        _take(state, uid, job, pod, place_of(state, pod, job), spare, indices)
    for pod, share in told:
        if pod.uid in state.book or live_claims(state, pod.uid):
            continue
        entry = _take(state, uid, job, pod, share.slurm_node, spare, share.indices)
        if entry is not None:
            entry.promised = UNKNOWN_PROMISES


def said(state: State, pods: Iterable[PodRecord]) -> set[int]:
    """Jobs of which members that are still to be found say that they have their shares."""
    written = [written_claim(pod) for pod in pods if pod.node and _is_open(state, pod)]
    told = [promised(pod) for pod in pods if pod.uid not in state.book]
    return {share.job_id for share in (*written, *told) if share is not None}


def _is_open(state: State, pod: PodRecord) -> bool:
    """Whether a bound pod is to be found: one that is to be covered was taken for one without."""
    entry = state.book.get(pod.uid)
    return entry is None or entry.phase is Phase.COVERING


def note_place(gang: GangState, found: Placement) -> None:
    """Remember where a gang stands as a whole, for people."""
    gang.level, gang.domain, gang.spread = found.level, found.domain, dict(found.spread)
    gang.shorts = tuple(str(short) for short in found.shorts)


def _nodes_for(
    state: State, uid: str, spare: Spare, pods: list[PodRecord]
) -> Iterator[Iterable[str]]:
    """Slurm nodes for each pod, best first: ranks along the topology, then any that has room."""
    index = publish.index(state)
    free = np.zeros(len(index), np.int64)
    for name, gpus in spare.left().items():
        row = index.row_of.get(state.kube_of.get(name, ""))
        if row is not None:
            free[row] = len(gpus)
    sizes = tuple(asked_gpus(pod).total for pod in pods)
    order = tuple(state.slurm_of[index.names[row]] for row in np.flatnonzero(free))
    found = pack(topology(state, index), free, Gang(sizes), candidates=free > 0, total=free)
    if not isinstance(found, Placement):
        return repeat(order, len(pods))
    gang = state.waiting.gang_with(uid)
    if gang is not None and not state.sharing.get(uid):
        note_place(gang, found)
    return (chain((state.slurm_of[index.names[row]],), order) for row in found.rows)


def _take(
    state: State,
    uid: str,
    job: SlurmJob,
    pod: PodRecord,
    name: str,
    spare: Spare,
    exactly: tuple[int, ...] = (),
) -> Entry | None:
    """The pod's share on a node, if there is one; exactly: these GPUs or none."""
    count, kube_node = asked_gpus(pod).total, pod.node or state.kube_of.get(name, "")
    node, left = state.kube_nodes.get(kube_node), spare.on(name, but=pod.uid)
    if not kube_node or not count or len(left) < count:
        return None
    excluded = state.waiting.excluded.get(pod.uid, {})
    is_new = not exactly and not pod.node
    if not pod.node and node is None:
        return None
    if is_new and node is not None and (not node.ready or state.now < excluded.get(kube_node, 0.0)):
        return None
    if not set(exactly) <= set(left) or len(exactly) not in (0, count):
        return None
    indices = exactly or choose(left, count, agents.sides(state, kube_node))
    gpus = GpuUse(asked_gpus(pod).counts, None if NO_NUMBER in indices else indices)
    entry = _settle_in(state, uid, job, pod, name, gpus)
    if entry is not None:
        spare.charge(name, pod.uid, gpus)
    return entry


def _settle_in(
    state: State, uid: str, job: SlurmJob, pod: PodRecord, slurm_node: str, gpus: GpuUse
) -> Entry | None:
    """Charge a member with its share; None: another pod may still use it."""
    entry = Entry(
        uid=pod.uid,
        ref=pod.ref,
        kube_node=pod.node or state.kube_of.get(slurm_node, ""),
        slurm_node=slurm_node,
        phase=Phase.QUEUED,
        since=state.now,
        request=request_for(state, pod, slurm_node, ask_of(state, pod, job)),
        gpus=gpus,
        boot=state.boot,
        cause=pod.uid[:8],
        planned=not pod.node,
        group=uid,
    )
    if not pod.node and others_on(state, entry, gpus):
        return None
    if not is_running(job):
        if not pod.node:
            return None
        entry.phase = Phase.BOUND  # suspended: `audit` looks into it
    entry.job_id = job.id
    state.put(entry)
    if is_running(job):
        settle.take_job(state, entry, job)
    return entry
