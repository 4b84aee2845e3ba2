"""Node state between the two sides, without an echo.

Kubernetes to Slurm: a node that is cordoned, or not Ready for a while, is drained in Slurm with a
reason of ours; when it is well again, and has been for a while, a drain of ours is taken back. A
drain of anybody else is his (`slurmbridge.pool.drain`).

Slurm to Kubernetes: the node's state in Slurm becomes the condition `SlurmReady` and a part of the
annotation `slurmbridge.dev/pool`. Never a cordon or a taint: that would come back as a drain, and
after it neither side could tell who began.

What we have done stands in Slurm (the reason) and in Kubernetes (the condition), so a bridge that
starts anew goes on where the last one stopped. The decisions about one node are in `nodewatch`;
here is what concerns all of them: the budget, and patience with nodes that flap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slurmbridge.core.action import DrainNode, ResumeNode, ShowNode, Tell
from slurmbridge.core.nodewatch import (
    FLAP_S,
    Pair,
    condition_of,
    most_silent,
    patience_s,
    wish_of,
)
from slurmbridge.core.state import State
from slurmbridge.pool.drain import NOT_READY, may_drain, may_resume, write_reason
from slurmbridge.pool.record import KubeNode

LOOK_S: Final = 1.0
AGAIN_S: Final = 10.0
"""What was asked for and is not seen in Slurm is asked for again after this."""
MOST_AGAIN_S: Final = 600.0
"""Each time twice as long, up to this: an order that Slurm refuses must not use up the budget."""
TELL_AGAIN_S: Final = 300.0
SETTLED_S: Final = 3.0
"""A state in Slurm is shown once it has held for so long: jobs come and go in less."""
MOST_SHOWN: Final = 50
"""Conditions written at a look: each wakes the pods that kube-scheduler holds back."""


def run(state: State) -> None:
    """Look at all nodes of the pool: after a reading or a cordon, once a second at most."""
    watch = state.nodes
    if state.snapshot is None or state.is_stale or not state.nodes_listed:
        return
    if state.now - watch.looked_at < LOOK_S:
        return
    if not watch.is_due and watch.read_at == state.snapshot.began:
        return
    watch.looked_at, watch.read_at, watch.is_due = state.now, state.snapshot.began, False
    pairs = list(_pairs(state))
    _drain_and_resume(state, pairs)
    if state.settings.node_sync.condition:
        _show(state)


def slurm_names(state: State, kube_node: str) -> tuple[str, ...]:
    """The Slurm nodes of a Kubernetes node, mostly one."""
    several = state.several.get(kube_node)
    if several is not None:
        return several
    name = state.slurm_of.get(kube_node, "")
    return (name,) if name else ()


def _pairs(state: State) -> Iterator[Pair]:
    assert state.snapshot is not None  # noqa: S101 - `run` has looked
    nodes = state.snapshot.nodes
    for kube_name in (*state.slurm_of, *state.several):
        kube = state.kube_nodes.get(kube_name)
        if kube is None:
            continue
        for name in slurm_names(state, kube_name):
            if (slurm := nodes.get(name)) is not None:
                yield Pair(kube, slurm)


def _drain_and_resume(state: State, pairs: list[Pair]) -> None:
    sync, watch, now = state.settings.node_sync, state.nodes, state.now
    cluster = state.settings.policy.cluster
    watch.minute = [at for at in watch.minute if now - at < 60]
    names = {pair.slurm.name for pair in pairs}
    watch.well = {name: at for name, at in watch.well.items() if name in names}
    limit = most_silent(sync, len(names))
    silent: list[Pair] = []
    wanted: list[tuple[Pair, str]] = []
    ours: list[str] = []
    for pair in pairs:
        quiet_s = _silent_s(state, pair.kube)
        why = wish_of(pair, sync, quiet_s)
        is_ours = may_resume(pair.slurm, cluster)
        if is_ours:
            ours.append(pair.slurm.name)
        if quiet_s and (is_ours or may_drain(pair.slurm)) and not pair.kube.unschedulable:
            silent.append(pair)
        if not (may_drain(pair.slurm) if why else is_ours):
            watch.tries.pop(pair.slurm.name, None)
        if why:
            watch.well.pop(pair.slurm.name, None)
            if may_drain(pair.slurm):
                wanted.append((pair, why))
        elif is_ours:
            _resume(state, pair)
    # All that are silent count, not only those whose time is over: when the API server or the
    # network is in trouble they fall silent together, and the first of them must not be drained.
    too_many = len(silent) > limit
    held: list[str] = []
    for pair, why in wanted:
        if (why == NOT_READY and too_many) or len(watch.minute) >= sync.per_minute:
            held.append(pair.slurm.name)
        elif not _was_asked(state, pair.slurm.name, is_drain=True):
            _drain(state, pair, why)
    watch.held, watch.ours = tuple(held), tuple(ours)


def _silent_s(state: State, kube: KubeNode) -> float:
    """Seconds since a node was last Ready; at least a moment when it is not.

    By our own clock where we saw it happen; what Kubernetes says counts for what was before.
    """
    silent = state.nodes.silent
    if kube.ready:
        silent[kube.name] = float("inf")
        return 0.0
    since, told = silent.get(kube.name), kube.ready_changed or 0.0
    if told:
        told += state.now - state.wall  # as our clock, which does not step, would have said
    if since is None:
        since = told or state.now
    elif since < told <= state.now:
        since = told  # Ready for a moment that we have not seen
    silent[kube.name] = since = min(since, state.now)
    return max(0.001, state.now - since)


def _was_asked(state: State, slurm_node: str, *, is_drain: bool) -> bool:
    """Whether the last order may not be in the reading yet."""
    at = state.nodes.asked.get(slurm_node)
    if at is None or state.snapshot is None:
        return False
    was_drain, tries = state.nodes.tries.get(slurm_node, (is_drain, 1))
    again_s = AGAIN_S * 2.0 ** min(tries - 1, 20) if was_drain is is_drain else AGAIN_S
    return state.snapshot.began <= at or state.now - at < min(again_s, MOST_AGAIN_S)


def _drain(state: State, pair: Pair, why: str) -> None:
    watch, name = state.nodes, pair.slurm.name
    is_first = _ask(state, name, is_drain=True)
    watch.minute.append(state.now)
    past = [at for at in watch.drains.get(name, ()) if state.now - at < FLAP_S]
    if is_first:  # an order that was not carried out is no second drain
        past.append(state.now)
    watch.drains[name] = past
    reason = write_reason(state.settings.policy.cluster, pair.kube.name, why)
    state.out.append(DrainNode(name, reason))
    _tell(state, pair.kube, "SlurmDrained", f"Slurm node {name} is being drained: {why}")


def _ask(state: State, slurm_node: str, *, is_drain: bool) -> bool:
    """Note what is asked for; whether for the first time since it last came true."""
    watch = state.nodes
    watch.asked[slurm_node] = state.now
    was_drain, tries = watch.tries.get(slurm_node, (is_drain, 0))
    tries = tries + 1 if was_drain is is_drain else 1
    watch.tries[slurm_node] = is_drain, tries
    return tries == 1


def prune(state: State) -> None:
    """Forget what nobody asks about any more: nodes that are deleted, orders of long ago."""
    watch, kube, long_ago = state.nodes, state.kube_nodes, state.now - FLAP_S
    watch.silent = {n: at for n, at in watch.silent.items() if n in kube}
    watch.seen = {n: seen for n, seen in watch.seen.items() if n in kube}
    watch.shown = {n: shown for n, shown in watch.shown.items() if n in kube}
    watch.asked = {n: at for n, at in watch.asked.items() if at > long_ago}
    watch.tries = {n: tries for n, tries in watch.tries.items() if n in watch.asked}
    watch.drains = {n: ats for n, ats in watch.drains.items() if any(at > long_ago for at in ats)}


def _resume(state: State, pair: Pair) -> None:
    watch, name = state.nodes, pair.slurm.name
    since = watch.well.setdefault(name, state.now)
    wait = patience_s(state.settings.node_sync, watch.drains.get(name, ()), state.now)
    if state.now - since < wait or _was_asked(state, name, is_drain=False):
        return
    _ask(state, name, is_drain=False)
    state.out.append(ResumeNode(name, state.settings.policy.cluster))
    _tell(state, pair.kube, "SlurmResumed", f"Slurm node {name}: our drain is being taken back")


def _tell(state: State, kube: KubeNode, reason: str, text: str) -> None:
    if state.once(reason, kube.name, TELL_AGAIN_S):
        state.out.append(Tell("", kube.name, kube.uid, reason, text))


def _show(state: State) -> None:
    """Bring the condition of each node up to date, a few at a time."""
    assert state.snapshot is not None  # noqa: S101 - `run` has looked
    watch, cluster, left = state.nodes, state.settings.policy.cluster, MOST_SHOWN
    for kube_name in (*state.slurm_of, *state.several):
        kube = state.kube_nodes.get(kube_name)
        if kube is None:
            watch.seen.pop(kube_name, None)
            continue
        found = [
            condition_of(state.snapshot.nodes.get(name), name, cluster)
            for name in slurm_names(state, kube_name)
        ]
        now_so = next((shown for shown in found if shown.status == "False"), found[0])
        if watch.seen.get(kube_name, (None, 0.0))[0] != now_so:
            watch.seen[kube_name] = (now_so, state.now)
        if kube.slurm_ready == now_so or state.now - watch.seen[kube_name][1] < SETTLED_S:
            continue
        last = watch.shown.get(kube_name)
        if last is not None and last[0] == now_so and state.now - last[1] < AGAIN_S:
            continue
        if left <= 0:
            return
        left -= 1
        watch.shown[kube_name] = (now_so, state.now)
        state.out.append(ShowNode(kube_name, *now_so, state.wall))
