"""A claim and its pod are brought together: bound, held for it, kept for a while, or given back."""

from __future__ import annotations

import msgspec

from slurmbridge.core import answer, evict, lift, release, together
from slurmbridge.core.action import AnnotatePod
from slurmbridge.core.evidence import (
    live_claims,
    others_on,
    plausible_indices,
    share_of,
    use_of,
    written_claim,
)
from slurmbridge.core.state import Entry, Phase, State
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Ask, Claim, ClaimRequest
from slurmbridge.pool.gres import format_indices
from slurmbridge.pool.policy import Refusal, honour, resolve
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob
from slurmbridge.pool.reserved import drawn_into
from slurmbridge.pool.score import end_of


def request_for(state: State, pod: PodRecord, slurm_node: str, ask: Ask) -> ClaimRequest:
    """The claim to ask for."""
    return ClaimRequest(state.claim_id(pod.uid), pod.ref, slurm_node, ask)


def drawn(state: State, ask: Ask, kube_node: str) -> Ask:
    """An ask for a node, with the MAGNETIC reservation that takes it in there, if there is one."""
    view = state.views.get(kube_node)
    if view is None:
        return ask
    end = end_of(ask, state.wall, state.settings.policy.plan_horizon_minutes)
    name = drawn_into(ask, view, state.wall, end)
    return ask if name == ask.reservation else msgspec.structs.replace(ask, reservation=name)


def must_queue(state: State, ask: Ask) -> bool:
    """Whether the claim has to come through Slurm's queue."""
    return state.defers or (state.snapshot is not None and ask.mode == "queued")


def ask_of(state: State, pod: PodRecord, job: SlurmJob) -> Ask:
    """What a claim was asked for; where policy would refuse it by now, as Slurm shows it."""
    ask = resolve(pod, state.settings.policy)
    if isinstance(ask, Refusal):
        return honour(pod, state.settings.policy, job)
    return ask if ask.reservation else msgspec.structs.replace(ask, reservation=job.reservation)


def take(state: State, entry: Entry, claim: Claim) -> None:
    """A claim is there: what is it to its pod now?"""
    waiters, entry.waiters = entry.waiters, []
    was_covering = entry.phase is Phase.COVERING
    entry.claim, entry.gpus = claim, claim.gpus
    entry.sure_at = state.now
    state.set_job(entry, claim.job_id)
    state.ending.pop(claim.job_id, None)  # of a claim that slurmctld forgot, under the same id
    entry.asked_at = None
    if entry.phase is Phase.LINGERING:
        return
    if entry.phase is Phase.LOST and evict.is_on_its_way(state, entry):
        return  # the pod is on its way out; until then Slurm holds its GPUs for it again
    if entry.phase is not Phase.HELD:
        state.move(entry, Phase.HELD)
    entry.pod_looking = None
    meet(state, entry, trusted=was_covering)
    if state.book.get(entry.uid) is entry and entry.phase in (Phase.HELD, Phase.BOUND):
        for op in waiters:
            if entry.phase is Phase.BOUND or not together.join(state, op, entry):
                answer.yes(state, op, entry)
        if not waiters and entry.phase is Phase.HELD:
            lift.on_held(state, entry)
        return
    for op in waiters:
        answer.no(state, op, "ending", "the pod needs no claim any more")


def take_job(state: State, entry: Entry, job: SlurmJob) -> None:
    """As `take`, of a claim that a reading shows."""
    use = share_of(entry, job)
    if use is None:
        return
    entry.boot = state.boot
    pod = state.pods.get(entry.uid)
    if entry.request is None and pod is not None:
        # Found over by a new leader, and running again in an older state of slurmctld.
        entry.request = request_for(state, pod, entry.slurm_node, ask_of(state, pod, job))
    take(
        state,
        entry,
        Claim(
            id=state.claim_id_of(entry),
            job_id=job.id,
            slurm_node=entry.slurm_node,
            gpus=use,
            state=job.state,
            granted=state.now,
            ends=job.end,
            started=job.start,
        ),
    )


def meet(state: State, entry: Entry, *, trusted: bool = False) -> None:
    """Bring a held claim and its pod together.

    Args:
        state: the state.
        entry: an entry with a claim, in phase held.
        trusted: the claim was made for what the pod uses; its annotations may be old.

    """
    pod = state.pods.get(entry.uid)
    if pod is None:
        gone = state.gone.get(entry.uid)
        if gone is not None and gone.may_run:
            release.linger(state, entry)
        else:
            release.end_entry(state, entry, "its pod is gone")
    elif pod.is_over or (not pod.node and pod.deleting_since is not None):
        release.leave(state, entry, pod, "its pod is over")
    elif not pod.node:
        return
    elif pod.node != entry.kube_node:
        release.end_entry(state, entry, f"the pod was bound to {pod.node}")
    elif trusted or _agrees(state, entry, pod):
        state.move(entry, Phase.BOUND)
        write_down(state, entry, pod)
        if entry.why:
            evict.unlose(state, entry, pod)


def _agrees(state: State, entry: Entry, pod: PodRecord) -> bool:
    """Whether the pod was bound with this claim; if not, what it was bound with is looked for."""
    written = written_claim(pod)
    if written is None:
        return True
    said = plausible_indices(pod, written)
    if written.job_id == entry.job_id and entry.group and said is not None:
        # Of a gang's claim the pod may have been promised another share by an earlier leader.
        gpus = GpuUse(entry.gpus.counts, said)
        if not _is_within(state, entry, said):
            return True
        if said == entry.gpus.indices or not others_on(state, entry, gpus):
            entry.gpus = gpus
            return True
    elif written.job_id == entry.job_id:
        return True
    if written.indices == entry.gpus.indices:
        return True
    for job in live_claims(state, entry.uid):
        if job.id == written.job_id and use_of(job, entry.slurm_node) is not None:
            # The sweep ends the other one, which the pod does not use.
            take_job(state, entry, job)
            return False
    both = {*(entry.gpus.indices or ()), *(said or ())}
    entry.gpus = GpuUse(entry.gpus.counts, tuple(sorted(both)) or None)
    evict.lose(state, entry, pod, "its claim and its annotations name different GPUs")
    return False


def _is_within(state: State, entry: Entry, indices: tuple[int, ...]) -> bool:
    """Whether an entry's job holds these GPUs on its node; not known: no."""
    job = None if state.snapshot is None else state.snapshot.jobs.get(entry.job_id)
    use = None if job is None else use_of(job, entry.slurm_node)
    return use is not None and set(indices) <= set(use.indices or ())


def write_down(state: State, entry: Entry, pod: PodRecord) -> None:
    """Write a pod's claim on it, if it does not say so already."""
    indices = entry.gpus.indices
    values = {
        keys.CLAIM: f"{entry.job_id}/{pod.uid}",
        keys.GPUS: "" if indices is None else format_indices(indices),
    }
    if any(pod.annotations.get(k) != v for k, v in values.items()):
        state.out.append(AnnotatePod(pod.uid, pod.namespace, pod.name, values))
