"""One claim, many pods: each member of a gang has its share of the GPUs on its node.

Slurm says which GPUs of each node the job holds; who of the gang gets which of them is decided
here, once, and is written on each pod as its gate comes off (`slurmbridge.dev/share`), and with its
Binding. From then on what the pods say is believed, so that a restart changes no share.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slurmbridge.core import publish, settle
from slurmbridge.core.evidence import (
    Share,
    live_claims,
    others_on,
    read_share,
    uid_of_group,
    written_claim,
)
from slurmbridge.core.places import topology
from slurmbridge.core.settle import ask_of, request_for
from slurmbridge.core.state import (
    UNKNOWN_PROMISES,
    Entry,
    Phase,
    State,
    asked_gpus,
    is_running,
)
from slurmbridge.core.waiting import GangState
from slurmbridge.pool import keys
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob
from slurmbridge.topology.gang import Gang, Placement
from slurmbridge.topology.pack import pack


def lay(
    state: State, uid: str, job: SlurmJob, pods: list[PodRecord], seats: Mapping[str, str]
) -> list[PodRecord]:
    """Give members their shares of a running claim; those that there is none for are returned.

    Args:
        state: the state.
        uid: of the gang's claim.
        job: it; running, with its GPUs.
        pods: members without a share, in rank order.
        seats: Slurm nodes that were meant for them, by UID; {}: where Slurm had the choice.

    """
    spare = _spare(state, uid, job)
    left = []
    for pod, row in zip(pods, _nodes_for(state, uid, spare, pods), strict=True):
        share = None
        for name in [*([seats[pod.uid]] if pod.uid in seats else []), *row]:
            share = _take(state, uid, job, pod, name, spare)
            if share is not None:
                break
        if share is None:
            left.append(pod)
    return left


def adopt(state: State, uid: str, job: SlurmJob, pods: list[PodRecord]) -> None:
    """After a restart: members that are bound, or may be any moment, are found in their shares.

    A pod can say anything: what is not a share of the claim is not believed.
    """
    for pod in pods:
        entry, written = state.book.get(pod.uid), written_claim(pod)
        # One that is to be covered was taken for one without a claim: this reading knows better.
        is_open = entry is None or entry.phase is Phase.COVERING
        if written is not None and is_open and says_its_in(pod, job):
            name, spare = state.slurm_of.get(pod.node, ""), _spare(state, uid, job, but=pod.uid)
            _take(state, uid, job, pod, name, spare, written.indices or ())
    for pod in pods:
        told = _promised(pod)
        if told is None or told.job_id != job.id:
            continue
        if pod.uid in state.book or live_claims(state, pod.uid):
            continue
        spare = _spare(state, uid, job, but=pod.uid)
        entry = _take(state, uid, job, pod, told.slurm_node, spare, told.indices)
        if entry is not None:
            entry.promised = UNKNOWN_PROMISES


def says_its_in(pod: PodRecord, job: SlurmJob) -> bool:
    """Whether a pod was bound with a job, as it says."""
    written = written_claim(pod) if pod.node else None
    return written is not None and written.job_id == job.id


def _spare(state: State, uid: str, job: SlurmJob, but: str = "") -> dict[str, list[int]]:
    """What no member has or may be bound with, by Slurm node: GPU indices, or -1 without numbers.

    but: UID of a member that does not count.
    """
    spare: dict[str, list[int]] = {}
    for name, use in (job.gpus or {}).items():
        spare[name] = [-1] * use.total if use.indices is None else sorted(use.indices)
    for entry in state.entries_of(uid):
        if entry.job_id == job.id:
            _charge(spare.get(entry.slurm_node), entry.gpus)
    for pod in state.pods.values():
        if pod.is_over or pod.uid == but or uid_of_group(pod) != uid:
            continue
        known = state.book.get(pod.uid)
        if known is not None and known.phase is not Phase.COVERING:
            continue
        written, told = written_claim(pod), _promised(pod)
        if pod.node and written is not None and written.job_id == job.id:
            gpus = GpuUse(asked_gpus(pod).counts, written.indices)
            _charge(spare.get(state.slurm_of.get(pod.node, "")), gpus)
        elif told is not None and told.job_id == job.id:
            gpus = GpuUse(asked_gpus(pod).counts, told.indices or None)
            _charge(spare.get(told.slurm_node), gpus)
    return spare


def _promised(pod: PodRecord) -> Share | None:
    """The share that a pod may be bound with any moment: its gate is off, and it names one."""
    if pod.node or pod.gates or pod.deleting_since is not None:
        return None
    return read_share(pod.annotations.get(keys.SHARE, ""))


def _charge(spare: list[int] | None, gpus: GpuUse) -> None:
    if spare is None:
        return
    if gpus.indices is None:
        del spare[: gpus.total]
    else:
        spare[:] = [i for i in spare if i not in gpus.indices]


def note_place(gang: GangState, found: Placement) -> None:
    """Remember where a gang stands as a whole, for people."""
    gang.level, gang.domain, gang.spread = found.level, found.domain, dict(found.spread)
    gang.shorts = tuple(str(short) for short in found.shorts)


def _nodes_for(
    state: State, uid: str, spare: dict[str, list[int]], pods: list[PodRecord]
) -> list[list[str]]:
    """Slurm nodes for each pod, best first: ranks along the topology, then any that has room."""
    index = publish.index(state)
    free = np.zeros(len(index), np.int64)
    for name, gpus in spare.items():
        row = index.row_of.get(state.kube_of.get(name, ""))
        if row is not None:
            free[row] = len(gpus)
    sizes = tuple(asked_gpus(pod).total for pod in pods)
    order = [state.slurm_of[index.names[row]] for row in np.flatnonzero(free)]
    found = pack(topology(state, index), free, Gang(sizes), candidates=free > 0, total=free)
    if not isinstance(found, Placement):
        return [order for _ in pods]
    gang = next((g for g in state.waiting.gangs.values() if g.uid == uid), None)
    if gang is not None and not state.entries_of(uid):
        note_place(gang, found)
    return [[state.slurm_of[index.names[row]], *order] for row in found.rows]


def _take(
    state: State,
    uid: str,
    job: SlurmJob,
    pod: PodRecord,
    name: str,
    spare: dict[str, list[int]],
    exactly: tuple[int, ...] = (),
) -> Entry | None:
    """The pod's share on a node, if there is one; exactly: these GPUs or none."""
    count, kube_node = asked_gpus(pod).total, state.kube_of.get(name, "")
    node = state.kube_nodes.get(kube_node)
    if node is None or not count or len(spare.get(name, ())) < count:
        return None
    excluded = state.waiting.excluded.get(pod.uid, {})
    is_new = not exactly and not pod.node
    if is_new and (not node.ready or state.now < excluded.get(kube_node, 0.0)):
        return None
    if not set(exactly) <= set(spare[name]) or len(exactly) not in (0, count):
        return None
    indices = exactly or tuple(spare[name][:count])
    gpus = GpuUse(asked_gpus(pod).counts, None if -1 in indices else indices)
    entry = _settle_in(state, uid, job, pod, name, gpus)
    if entry is not None:
        _charge(spare[name], gpus)
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
