"""What is learnt of pods: by the watch, by lists, by targeted looks."""

from __future__ import annotations

from slurmbridge.core import (
    agents,
    cover,
    gang,
    grant,
    lift,
    nodes,
    planned,
    release,
    settle,
    sweep,
)
from slurmbridge.core.action import LookPod
from slurmbridge.core.event import PodGone, PodLooked
from slurmbridge.core.state import Gone, Missed, Phase, State
from slurmbridge.pool.record import PodRecord

FORGET_GONE_S = 600.0
"""How long a deleted pod is remembered: longer than any look at it may be under way."""
MOST_LOOKS = 100
"""Pods that a list did not show are asked about so many at a time."""


def see(state: State, pod: PodRecord) -> None:
    """A pod as it is. Only those that ask for pool GPUs, or wrongly so, are ours to know."""
    known = state.pods.get(pod.uid)
    if known is not None and _is_older(pod, known):
        return  # the answer to a look was overtaken by the watch
    state.missed.pop(pod.uid, None)
    if pod.uid in state.gone:
        return
    pod = planned.as_gang(state, pod)
    if pod.gpu is None and not pod.fault:
        state.pods.pop(pod.uid, None)
        gang.see_other(state, pod)
        lift.see_plain(state, pod)
        return
    state.pods[pod.uid] = pod
    if pod.is_over:
        release.on_pod_over(state, pod)
        return
    entry = state.book.get(pod.uid)
    if pod.node:
        state.woken.pop(pod.uid, None)
        state.waiting.forget(pod.uid)
        state.loose.add(pod.uid)
        if entry is None:
            return
        if entry.phase is Phase.HELD:
            settle.meet(state, entry)
        elif entry.phase is Phase.LINGERING:
            release.on_pod_back(state, entry, pod)
        elif entry.phase in (Phase.ASKING, Phase.DOUBT):
            # Bound with an earlier claim, which has ended meanwhile: `cover` goes on with that.
            state.drop(entry)
        elif entry.phase is Phase.QUEUED or (
            entry.phase is Phase.COVERING and pod.node != entry.kube_node
        ):
            release.end_entry(state, entry, f"the pod was bound to {pod.node}")
    elif (
        entry is not None
        and entry.phase in (Phase.HELD, Phase.QUEUED)
        and pod.deleting_since is not None
    ):
        release.end_entry(state, entry, "the pod is being deleted")
    else:
        planned.on_pod(state, pod, known)


def _is_older(pod: PodRecord, known: PodRecord) -> bool:
    """Whether a record was overtaken: a pod is bound, deleted and over only once."""
    return (
        (bool(known.node) and not pod.node)
        or (known.is_over and not pod.is_over)
        or (known.deleting_since is not None and pod.deleting_since is None)
    )


def listed(state: State, pods: tuple[PodRecord, ...]) -> None:
    """All pods, as a list has them.

    A list can be wrong as a whole (an old state restored, another server): what uses or may use
    something and is not in it is there until a look at it has told. What it shows is there,
    whatever was said of it before; what it shows as it was before is looked at too.
    """
    there = {pod.uid for pod in pods}
    for uid in [u for u in state.pods if u not in there]:
        pod = state.pods[uid]
        if pod.is_over:
            vanish(state, pod, may_run=False)
        elif not pod.node and uid not in state.book:
            _forget(state, uid)  # perhaps the list is older than the look that has found it
        else:
            state.missed.setdefault(uid, Missed()).listed = state.now
    state.waiting.others.clear()
    state.waiting.plain.clear()
    for pod in pods:
        came_back = state.gone.pop(pod.uid, None) is not None
        known = state.pods.get(pod.uid)
        see(state, pod)
        if came_back and state.audited:
            cover.take_in_over(state, pod)
        if known is not None and _is_older(pod, known):
            state.missed.setdefault(pod.uid, Missed()).listed = state.now
    state.pods_listed = True


def _forget(state: State, uid: str) -> None:
    """Know nothing of a pod, not even that it is gone."""
    state.pods.pop(uid, None)
    state.missed.pop(uid, None)
    state.woken.pop(uid, None)
    state.waiting.forget(uid)


def tick(state: State) -> None:
    """Ask the API server for each pod that a list did not show."""
    due = [u for u, m in state.missed.items() if state.now - m.looked > release.LOOK_AGAIN_S]
    for uid in due[:MOST_LOOKS]:
        pod = state.pods.get(uid)
        if pod is None:
            del state.missed[uid]
        else:
            state.missed[uid].looked = state.now
            state.out.append(LookPod(uid, pod.namespace, pod.name))


def _is_really_gone(state: State, uid: str) -> None:
    """A look has not found a pod that a list did not show either.

    So many of them that the breaker is open stay where they are until a person has decided.
    """
    missed, pod, entry = state.missed.get(uid), state.pods.get(uid), state.book.get(uid)
    if missed is None or pod is None:
        return
    if entry is not None and state.breaker_since is not None and not missed.confirmed:
        return
    # Somebody was told to bind it: it may have been bound, and deleted by force, unseen.
    promised = entry is not None and entry.phase is Phase.HELD
    vanish(state, pod, may_run=not pod.is_over and (bool(pod.node) or promised))


def _went_back(state: State, known: PodRecord, pod: PodRecord) -> None:
    """A list and a look have shown a pod as it was before: the API server was set back.

    What was bound and is not any more runs on until its kubelet has seen that: as if it had been
    deleted by force.
    """
    missed, entry = state.missed[pod.uid], state.book.get(pod.uid)
    if entry is not None and state.breaker_since is not None and not missed.confirmed:
        return
    if known.node and not pod.node:
        vanish(state, known, may_run=not known.is_over)
        del state.gone[pod.uid]
    state.pods.pop(pod.uid, None)
    see(state, pod)


def on_gone(state: State, event: PodGone) -> None:
    """A pod object was deleted.

    An API server that was set back may not know by now that it was bound.
    """
    pod = event.pod
    known = state.pods.get(pod.uid)
    if known is not None and _is_older(pod, known):
        pod = known
    if pod.gpu is not None or pod.fault or pod.uid in state.book:
        vanish(state, pod, may_run=bool(pod.node) and not pod.is_over)
    else:
        gang.see_other(state, pod, is_gone=True)
        state.waiting.plain.pop(pod.uid, None)


def vanish(state: State, pod: PodRecord, *, may_run: bool) -> None:
    """Forget a pod; its claim has to stay for a while if processes of it may run."""
    state.gone[pod.uid] = Gone(state.now, may_run or release.may_be_left(state, pod))
    _forget(state, pod.uid)
    entry = state.book.get(pod.uid)
    if entry is not None and entry.phase is not Phase.LINGERING:
        release.on_pod_vanished(state, entry, pod, may_run=may_run)


def on_looked(state: State, event: PodLooked) -> None:
    """The answer to a targeted look. Another pod of the same name is not the one asked for."""
    pod = event.pod if event.pod is not None and event.pod.uid == event.uid else None
    known = state.pods.get(event.uid)
    if pod is not None and known and event.uid in state.missed and _is_older(pod, known):
        _went_back(state, known, pod)
        return
    if pod is not None:
        missed = state.missed.get(event.uid)
        see(state, pod)
        if missed is not None and missed.looked < missed.listed:
            state.missed[event.uid] = missed  # the look is older than the list
        pod = state.pods.get(event.uid, pod if event.uid not in state.gone else None)
    elif event.uid in state.missed:
        _is_really_gone(state, event.uid)
        if event.uid in state.missed:
            return
    entry = state.book.get(event.uid)
    if entry is None or entry.phase is Phase.DOUBT:
        if pod is None:
            sweep.on_no_pod(state, event.uid)
    elif entry.pod_looking is None:
        return
    elif entry.phase is Phase.ASKING:
        grant.on_pod_looked(state, entry, pod)
    elif pod is not None and entry.phase is Phase.HELD and planned.keeps(state, entry, pod):
        entry.pod_looking = None
    elif entry.phase in (Phase.HELD, Phase.QUEUED):
        release.on_hold_looked(state, entry, pod)


def prune(state: State) -> None:
    """Forget what nobody can ask about any more."""
    if state.now - state.pruned_at < 60:
        return
    state.pruned_at = state.now
    limit = state.now - FORGET_GONE_S
    state.gone = {u: g for u, g in state.gone.items() if g.at > limit}
    state.deleted = {n: t for n, t in state.deleted.items() if n not in state.kube_nodes}
    state.told = {k: t for k, t in state.told.items() if t > limit}
    agents.prune(state)
    nodes.prune(state)
    state.annotated = {n: v for n, v in state.annotated.items() if n in state.kube_nodes}
