"""The members of a gang are bound together, or none of them is.

With their gates off, kube-scheduler may still find that it cannot use one member's node (a volume,
a port, a rule that we do not know). It asks to bind a pod only after all that: so while nobody of a
gang may be bound yet, whoever asks to bind a member waits here until all members were asked for.
Then they are let through at once. If one is refused before that, the gang moves as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurmbridge.core import answer
from slurmbridge.core.state import Entry, Phase, State
from slurmbridge.core.waiting import Asker, GangState
from slurmbridge.pool.reason import Reason
from slurmbridge.pool.record import PodRecord

WAIT_S = 1.5
"""An asker is sent away after this, and comes again: with a tick's length it is within the time
that an extender waits. That the node can be used is remembered."""

BIND_S = 10.0
"""Longer than it takes anybody to bind what was promised."""


def has_begun(state: State, pod: PodRecord) -> bool:
    """Whether a member may be bound: it is, or somebody was told to bind it.

    The watch may be behind that, and the claim of a pod that is bound must stay.
    """
    entry = state.book.get(pod.uid)
    return bool(pod.node) or (entry is not None and entry.promised > 0)


def has_started(state: State, gang: GangState, pods: Iterable[PodRecord]) -> bool:
    """Whether a gang starts no more as a whole: a member has begun, or has run to its end."""
    return gang.ended > 0 or any(has_begun(state, pod) for pod in pods)


def may_come(state: State, pod: PodRecord) -> bool:
    """Whether a pod without a claim may be bound still, with one that it had."""
    return pod.uid not in state.book and pod.uid in state.waiting.bindable


def note(state: State, uid: str) -> None:
    """Somebody was told to bind a pod, or may have been by an earlier leader."""
    state.waiting.bindable[uid] = state.now + BIND_S


def tick(state: State) -> None:
    """What was promised long ago is not carried out any more."""
    waiting = state.waiting
    for uid in [uid for uid, until in waiting.bindable.items() if until <= state.now]:
        del waiting.bindable[uid]
        if (key := waiting.gang_of.get(uid)) is not None:
            waiting.gangs_due.add(key)


def gang_of(state: State, uid: str) -> GangState | None:
    """The gang of a pod that is planned with others; None: a single one."""
    return state.waiting.gangs.get(state.waiting.gang_of.get(uid, ""))


def join(state: State, op: int, entry: Entry) -> bool:
    """Whether an asker has to wait for the others; it is answered by `after_event` then."""
    if gang_of(state, entry.uid) is None:
        return False
    entry.is_wanted = True
    state.waiting.askers[op] = Asker(entry.uid, entry.kube_node, state.now)
    return True


def after_event(state: State) -> None:
    """Answer those who may bind now, and those who have waited for too long."""
    askers = state.waiting.askers
    is_open: dict[str, bool] = {}
    for op, asker in list(askers.items()):
        entry = state.book.get(asker.uid)
        if entry is None or entry.phase is not Phase.HELD or entry.kube_node != asker.kube_node:
            del askers[op]
            answer.no(state, op, Reason.NO_PLAN, "its gang is planned again")
            continue
        gang = gang_of(state, asker.uid)
        if gang is None or is_open.setdefault(gang.key, _may_start(state, gang)):
            del askers[op]
            answer.held(state, op, entry)
            if entry.promised:
                note(state, entry.uid)
        elif state.now - asker.since >= WAIT_S:
            del askers[op]
            answer.no(state, op, Reason.NO_PLAN, "not all members of its gang can be bound yet")


def _may_start(state: State, gang: GangState) -> bool:
    """Whether all that have claims were asked for, and so many that the gang is complete."""
    pods = [
        pod
        for uid in gang.members
        if (pod := state.pods.get(uid)) is not None
        and not pod.is_over
        and pod.deleting_since is None
    ]
    if has_started(state, gang, pods):
        return True
    entries = [entry for pod in pods if (entry := state.book.get(pod.uid)) is not None]
    ready = [e for e in entries if e.phase is Phase.HELD and e.is_wanted and not e.is_useless]
    if gang.size is None or len(ready) < len(entries):
        return False
    return len(ready) >= gang.size - len(state.waiting.others.get(gang.key, ()))


def is_decided(gang: GangState, held: list[Entry], now: float) -> bool:
    """Whether what kube-scheduler thinks of all members is known, or was waited for."""
    return now - gang.useless_at >= WAIT_S or all(e.is_useless or e.is_wanted for e in held)
