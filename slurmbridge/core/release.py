"""The end of a pod: when its claim is given back to Slurm, and when not yet."""

from __future__ import annotations

from slurmbridge.core.action import End, LookPod, Tell
from slurmbridge.core.event import Ended, PodGone, PodLooked
from slurmbridge.core.state import Entry, Phase, State
from slurmbridge.pool.claim import ClaimId
from slurmbridge.pool.record import PodRecord


def end(state: State, claim_id: ClaimId, job_id: int, why: str) -> None:
    """Ask for the end of a claim that is in no entry."""
    state.out.append(End(claim_id, job_id, why))


def end_entry(state: State, entry: Entry, why: str) -> None:
    """Give an entry's claim back; the entry stays until Slurm no longer holds it."""
    if entry.phase is Phase.ASKING:
        return  # the answer is still to come: on_allocated ends it then
    if not entry.job_id:
        state.drop(entry)
        return
    if entry.phase is not Phase.ENDING:
        entry.move(Phase.ENDING, state.now)
        entry.why = why
    entry.ended_at = None
    end(state, ClaimId(state.settings.policy.cluster, entry.uid), entry.job_id, why)
    state.held_changed = True
    state.touch(entry.slurm_node)


def on_pod_over(state: State, pod: PodRecord) -> None:
    """Its containers have ended for good (phase Succeeded or Failed)."""
    entry = state.book.get(pod.uid)
    if entry is None:
        return
    if entry.phase is Phase.LOST:
        finish_lost(state, entry)
    elif entry.phase is not Phase.ENDING:
        end_entry(state, entry, f"pod is {pod.phase}")


def on_pod_gone(state: State, event: PodGone) -> None:
    """The object is deleted. That alone does not prove that its processes are gone.

    kubelet sets a terminal phase before it takes the object away; an object that vanishes while
    the pod still counted as running was deleted by force (measured: processes lived on for 3 s).
    """
    pod = event.pod
    state.pods.pop(pod.uid, None)
    state.bound_since.pop(pod.uid, None)
    state.wake_after.pop(pod.uid, None)
    entry = state.book.get(pod.uid)
    if entry is None or entry.phase is Phase.ENDING:
        return
    if pod.is_over or not pod.node:
        if entry.phase is Phase.LOST:
            finish_lost(state, entry)
        else:
            end_entry(state, entry, "pod is deleted")
        return
    if entry.phase is Phase.LOST and not entry.job_id:
        pass
    hold = max(state.settings.linger_s, float(pod.grace_s))
    entry.linger_until = state.now + hold
    entry.move(Phase.LINGERING, state.now)
    entry.why = "pod was deleted by force; its processes may still run"


def finish_lost(state: State, entry: Entry) -> None:
    """The pod of a lost claim is gone: end what may be left of the job, and forget."""
    if entry.job_id:
        end_entry(state, entry, "its pod is gone")
    else:
        state.drop(entry)


def on_ended(state: State, event: Ended) -> None:
    """Slurm has taken the cancel (or has no such claim). Gone is gone only once a reading says so.

    The reading has to be younger than the cancel; `settle_ending` looks.
    """
    entry = state.book.get(event.uid)
    state.orphans.pop(event.job_id, None)
    if entry is not None and entry.phase is Phase.ENDING and entry.job_id == event.job_id:
        entry.ended_at = state.now
        state.touch(entry.slurm_node)


def settle_ending(state: State, entry: Entry) -> None:
    """Look at an ending claim after a reading of slurmctld."""
    snapshot = state.snapshot
    if snapshot is None:
        return
    job = snapshot.jobs.get(entry.job_id)
    owner = state.owner_of(job) if job is not None else None
    is_there = (
        job is not None
        and owner is not None
        and owner.uid == entry.uid
        and (job.state.holds_resources or job.state.base == "PENDING")
    )
    if not is_there:
        if entry.ended_at is not None and snapshot.began > entry.ended_at:
            state.drop(entry)
        elif entry.ended_at is None and snapshot.began > entry.since + state.settings.doubt_s:
            end_entry(state, entry, entry.why)
        return
    if job is not None and "COMPLETING" in job.state.flags:
        return
    if state.now - entry.since > state.settings.end_retry_s and snapshot.began > entry.since:
        entry.since = state.now
        end_entry(state, entry, entry.why)


def tick(state: State) -> None:
    """Unbound claims that nobody uses, and force-deleted pods whose time is over."""
    for entry in list(state.book.values()):
        if entry.phase is Phase.LINGERING:
            _settle_lingering(state, entry)
        elif (
            entry.phase in (Phase.HELD, Phase.QUEUED)
            and state.now - entry.since > state.settings.hold_s
            and (entry.pod_looking is None or state.now - entry.pod_looking > 10)
        ):
            namespace, _, name = entry.ref.partition("/")
            entry.pod_looking = state.now
            state.out.append(LookPod(entry.uid, namespace, name))


def _settle_lingering(state: State, entry: Entry) -> None:
    """A force-deleted pod: its node must be able to tell, or be gone, and its time over."""
    node = state.kube_nodes.get(entry.kube_node)
    if state.now < entry.linger_until:
        return
    if node is not None and not node.ready:
        if not entry.stray:
            entry.stray = True
            text = f"claim of {entry.ref} is kept: its pod was deleted while the node is not ready"
            state.out.append(Tell("", node.name, node.uid, "ClaimKept", text, warning=True))
        return
    finish_lost(state, entry)


def on_pod_looked_for_hold(state: State, entry: Entry, event: PodLooked) -> None:
    """An unbound claim was held for long: is the pod still waiting for it?"""
    entry.pod_looking = None
    pod = event.pod
    if pod is not None and pod.node:
        state.pods[pod.uid] = pod  # the watch missed it; the next event settles the rest
        if pod.node == entry.kube_node and entry.phase is Phase.HELD:
            entry.move(Phase.BOUND, state.now)
            state.held_changed = True
        return
    if entry.phase is Phase.QUEUED and pod is not None and not pod.is_over:
        entry.since = state.now
        return
    end_entry(state, entry, "the pod was not bound in time")
