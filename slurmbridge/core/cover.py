"""Pods on their nodes without a claim: strays, and those whose claim slurmctld has forgotten.

Such a pod is charged with its GPUs from the first moment, and nothing new is let on its node, until
a claim on exactly its GPUs has been made, or the pod has gone.
"""

from __future__ import annotations

from collections.abc import Collection

from slurmbridge.core import evict, release, settle
from slurmbridge.core.action import Cover, PollNow, Tell
from slurmbridge.core.event import BreakerAnswered, Covered, CoverRefused
from slurmbridge.core.evidence import (
    Written,
    fits,
    is_outdated,
    is_owner,
    live_claims,
    node_of,
    others_on,
    plausible_indices,
    use_of,
    written_claim,
)
from slurmbridge.core.settle import request_for
from slurmbridge.core.state import Entry, Phase, State, asked_gpus, is_live, is_running
from slurmbridge.pool.claim import ClaimId
from slurmbridge.pool.drain import is_drained
from slurmbridge.pool.policy import Refusal, honour, resolve
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob

PATIENCE_S = 20.0
"""How long a refused cover is tried again where what stands in its way will go by itself."""
STRAY_AGAIN_S = 30.0
SKEW_S = 10.0
"""How far the clocks of slurmctld and of the API server may differ."""
PASSING = frozenset({"starting", "fragmented", "completing"})
"""Refusals that say nothing about the GPUs (`slurmbridge.slurm.refusal`)."""


def take_in_all(state: State) -> None:
    """Pods on pool nodes that the book does not know, after a reading has been compared with it."""
    for uid, pod in state.pods.items():
        _take_in(state, uid)
        if not state.audited:
            take_in_over(state, pod)
    state.loose.clear()


def take_in_on(state: State, kube_nodes: Collection[str]) -> None:
    """Pods on nodes of which it was not known until now which Slurm nodes they are."""
    for uid, pod in state.pods.items():
        if pod.node in kube_nodes:
            _take_in(state, uid)
            take_in_over(state, pod)


def take_in_over(state: State, pod: PodRecord) -> None:
    """A pod that is over when it is first seen, without a claim: is its last process gone?"""
    if not pod.is_over or pod.uid in state.book:
        return
    slurm_node, written = node_of(state, pod), written_claim(pod)
    if not slurm_node or written is None or not release.may_be_left(state, pod):
        return
    entry = Entry(
        uid=pod.uid,
        ref=pod.ref,
        kube_node=pod.node,
        slurm_node=slurm_node,
        phase=Phase.LINGERING,
        since=state.now,
        gpus=GpuUse(asked_gpus(pod).counts, written.indices),
    )
    state.put(entry)
    release.keep(state, entry, "its pod is over")


def after_event(state: State) -> None:
    """See to the pods that an event has left without a claim, or out of the book."""
    for uid in state.robbed:
        for entry in state.entries_of(uid):
            if entry.job_id and state.by_job.get(entry.job_id) != uid:
                forget(state, entry)
    state.robbed.clear()
    for uid in state.loose:
        _take_in(state, uid)
    state.loose.clear()


def _take_in(state: State, uid: str) -> None:
    pod = state.pods.get(uid)
    if pod is not None and pod.node and not pod.is_over and uid not in state.book:
        take_in(state, pod)


def take_in(state: State, pod: PodRecord) -> None:
    """Charge a bound pod that the book does not know, and see to it that it gets a claim."""
    slurm_node = node_of(state, pod)
    if not slurm_node:
        return
    written = written_claim(pod)
    entry = Entry(
        uid=pod.uid,
        ref=pod.ref,
        kube_node=pod.node,
        slurm_node=slurm_node,
        phase=Phase.COVERING,
        since=state.now,
        sure_at=state.now,
        boot=state.boot,
        gpus=GpuUse(asked_gpus(pod).counts, plausible_indices(pod, written)),
        stray=written is None,
        why="it was bound without a claim" if written is None else "its claim was missing in Slurm",
    )
    over = None if written is None else _over(state, pod, written)
    if over is not None and over.kind == "group":
        entry.group = over.uid
    state.put(entry)
    if written is not None and over is not None:
        # Slurm says that the claim is over: the same as if we had seen it end.
        state.set_job(entry, written.job_id)
        state.move(entry, Phase.BOUND)
        return
    ask = resolve(pod, state.settings.policy)
    if isinstance(ask, Refusal) and (entry.stray or pod.gpu is None):
        evict.lose_stray(state, entry, pod, ask.text)
    elif entry.stray and state.settings.policy.stray != "cover":
        evict.lose_stray(state, entry, pod, "strays are not covered by policy")
    else:
        if isinstance(ask, Refusal):
            ask = honour(pod, state.settings.policy)
        entry.request = request_for(state, pod, slurm_node, ask)
        begin(state, entry, entry.why)


def _over(state: State, pod: PodRecord, written: Written) -> ClaimId | None:
    """The claim that a pod was bound with, if Slurm says that it is over."""
    job = None if state.snapshot is None else state.snapshot.jobs.get(written.job_id)
    owner = None if job is None else state.owner_of(job)
    if job is None or owner is None or is_live(job):
        return None
    if state.by_job.get(written.job_id, owner.uid) != owner.uid:
        return None  # the id is a younger claim's
    return owner if is_owner(pod, job, owner) else None


def begin(state: State, entry: Entry, why: str, *, at_once: bool = False) -> None:
    """Cover a pod: at once, or after a reading has shown that it really has no claim.

    A member of a gang is covered for itself: its gang's claim is gone as a whole, and each has the
    right to the GPUs that it uses, whatever becomes of the others.
    """
    state.leave_group(entry)
    state.set_job(entry, 0)
    state.move(entry, Phase.COVERING)
    entry.why = why
    entry.cover_since = state.now
    entry.cover_gpus_known = entry.claim is not None
    entry.claim, entry.refused = None, ""
    if at_once:
        ask_for(state, entry)
    else:
        state.out.append(PollNow())


def ask_for(state: State, entry: Entry) -> None:
    """Ask for a claim on exactly the pod's GPUs."""
    if entry.request is not None:
        entry.asked_at, entry.boot, entry.refused = state.now, state.boot, ""
        cause = entry.cause or entry.uid[:8]
        state.out.append(Cover(entry.uid, entry.request, entry.gpus.indices, cause))


def check(state: State, entry: Entry) -> None:
    """After a reading: is there a claim that covers the pod? If not, ask for one.

    One may have been made by an earlier Cover whose answer was lost: asking again at once would
    find the GPUs taken, by us. A refusal counts no more once slurmctld has restarted: it may have
    forgotten the job that stood in the way, and a second, younger word is cheap.
    """
    if entry.asked_at is not None and state.now - entry.asked_at < state.settings.answer_s:
        return
    if state.snapshot is None or state.snapshot.began <= max(entry.since, entry.asked_at or 0.0):
        return
    entry.asked_at = None
    doubtful = None
    for job in live_claims(state, entry.uid):
        if fits(entry, job):
            settle.take_job(state, entry, job)
            return
        if entry.cover_gpus_known or not is_running(job) or entry.slurm_node not in job.nodes:
            release.end_job(state, entry.uid, job, "it does not cover the pod's GPUs")
        else:
            doubtful = doubtful or job
    if doubtful is not None:
        _two_truths(state, entry, doubtful)
    elif entry.refused and entry.boot == state.boot:
        _fail(state, entry, entry.refused)
    elif not _is_left_to_policy(state, entry):
        ask_for(state, entry)


def _is_left_to_policy(state: State, entry: Entry) -> bool:
    """Whether nobody but the pod says that it had a claim, and policy gives it none.

    Slurm forgets claims only when it restarts. A pod that is younger than slurmctld's start either
    wrote the annotation itself, or its claim has ended so long ago that Slurm has no record of it.
    """
    pod, policy = state.pods.get(entry.uid), state.settings.policy
    if pod is None or entry.stray or entry.cover_gpus_known or pod.created < state.boot + SKEW_S:
        return False
    if policy.stray != "cover":
        entry.stray = True
        evict.lose_stray(state, entry, pod, "Slurm knows no claim as its annotation names it")
        return True
    ask = resolve(pod, policy)
    if isinstance(ask, Refusal):
        evict.lose(state, entry, pod, f"Slurm knows no claim of it, and policy none: {ask.text}")
    return isinstance(ask, Refusal)


def _two_truths(state: State, entry: Entry, job: SlurmJob) -> None:
    """Slurm holds other GPUs for the pod than its annotations say: nobody knows which it uses."""
    pod = state.pods.get(entry.uid)
    use = use_of(job, entry.slurm_node)
    if pod is None or use is None:
        return
    both = {*(entry.gpus.indices or ()), *(use.indices or ())}
    entry.gpus = GpuUse(use.counts, tuple(sorted(both)) or None)
    state.set_job(entry, job.id)
    evict.lose(state, entry, pod, "its claim and its annotations name different GPUs")


def on_covered(state: State, event: Covered) -> None:
    """The pod has a claim again: write it down on the pod."""
    entry, claim = state.book.get(event.uid), event.claim
    if entry is not None and entry.job_id == claim.job_id:
        return
    if (
        entry is None
        or entry.job_id
        or not entry.is_uncovered
        or entry.slurm_node != claim.slurm_node
        or entry.gpus.indices not in (None, claim.gpus.indices)
    ):
        release.end_claim(state, claim, "the pod needs it not")
        return
    if is_outdated(state, claim):
        on_cover_failed(state, entry)
        return
    if entry.gpus.indices is None and others_on(state, entry, claim.gpus):
        release.end_claim(state, claim, "another pod has its GPUs")
        if entry.phase is Phase.COVERING:
            _fail(state, entry, "the GPUs that Slurm gave are another pod's")
        return
    why = entry.why
    settle.take(state, entry, claim)
    pod = state.pods.get(event.uid)
    if pod is not None and entry.phase is Phase.BOUND:
        text = f"covered again by Slurm job {entry.job_id}: {why}"
        state.out.append(Tell(pod.namespace, pod.name, pod.uid, "Covered", text))


def on_cover_refused(state: State, event: CoverRefused) -> None:
    """Someone else has the pod's GPUs, or its node: it has to stop.

    Unless that someone is the pod itself, by a Cover whose answer was lost: one more reading tells.
    """
    entry = state.book.get(event.uid)
    if entry is None or entry.phase is not Phase.COVERING or entry.asked_at is None:
        return
    if event.reason == "node" and _is_drained(state, entry.slurm_node):
        on_cover_failed(state, entry)
        return
    patient = state.now - entry.cover_since < PATIENCE_S
    if not patient or not (event.reason in PASSING or _is_in_our_own_way(state, entry)):
        entry.refused = event.text
    on_cover_failed(state, entry)


def _is_drained(state: State, slurm_node: str) -> bool:
    """Whether Slurm gives a node's GPUs to nobody: a cover can wait for the end of the drain."""
    node = None if state.snapshot is None else state.snapshot.nodes.get(slurm_node)
    return node is not None and is_drained(node)


def on_cover_failed(state: State, entry: Entry) -> None:
    """No clear answer: a claim may have been made. The next reading tells; then again."""
    if entry.phase is Phase.COVERING:
        entry.since, entry.asked_at = state.now, None
        state.out.append(PollNow())


def _fail(state: State, entry: Entry, text: str) -> None:
    pod = state.pods.get(entry.uid)
    why = f"no claim could be made for it: {text}"
    if pod is None or pod.is_over or not pod.node:
        state.drop(entry)
    elif entry.stray:
        evict.lose_stray(state, entry, pod, why)
    else:
        evict.lose(state, entry, pod, why)


def _is_in_our_own_way(state: State, entry: Entry) -> bool:
    """Whether the pod's GPUs are held by claims of ours that are about to go."""
    wanted = set(entry.gpus.indices or ())
    for job in state.jobs_on.get(entry.slurm_node, ()):
        use = use_of(job, entry.slurm_node)
        if use is None or not wanted & set(use.indices or ()):
            continue
        owner = state.ours.get(job.id)
        if owner is not None and state.by_job.get(job.id) != owner.uid:
            return True
    return any(
        wanted & set(ending.gpus.indices or ())
        for ending in state.ending.values()
        if ending.slurm_node == entry.slurm_node
    )


def forget(state: State, entry: Entry) -> None:
    """Slurmctld forgot a claim in a crash: cover the pod again before anything else."""
    pod = state.pods.get(entry.uid)
    state.leave_group(entry)
    if entry.phase is Phase.LINGERING:
        state.set_job(entry, 0)
        ask_for(state, entry)
    elif entry.phase is Phase.LOST:
        state.set_job(entry, 0)
    elif pod is None or pod.is_over or entry.phase is Phase.QUEUED or entry.request is None:
        state.drop(entry)
    else:
        begin(state, entry, "its claim was missing in Slurm", at_once=True)


def on_breaker_answered(state: State, event: BreakerAnswered) -> None:
    """Go on with the evictions, or find the pods' claims again, or make them anew."""
    if event.confirm:
        evict.confirm(state)
        return
    for entry in evict.dismissed(state):
        job = None if state.snapshot is None else state.snapshot.jobs.get(entry.job_id)
        if job is not None and is_running(job) and state.is_claim_of(job, entry.claim_uid):
            state.move(entry, Phase.BOUND)  # the next reading tells whether it still is
        else:
            begin(state, entry, entry.why)


def tick(state: State) -> None:
    """Strays that could not be covered are tried again: their GPUs may have become free."""
    if state.settings.policy.stray != "cover":
        return
    for entry in list(state.book.values()):
        if (
            entry.phase is Phase.LOST
            and entry.stray
            and entry.request is not None
            and state.now - entry.since > STRAY_AGAIN_S
        ):
            begin(state, entry, entry.why)
