"""A pod asks for its claim: the way from `ClaimAsked` to a grant or a refusal."""

from __future__ import annotations

import numpy as np

from slurmbridge.core import publish, release
from slurmbridge.core.action import Allocate, LookPod, Queue, Reply
from slurmbridge.core.event import (
    Allocated,
    AllocateRefused,
    AllocateUnknown,
    ClaimAsked,
    PodLooked,
    Queued,
    UnboundReleased,
)
from slurmbridge.core.state import Entry, Phase, State, asked_gpus
from slurmbridge.pool.claim import Ask, ClaimId, ClaimRequest
from slurmbridge.pool.gres import format_indices
from slurmbridge.pool.index import compile_view
from slurmbridge.pool.policy import Refusal, resolve
from slurmbridge.pool.reason import ABOUT, REASONS, Reason
from slurmbridge.pool.record import PodRecord
from slurmbridge.pool.verdict import judge
from slurmbridge.pool.view import View


def on_claim_asked(state: State, event: ClaimAsked) -> None:
    """Decide whether a pod may have a claim on a node, now.

    Idempotent: the same question gets the same claim, however often it is asked.
    """
    if not state.is_synced:
        _later(state, event.op, "the bridge has just started and is still reading both sides")
        return
    pod = state.pods.get(event.uid)
    if pod is None:
        # The watch may be a moment behind the scheduler's: ask the API server about this one.
        entry = Entry(
            uid=event.uid,
            ref=f"{event.namespace}/{event.name}",
            kube_node=event.kube_node,
            slurm_node=state.slurm_of.get(event.kube_node, ""),
            phase=Phase.ASKING,
            since=state.now,
            waiters=[event.op],
            cause=event.cause,
            pod_looking=state.now,
        )
        if event.uid in state.book:
            _no(state, event.op, "ending", "an earlier claim of this pod is still being settled")
            return
        state.book[event.uid] = entry
        state.out.append(LookPod(event.uid, event.namespace, event.name))
        return
    _decide(state, event, pod)


def on_pod_looked_for_claim(state: State, entry: Entry, event: PodLooked) -> None:
    """Go on with a claim whose pod was not in the watch yet."""
    state.drop(entry)
    for op in entry.waiters:
        if event.pod is None:
            _no(state, op, "request", "there is no such pod")
            continue
        state.pods[event.uid] = event.pod
        namespace, _, name = entry.ref.partition("/")
        asked = ClaimAsked(op, event.uid, namespace, name, entry.kube_node, entry.cause)
        _decide(state, asked, event.pod)


def on_pod_look_failed(state: State, entry: Entry, text: str) -> None:
    """The API server did not tell about the pod: the asker has to come again."""
    for op in entry.waiters:
        _later(state, op, text)
    state.drop(entry)


def _decide(state: State, event: ClaimAsked, pod: PodRecord) -> None:
    entry = state.book.get(event.uid)
    if pod.is_over or pod.deleting_since is not None:
        _no(state, event.op, "request", "the pod is over or being deleted")
        return
    if pod.node and pod.node != event.kube_node:
        _no(state, event.op, "claimed_elsewhere", f"the pod is bound to {pod.node}")
        return
    slurm_node = state.slurm_of.get(event.kube_node, "")
    if not slurm_node:
        _no(state, event.op, "unknown_node", f"{event.kube_node} is not a node of the pool")
        return
    if entry is not None:
        _again(state, event, entry)
        return
    ask = resolve(pod, state.settings.policy)
    if isinstance(ask, Refusal):
        _no(state, event.op, ask.reason, ask.text)
        return
    if state.is_stale:
        _later(state, event.op, "Slurm has not been readable for a while")
        return
    if not pod.node and (why := _judge(state, event.uid, event.kube_node, ask)):
        _no(state, event.op, why, ABOUT[why].text)
        return
    request = ClaimRequest(
        ClaimId(state.settings.policy.cluster, event.uid), pod.ref, slurm_node, ask
    )
    new = Entry(
        uid=event.uid,
        ref=pod.ref,
        kube_node=event.kube_node,
        slurm_node=slurm_node,
        phase=Phase.ASKING,
        since=state.now,
        request=request,
        gpus=asked_gpus(pod),
        waiters=[event.op],
        cause=event.cause,
    )
    state.book[event.uid] = new
    state.touch(slurm_node)
    if _must_queue(state, ask):
        state.out.append(Queue(event.uid, request, event.cause))
    else:
        state.out.append(Allocate(event.uid, request, event.cause))


def _again(state: State, event: ClaimAsked, entry: Entry) -> None:
    """The pod has an entry already."""
    if entry.kube_node != event.kube_node:
        _no(state, event.op, "claimed_elsewhere", f"its claim is on {entry.kube_node}")
    elif entry.phase in (Phase.HELD, Phase.BOUND) and entry.claim is not None:
        if entry.phase is Phase.HELD:
            entry.since = state.now
        _yes(state, event.op, entry)
    elif entry.phase is Phase.ASKING:
        entry.waiters.append(event.op)
    elif entry.phase in (Phase.DOUBT, Phase.QUEUED, Phase.COVERING):
        _later(state, event.op, f"the pod's claim is {entry.phase}")
    else:
        _no(state, event.op, "ending", f"the pod's last claim is {entry.phase}")


def _judge(state: State, uid: str, kube_node: str, ask: Ask) -> Reason | None:
    """Why the node is no place for the pod, in the newest view; None if it is."""
    publish.refresh(state)
    node_view = state.views.get(kube_node)
    if node_view is None:
        return Reason.UNKNOWN_NODE
    alone = View(state.term, 0, 0.0, 0.0, {kube_node: node_view})
    codes = judge(
        ask,
        uid,
        compile_view(alone),
        np.zeros(1, np.int32),
        state.now,
        horizon_minutes=state.settings.policy.plan_horizon_minutes,
    )
    return REASONS[int(codes[0])]


def _must_queue(state: State, ask: Ask) -> bool:
    if state.snapshot is None:
        return False
    parameters = state.snapshot.config.scheduler_parameters
    return "defer" in parameters or ask.mode == "queued"


def on_allocated(state: State, event: Allocated) -> None:
    """Slurm granted: the claim is held, and the askers may bind."""
    entry = state.book.get(event.uid)
    if entry is None:
        # Nobody waits for it any more (the pod went away meanwhile): the sweep would find it, but
        # giving it back now is quicker.
        release.end(state, event.claim.id, event.claim.job_id, "its pod is gone")
        return
    entry.claim = event.claim
    entry.job_id = event.claim.job_id
    entry.gpus = event.claim.gpus
    pod = state.pods.get(event.uid)
    entry.move(Phase.BOUND if pod and pod.node else Phase.HELD, state.now)
    state.held_changed = True
    state.touch(entry.slurm_node)
    publish.refresh(state)
    for op in entry.waiters:
        _yes(state, op, entry)
    entry.waiters.clear()
    if pod is None or pod.is_over:
        release.end_entry(state, entry, "its pod is over")


def on_allocate_refused(state: State, event: AllocateRefused) -> None:
    """Slurm said no: nothing is held, the pod goes back to the scheduler."""
    entry = state.book.get(event.uid)
    if entry is None or entry.phase not in (Phase.ASKING, Phase.DOUBT, Phase.QUEUED):
        return
    for op in entry.waiters:
        _no(state, op, event.reason, event.text)
    state.drop(entry)


def on_allocate_unknown(state: State, event: AllocateUnknown) -> None:
    """No clear answer. The claim may exist: the next readings of slurmctld will tell."""
    entry = state.book.get(event.uid)
    if entry is None:
        return
    entry.job_id = event.job_id
    entry.move(Phase.DOUBT, state.now)
    for op in entry.waiters:
        _later(state, op, f"Slurm gave no clear answer: {event.text}")
    entry.waiters.clear()


def on_queued(state: State, event: Queued) -> None:
    """A placeholder stands in Slurm's queue; the pod is bound once it runs."""
    entry = state.book.get(event.uid)
    if entry is None:
        release.end(
            state, ClaimId(state.settings.policy.cluster, event.uid), event.job_id, "pod is gone"
        )
        return
    entry.job_id = event.job_id
    entry.move(Phase.QUEUED, state.now)
    for op in entry.waiters:
        _later(state, op, f"waits in Slurm's queue as job {event.job_id}")
    entry.waiters.clear()


def on_unbound_released(state: State, event: UnboundReleased) -> None:
    """The extender will not bind with this claim. If the pod is not bound, give it back."""
    entry = state.book.get(event.uid)
    pod = state.pods.get(event.uid)
    if entry is None or entry.job_id != event.job_id or entry.phase is not Phase.HELD:
        return
    if pod is None or not pod.node:
        release.end_entry(state, entry, "the Binding was refused")


def _yes(state: State, op: int, entry: Entry) -> None:
    assert entry.claim is not None  # noqa: S101 - the phases that lead here always have one
    indices = entry.claim.gpus.indices
    gpus = "" if indices is None else format_indices(indices)
    state.out.append(Reply(op, job_id=entry.claim.job_id, gpus=gpus))


def _no(state: State, op: int, reason: str, text: str) -> None:
    state.out.append(Reply(op, reason=reason, text=text))


def _later(state: State, op: int, text: str) -> None:
    state.out.append(Reply(op, reason="unavailable", text=text, unavailable=True))
