"""Pods that have lost their claims: told, and evicted within a budget.

Losing many claims at once is more likely a fault of ours or of Slurm's (a reconfigure, a restored
old state) than the truth: then the breaker opens, and a person decides.
"""

from __future__ import annotations

from slurmbridge.core.action import AnnotatePod, Evict, Tell
from slurmbridge.core.event import BreakerAnswered, Evicted
from slurmbridge.core.state import Entry, Phase, State
from slurmbridge.pool import keys
from slurmbridge.pool.record import PodRecord

WINDOW_S = 60.0
CONFIRMED_S = 600.0
EVICT_AGAIN_S = 20.0


def tell_lost(state: State, entry: Entry, pod: PodRecord) -> None:
    """Write the reason on the pod, then evict as the budget allows."""
    state.out.append(
        AnnotatePod(pod.uid, pod.namespace, pod.name, {keys.REASON: f"claim lost: {entry.why}"})
    )
    state.out.append(Tell(pod.namespace, pod.name, pod.uid, "ClaimLost", entry.why, warning=True))
    run(state)


def run(state: State) -> None:
    """Evict the pods of lost claims, oldest loss first."""
    lost = sorted(
        (e for e in state.book.values() if e.phase is Phase.LOST and _has_to_go(state, e)),
        key=lambda e: e.since,
    )
    if not lost:
        return
    _watch_breaker(state, len(lost))
    if state.breaker_since is not None and not _is_confirmed(state):
        return
    state.evictions = [t for t in state.evictions if state.now - t < WINDOW_S]
    for entry in lost:
        if len(state.evictions) >= state.settings.eviction.per_minute:
            return
        if entry.evicted_at is not None and state.now - entry.evicted_at < EVICT_AGAIN_S:
            continue
        pod = state.pods[entry.uid]
        if entry.evicted_at is None:
            state.evictions.append(state.now)
        entry.evicted_at = state.now
        state.out.append(Evict(pod.uid, pod.namespace, pod.name, pod.grace_s, entry.why))


def _has_to_go(state: State, entry: Entry) -> bool:
    pod = state.pods.get(entry.uid)
    if pod is None or pod.is_over or pod.deleting_since is not None:
        return False
    return not entry.stray or state.settings.policy.stray == "evict"


def _watch_breaker(state: State, lost: int) -> None:
    bound = sum(1 for e in state.book.values() if e.phase in (Phase.BOUND, Phase.LOST))
    budget = state.settings.eviction
    new = sum(1 for e in state.book.values() if e.phase is Phase.LOST and e.evicted_at is None)
    if state.breaker_since is None:
        if new > max(budget.at_least, budget.share * bound) and not _is_confirmed(state):
            state.breaker_since = state.now
    elif not lost:
        state.breaker_since = None


def _is_confirmed(state: State) -> bool:
    return state.breaker_confirmed is not None and state.now - state.breaker_confirmed < CONFIRMED_S


def on_evicted(state: State, event: Evicted) -> None:
    """The API server has taken it; the pod's own grace runs."""
    entry = state.book.get(event.uid)
    if entry is not None:
        entry.evicted_at = state.now


def on_breaker_answered(state: State, event: BreakerAnswered) -> None:
    """Go on with the evictions, or look at every lost claim again."""
    state.breaker_since = None
    if event.confirm:
        state.breaker_confirmed = state.now
        run(state)
        return
    for entry in state.book.values():
        if entry.phase is Phase.LOST and entry.evicted_at is None and entry.job_id:
            entry.move(Phase.BOUND, state.now)
