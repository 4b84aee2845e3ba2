"""Pods that have lost their claims, or their gang's place in the queue: evicted within a budget.

Losing many claims at once is more likely a fault of ours or of Slurm's (a reconfigure, a restored
old state) than the truth: then the breaker opens, and a person decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slurmbridge.core.action import AnnotatePod, Evict, Tell
from slurmbridge.core.event import Evicted
from slurmbridge.core.state import Entry, Eviction, Phase, State
from slurmbridge.core.waiting import Cancel
from slurmbridge.pool import keys
from slurmbridge.pool.record import PodRecord

WINDOW_S = 60.0
EVICT_AGAIN_S = 20.0


def lose(state: State, entry: Entry, pod: PodRecord, why: str, *, is_own_end: bool = False) -> None:
    """The pod has no claim and gets none: write the reason on it; `run` evicts it.

    Not at once: the losses that one reading brings to light come in one by one, and only together
    do they show whether the breaker has to open.

    The members of a gang that were let go together go together: what is left of it could do nothing
    but wait for the others. A pod that only says that it is one of them is none.

    is_own_end: the time that the pod itself has named is over. That is as certain as a person's
    word: it says nothing about other losses, and waits for nobody.
    """
    _lose_one(state, entry, pod, why)
    entry.confirmed = is_own_end
    if entry.stray or pod.deleting_since is not None:
        return  # of a gang that ends anyway; a new one may have its name by now
    for mate in _may_go_too(state, entry, pod):
        other = state.pods.get(mate.uid)
        if mate is entry or other is None or mate.phase is not Phase.BOUND:
            continue
        if mate.group and mate.job_id == entry.job_id:
            _lose_one(state, mate, other, why)
        elif not _are_together(pod, other):
            continue
        else:
            _lose_one(state, mate, other, f"its gang is ended, since {pod.name} lost its claim")
            mate.with_gang = entry.uid
        mate.confirmed = is_own_end


def _may_go_too(state: State, entry: Entry, pod: PodRecord) -> list[Entry]:
    """Who lives in the same claim of a gang, or says that it is of the same gang."""
    uids = set(state.sharing.get(entry.group, ()))
    if pod.group is not None:
        uids |= {other.uid for other in state.pods_of_group(pod.group.key)}
    return [state.book[uid] for uid in sorted(uids) if uid in state.book]


def _are_together(pod: PodRecord, other: PodRecord) -> bool:
    """Whether two members of a gang were let go together."""
    if pod.group is None or other.group is None or pod.group.key != other.group.key:
        return False
    together = pod.annotations.get(keys.TOGETHER, "")
    return bool(together) and together == other.annotations.get(keys.TOGETHER)


def _lose_one(state: State, entry: Entry, pod: PodRecord, why: str) -> None:
    entry.why, entry.with_gang = why, ""
    state.move(entry, Phase.LOST)
    note = {keys.REASON: f"claim lost: {why}"}
    state.out.append(AnnotatePod(pod.uid, pod.namespace, pod.name, note))
    state.out.append(Tell(pod.namespace, pod.name, pod.uid, "ClaimLost", why, warning=True))


def goes_with_gang(state: State, entry: Entry) -> bool:
    """Whether a pod has to go since another member of its gang has to, or has gone."""
    if not entry.with_gang:
        return False
    first = state.book.get(entry.with_gang)
    return first is None or first.phase is not Phase.BOUND


def lose_stray(state: State, entry: Entry, pod: PodRecord, why: str) -> None:
    """A pod that we never let in cannot be covered: policy says what becomes of it."""
    if state.settings.policy.stray == "evict":
        lose(state, entry, pod, why)
        return
    entry.why = why
    state.move(entry, Phase.LOST)
    if state.once("stray", pod.uid, 300):
        text = f"holds GPUs without a Slurm allocation: {why}"
        state.out.append(Tell(pod.namespace, pod.name, pod.uid, "Stray", text, warning=True))


def unlose(state: State, entry: Entry, pod: PodRecord) -> None:
    """It was not so: take the reason off the pod again."""
    entry.why, entry.with_gang, entry.evicted_at = "", "", None
    if keys.REASON in pod.annotations:
        state.out.append(AnnotatePod(pod.uid, pod.namespace, pod.name, {keys.REASON: None}))


class _Case(NamedTuple):
    """A pod that has to go. of: what says so. loss: the claim that it goes for."""

    of: Entry | Cancel
    pod: PodRecord
    loss: str
    evicted_at: float | None


def run(state: State) -> None:
    """Evict the pods of lost claims and of places that were cancelled, oldest loss first."""
    cases = sorted([*_lost(state), *_cancelled(state)], key=lambda case: case.of.since)
    state.evictions = [e for e in state.evictions if state.now - e.at < WINDOW_S]
    begun = {e.loss for e in state.evictions}
    _watch_breaker(state, cases)
    for case in cases:
        if state.breaker_since is not None and not case.of.confirmed:
            continue
        if case.evicted_at is None:
            # A gang that goes is one loss: once the first of its pods has gone, all do.
            if case.loss not in begun and len(begun) >= state.settings.eviction.per_minute:
                continue
            begun.add(case.loss)
            state.evictions.append(Eviction(state.now, case.loss, case.of.confirmed))
        elif state.now - case.evicted_at < EVICT_AGAIN_S:
            continue
        pod = case.pod
        if isinstance(case.of, Entry):
            case.of.evicted_at = state.now
        else:
            case.of.evicted[pod.uid] = state.now
            tell_cancelled(state, pod, case.of.why)  # a pod behind a gate is gone at once
        state.out.append(Evict(pod.uid, pod.namespace, pod.name, pod.grace_s, case.of.why))


def tell_cancelled(state: State, pod: PodRecord, why: str) -> None:
    """Why a pod of a cancelled gang goes, or is to go when a person has confirmed it."""
    if state.once("cancelled", pod.uid, 300):
        told = Tell(pod.namespace, pod.name, pod.uid, "ClaimCancelled", why, warning=True)
        state.out.append(told)


def _lost(state: State) -> Iterator[_Case]:
    for entry in state.book.values():
        if entry.phase is Phase.LOST and _has_to_go(state, entry):
            pod = state.pods[entry.uid]
            yield _Case(entry, pod, _loss(state, entry), entry.evicted_at)


def _cancelled(state: State) -> Iterator[_Case]:
    """Whoever cancels the job of a gang that waits means the work."""
    for gang in state.waiting.gangs.values():
        cancel = gang.cancelled
        for uid in () if cancel is None else sorted(cancel.pods):
            pod = state.pods.get(uid)
            if cancel and pod and not (pod.node or pod.is_over or pod.deleting_since is not None):
                yield _Case(cancel, pod, gang.uid, cancel.evicted.get(uid))


def is_on_its_way(state: State, entry: Entry) -> bool:
    """Whether a pod is being deleted, or was asked to be a moment ago: too late to keep it."""
    pod = state.pods.get(entry.uid)
    if pod is None or pod.deleting_since is not None:
        return True
    return entry.evicted_at is not None and state.now - entry.evicted_at < EVICT_AGAIN_S


def _has_to_go(state: State, entry: Entry) -> bool:
    pod = state.pods.get(entry.uid)
    if pod is None or pod.is_over or pod.deleting_since is not None or pod.is_static:
        return False
    return not entry.stray or state.settings.policy.stray == "evict"


def _watch_breaker(state: State, cases: list[_Case]) -> None:
    """Open when too many have lost their claims, or may have; close when all was settled.

    Those count that are to be evicted, that were within the last minute, and whose claims a reading
    did not show, until a second look has told; so do those whose pods a list did not show, and
    places of gangs in the queue as claims do. A gang that goes as a whole is one loss. Losses that
    a person has confirmed do not count: the next mass loss is another one.
    """
    tickets = state.waiting.tickets.values()
    doubted = {
        _loss(state, e)
        for e in state.book.values()
        if (e.phase is Phase.BOUND and e.suspect) or (e.phase is Phase.COVERING and not e.stray)
    }
    doubted |= {ticket.uid for ticket in tickets if ticket.suspect}
    for uid, missed in state.missed.items():
        if (entry := state.book.get(uid)) is not None and not missed.confirmed:
            doubted.add(_loss(state, entry))
    to_go = {c.loss for c in cases if c.evicted_at is None and not c.of.confirmed}
    if state.breaker_since is not None:
        if not to_go and not doubted:
            state.breaker_since = None
        return
    budget = state.settings.eviction
    held = {e.claim_uid for e in state.book.values() if e.phase in _ON_NODE}
    held |= {ticket.uid for ticket in tickets}
    held |= {gang.uid for gang in state.waiting.gangs.values() if gang.cancelled}
    # What a person has confirmed counts for the rate, and not as a loss any more.
    gone = {e.loss for e in state.evictions if not e.confirmed}
    missing = len(to_go | doubted | gone)
    if missing > max(budget.at_least, budget.share * len(held)):
        state.breaker_since = state.now


def _loss(state: State, entry: Entry) -> str:
    """Which loss a pod goes for: that of its claim, or of the member that takes it along."""
    first = state.book.get(entry.with_gang)
    return entry.with_gang or entry.claim_uid if first is None else first.claim_uid


_ON_NODE = (Phase.BOUND, Phase.LOST, Phase.COVERING)


def on_evicted(state: State, event: Evicted) -> None:
    """The API server has taken it; the pod's own grace runs."""
    entry = state.book.get(event.uid)
    if entry is not None and entry.evicted_at is not None:
        entry.evicted_at = state.now


def confirm(state: State) -> None:
    """A person says that the losses known by now are real: go on with them, within the budget."""
    state.breaker_since = None
    for case in (*_lost(state), *_cancelled(state)):
        case.of.confirmed = True
    for missed in state.missed.values():
        missed.confirmed = True
    run(state)


def dismissed(state: State) -> list[Entry]:
    """A person says that the pods are to stay: those that have lost their claims, to be covered.

    Gangs whose places were cancelled ask for new ones.
    """
    state.breaker_since = None
    state.missed.clear()
    for gang in state.waiting.gangs.values():
        if gang.cancelled is not None and not gang.cancelled.evicted:
            gang.cancelled = None
            state.waiting.gangs_due.add(gang.key)
    return [
        entry
        for entry in state.book.values()
        if entry.phase is Phase.LOST
        and entry.evicted_at is None
        and not entry.stray
        and entry.request is not None
    ]


def cancelled(state: State) -> list[str]:
    """Pods of cancelled gangs that have to go still, `namespace/name`."""
    return [case.pod.ref for case in _cancelled(state)]
