"""A claim is held for a pod that nobody binds yet: its gate is taken off, or it is woken.

kube-scheduler then looks at one node (`status.nominatedNodeName`, KEP-5278), the extender's filter
admits only the claim's, and bind gets the claim that is there.
"""

from __future__ import annotations

from slurmbridge.core import wake
from slurmbridge.core.action import Lift
from slurmbridge.core.event import Lifted
from slurmbridge.core.evidence import write_share
from slurmbridge.core.state import Entry, Phase, State
from slurmbridge.pool import keys
from slurmbridge.pool.record import PodRecord

LIFT_AGAIN_S, RETRY_S = 20.0, 2.0
"""Not answered for so long: asked again. Answered with an error: after `RETRY_S`."""


def is_gated(pod: PodRecord) -> bool:
    """Whether our gate is all that keeps kube-scheduler from a pod."""
    return pod.gates == (keys.GATE,)


def on_held(state: State, entry: Entry) -> None:
    """A claim is held and nobody waits to bind it."""
    pod = state.pods.get(entry.uid)
    if pod is None or pod.node or pod.deleting_since is not None:
        return
    if pod.group is not None and (is_gated(pod) or _is_planned(state, entry, pod)):
        # All or none: `gang` lets all go with the last one's claim.
        entry.planned = True
        if is_gated(pod):
            entry.promised = 0
        state.waiting.gangs_due.add(pod.group.key)
        state.waiting.consider.add(pod.uid)
        return
    if is_gated(pod) or entry.uid in state.waiting.lifted:
        entry.planned = True
        if is_gated(pod):
            entry.promised = 0  # no extender has seen it yet
        lift(state, entry, pod)
    elif not pod.gates:
        # After a restart of the bridge the nomination tells that the gate was taken off for it.
        if pod.nominated and pod.nominated == entry.kube_node:
            entry.planned = True
            state.waiting.lifted.add(entry.uid)
        wake.one(state, entry.uid)


def _is_planned(state: State, entry: Entry, pod: PodRecord) -> bool:
    """Whether a pod of a group, without our gate, is claimed with the others.

    After a restart of the bridge the nomination tells that its gate was taken off for this claim.
    """
    if pod.gates or pod.group is None:
        return False
    return pod.group.key in state.waiting.gangs or pod.nominated == entry.kube_node


def lift(state: State, entry: Entry, pod: PodRecord) -> None:
    """Nominate the claim's node and take the gate off; without a gate: wake the pod."""
    notes: dict[str, str | None] = {}
    if keys.REASON in pod.annotations:
        notes[keys.REASON] = None
    if entry.group:
        notes[keys.SHARE] = write_share(entry)
    if (together := _together(state, pod)) and keys.TOGETHER not in pod.annotations:
        notes[keys.TOGETHER] = together
    if not pod.gates:
        notes[keys.WAKE] = wake.mark(state)
    entry.lift_at, entry.is_let_go, entry.is_woken = state.now, True, not pod.gates
    gate = keys.GATE if pod.gates else ""
    state.waiting.lifted.add(pod.uid)
    state.out.append(
        Lift(pod.uid, pod.namespace, pod.name, entry.kube_node, gate, notes, entry.cause)
    )


def is_under_way(state: State, entry: Entry) -> bool:
    """Whether a claim's pod is being let through: asked for, and not answered yet.

    Not for one that has waited long, or was refused: a few such must not hold up all others.
    """
    if entry.phase is not Phase.HELD or entry.lift_at is None:
        return False
    return state.now - entry.lift_at < LIFT_AGAIN_S - RETRY_S


def _together(state: State, pod: PodRecord) -> str:
    """What the members of a gang have in common that are let go together; "" for a single pod."""
    gang = None if pod.group is None else state.waiting.gangs.get(pod.group.key)
    if gang is None:
        return ""
    if not gang.together:
        mates = [mate for uid in sorted(gang.members) if (mate := state.pods.get(uid)) is not None]
        said = [mate.annotations.get(keys.TOGETHER, "") for mate in mates]
        gang.together = next(filter(None, said), pod.uid)
    return gang.together


def see_plain(state: State, pod: PodRecord) -> None:
    """A pod that asks for no pool GPU: behind our gate nobody else would ever let it out.

    `nvidia.com/gpu: 0` in a chart, or a gate that somebody wrote by hand.
    """
    if keys.GATE in pod.gates and pod.deleting_since is None:
        state.waiting.plain[pod.uid] = pod
        let_out(state, pod)
    else:
        state.waiting.plain.pop(pod.uid, None)


def let_out(state: State, pod: PodRecord) -> None:
    """Take our gate off a pod that needs no claim; said again while it is seen with the gate."""
    if state.once("plain", pod.uid, LIFT_AGAIN_S):
        state.out.append(Lift(pod.uid, pod.namespace, pod.name, "", keys.GATE, {}))


def on_lifted(state: State, event: Lifted) -> None:
    """The API server has taken it; kube-scheduler is next."""
    entry = state.book.get(event.uid)
    if entry is not None and entry.phase is Phase.HELD and entry.lift_at is not None:
        entry.lift_at, entry.since = None, state.now


def on_lift_failed(state: State, entry: Entry) -> None:
    """No clear answer; perhaps the pod is bound already and the watch is late."""
    if entry.phase is Phase.HELD and entry.lift_at is not None:
        entry.lift_at = state.now - LIFT_AGAIN_S + RETRY_S


def again(state: State, entry: Entry) -> None:
    """A gate that should be off is not, or a pod was not woken: again, not too often."""
    pod = state.pods.get(entry.uid)
    if (
        pod is not None
        and (is_gated(pod) or not pod.gates)
        and entry.lift_at is not None
        and state.now - entry.lift_at > LIFT_AGAIN_S
    ):
        entry.lift_at, entry.is_let_go = None, False
        on_held(state, entry)
