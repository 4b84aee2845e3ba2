"""The planned way for single pods: the node is chosen and claimed before kube-scheduler sees them.

A pod whose only gate is ours waits here. When a node suits it, a claim is made there; with the
claim the gate comes off (`lift`). Refused by Slurm: the next node. Cannot be used by kube-scheduler
(a taint, a volume): the claim is given back, another node is tried, and after a few the pod is left
to the reactive way, in which kube-scheduler offers only nodes that suit it. A pod that fits nowhere
costs nothing until a node has more room than before.
"""

from __future__ import annotations

import msgspec
import numpy as np

from slurmbridge.core import gang, lift, publish, release, together, turn
from slurmbridge.core.action import Allocate, AnnotatePod, Queue
from slurmbridge.core.places import topology
from slurmbridge.core.room import kept_for, look
from slurmbridge.core.settle import drawn, must_queue, request_for
from slurmbridge.core.state import Entry, Phase, State, asked_gpus
from slurmbridge.core.waiting import ABOUT_ASK, Bucket, Like, Turn, pause_after
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Ask
from slurmbridge.pool.group import Group
from slurmbridge.pool.nodefit import NodeFit
from slurmbridge.pool.policy import Refusal, resolve
from slurmbridge.pool.reason import CODES, REASONS, Reason, texts_for
from slurmbridge.pool.record import PodRecord
from slurmbridge.pool.verdict import PASSES, judge_one, rank
from slurmbridge.topology.score import topology_key

LOOK_AGAIN_S = 10.0
"""The passing of time alone lets a node in or out (a plan, a reservation): looked at this often."""
NODE_PAUSE_S, ASK_PAUSE_S, LONGEST_PAUSE_S = 1.5, 4.0, 60.0
EXCLUDE_S = 120.0
MOST_LOOKS = 1000
MOST_EXCLUDED = 3
"""Nodes that kube-scheduler could not use before the pod is left to the reactive way."""
SETTLED_S, TELL_AGAIN_S, MOST_TOLD = 4.0, 30.0, 25
"""A reason is told after it has held so long, a new one so much later, to so many pods a tick."""
UNSEEN_AGAIN_S = 2.0
"""A pod that was refused since an extender did not know of its claim yet is woken this often."""
REPLAN_S = 15.0
"""A pod that was replanned is not bound within this: kube-scheduler cannot use that node either."""
_TOLD = (
    Reason.GPU_BUSY, Reason.PLANNED, Reason.RESERVED, Reason.CPU_BUSY, Reason.MEMORY_BUSY,
    Reason.NATIVE_ON_NODE, Reason.CEILING, Reason.NO_AGENT, Reason.RESERVATION_DENIED,
    Reason.OUTSIDE_RESERVATION, Reason.GPU_TOTAL, Reason.GPU_TYPE, Reason.OUTSIDE_PARTITION,
    Reason.GPU_COUNT, Reason.SLURM_STATE, Reason.UNKNOWN_NODE,
)  # fmt: skip
"""What is told when nodes refuse for different reasons: the one that is most likely to pass."""


def after_event(state: State) -> None:
    """Sort in what has changed, and claim for as many pods as may be under way at once.

    A pod is until its gate is off: where the API server is slower than slurmctld, claims that ran
    ahead would hold GPUs for seconds that nobody uses yet. Nothing is planned before it is known
    where the nodes stand.
    """
    waiting = state.waiting
    consider, waiting.consider = waiting.consider, set()
    for uid in consider:
        _sort_in(state, uid)
    is_known = waiting.topology is not None
    if is_known and waiting.grew:
        waiting.look_anew()
        turn.all_again(state)
    if is_known and waiting.gangs_due:
        gang.run(state)
    if waiting.askers:
        together.after_event(state)
    if is_known and waiting.buckets and waiting.has_turn:
        _claim(state)


def tick(state: State) -> None:
    """What time alone does: pauses end, gates are taken off again, reasons are told."""
    waiting = state.waiting
    for plain in waiting.plain.values():
        lift.let_out(state, plain)
    for uid in list(waiting.lifted):
        entry = state.book.get(uid)
        if entry is None or entry.phase is not Phase.HELD or not entry.planned:
            continue
        lift.again(state, entry)
        pod = state.pods.get(uid)
        if (
            pod is not None
            # What is refused for the same as before, kube-scheduler may not even look at again.
            and (pod.waiting_on_us or entry.is_woken)
            and not pod.gates
            and not entry.promised
            and entry.lift_at is None
        ):
            if pod.claim_unseen and state.once("unseen", uid, UNSEEN_AGAIN_S):
                lift.lift(state, entry, pod)
            elif not pod.claim_unseen and state.now - entry.since > _patience_s(entry):
                _cannot_use(state, entry)
    gang.tick(state)
    if not waiting.buckets:
        after_event(state)
        return
    pauses = [*waiting.nodes_after.values(), *waiting.asks_after.values()]
    if any(waiting.looked_at < p.until <= state.now for p in pauses) or (
        state.now - waiting.looked_at > LOOK_AGAIN_S
    ):
        waiting.look_anew()
        for uid, nodes in list(waiting.excluded.items()):
            left = {n: until for n, until in nodes.items() if until > state.now}
            if not left:
                del waiting.excluded[uid]
            else:
                waiting.excluded[uid] = left
        _forget_pauses(state)
    after_event(state)
    _tell(state)


def _patience_s(entry: Entry) -> float:
    """How long a pod that was refused before may take to be bound with another claim.

    Longer where it is known to be on its way: kube-scheduler has asked for it, and pauses.
    """
    return 2 * REPLAN_S if entry.is_wanted else REPLAN_S


def on_pod(state: State, pod: PodRecord, known: PodRecord | None) -> None:
    """A pod is not bound, and something about it may have changed."""
    entry = state.book.get(pod.uid)
    if entry is None:
        waiting = state.waiting
        if (
            lift.is_gated(pod)
            or pod.uid in waiting.of
            or pod.uid in waiting.lifted
            or goes_with_gang(state, pod)
        ):
            waiting.consider.add(pod.uid)
        return
    if entry.phase is Phase.HELD and known and len(known.gates) > 1 and lift.is_gated(pod):
        # Behind another gate again (the API server was set back), which somebody has taken off.
        lift.on_held(state, entry)
        return
    if entry.phase is not Phase.HELD or not entry.planned or pod.gates:
        return
    was_told = known is not None and known.waiting_on_us
    if not pod.waiting_on_us or was_told or entry.promised or entry.lift_at is not None:
        return
    if not pod.claim_unseen:  # else an extender has not had the view with the claim: `tick` wakes
        _cannot_use(state, entry)


def on_refused(state: State, entry: Entry, reason: str, text: str) -> None:
    """Slurm said no to a claim of the planner: not the same again at once."""
    waiting = state.waiting
    if not entry.planned:
        return
    gang.on_refused(state, entry, reason, text)
    if reason in ABOUT_ASK and entry.request is not None:
        _pause_ask(state, _asked(state, entry, entry.request.ask, reason), text)
    if reason not in ABOUT_ASK or reason == "reservation":  # that may be one of the node's alone
        node = entry.kube_node
        waiting.nodes_after[node] = pause_after(
            waiting.nodes_after.get(node), state.now, NODE_PAUSE_S, LONGEST_PAUSE_S
        )
    waiting.looked_at = state.now


def _asked(state: State, entry: Entry, ask: Ask, reason: str) -> Ask:
    """What a pod asks for by itself, without a reservation that took it in and was not to blame."""
    pod = state.pods.get(entry.uid)
    if pod is None or reason == "reservation":
        return ask
    own = resolve(pod, state.settings.policy)
    return ask if isinstance(own, Refusal) else own


def _pause_ask(state: State, ask: Ask, text: str) -> None:
    """Of many that were asked at a time, only the first refusal makes the pause longer."""
    waiting = state.waiting
    last = waiting.asks_after.get(ask)
    if last is None or state.now >= last.until:
        last = pause_after(last, state.now, ASK_PAUSE_S, LONGEST_PAUSE_S)
    waiting.asks_after[ask] = last._replace(text=f"slurm: Slurm refuses the claim: {text[:300]}")
    for like in [like for like in waiting.looks if like.ask == ask]:
        del waiting.looks[like]


def keeps(state: State, entry: Entry, pod: PodRecord) -> bool:
    """Whether an unbound claim stays: its pod is behind the gate still, as the API server says."""
    if not lift.is_gated(pod):
        return False
    entry.since = state.now
    lift.on_held(state, entry)
    return True


def _cannot_use(state: State, entry: Entry) -> None:
    """kube-scheduler has looked at the claim's node and cannot use it for the pod."""
    if entry.uid in state.waiting.gang_of:
        gang.cannot_use(state, entry)
        return
    excluded = state.waiting.excluded.setdefault(entry.uid, {})
    excluded[entry.kube_node] = state.now + EXCLUDE_S
    if len(excluded) >= MOST_EXCLUDED:
        state.waiting.forget(entry.uid)
    release.end_entry(state, entry, f"kube-scheduler cannot use {entry.kube_node} for the pod")


def _sort_in(state: State, uid: str) -> None:
    waiting, pod = state.waiting, state.pods.get(uid)
    if pod is None or pod.node or pod.is_over or pod.deleting_since is not None:
        waiting.forget(uid)
        return
    if goes_with_gang(state, pod):
        waiting.remove(uid)
        gang.join(state, pod)
        return
    if (key := waiting.gang_of.get(uid)) is not None:
        waiting.remove(uid)
        waiting.gangs_due.add(key)
        return
    is_ours = lift.is_gated(pod) or (uid in waiting.lifted and not pod.gates)
    if uid in state.book or not is_ours:
        waiting.remove(uid)
        return
    ask = resolve(pod, state.settings.policy)
    if isinstance(ask, Refusal):
        waiting.remove(uid)
        text = f"{ask.reason}: {ask.text}"
        if waiting.faults.get(uid) != text:
            waiting.faults[uid] = text
            _note(state, pod, text)
        return
    waiting.faults.pop(uid, None)
    waiting.put(pod, Like(ask, pod.fit))


def as_gang(state: State, pod: PodRecord) -> PodRecord:
    """A single pod behind our gate that is to wait in Slurm's queue is a gang of one.

    It waits there with its own priority, on whatever node comes first, also in a full pool. One
    that lives in such a claim has a share of it, as its annotations say.
    """
    if pod.group is not None or pod.annotations.get(keys.MODE) != "queued":
        return pod
    has_part = keys.GATE in pod.gates or keys.SHARE in pod.annotations
    if not has_part and pod.uid not in state.waiting.gang_of:
        return pod
    group = Group("pod", pod.namespace, pod.name, owner=pod.uid, size=1)
    return msgspec.structs.replace(pod, group=group)


def goes_with_gang(state: State, pod: PodRecord) -> bool:
    """Whether a pod waits for a plan with others, behind our gate or without it.

    A node was nominated for it: it was let go by an earlier leader, as a rule.
    """
    if pod.group is None:
        return False
    if lift.is_gated(pod) or pod.nominated or pod.group.key in state.waiting.gangs:
        return True
    entry = state.book.get(pod.uid)
    return entry is not None and entry.planned


def _claim(state: State) -> None:
    """Lay pods on nodes, in their turn, while allocations may be begun."""
    waiting = state.waiting
    if not state.is_synced or state.is_stale:
        return
    waiting.asking = {
        uid
        for uid in waiting.asking
        if (entry := state.book.get(uid)) is not None
        and (entry.phase is Phase.ASKING or lift.is_under_way(state, entry))
    }
    left = state.settings.planned_at_once - len(waiting.asking)
    if left <= 0:
        return
    publish.refresh(state)
    passed: dict[Like, int] = {}
    while left > 0:
        heads = [
            (b.turns[at], b)
            for like, b in waiting.buckets.items()
            if not b.full and (at := passed.get(like, 0)) < len(b.turns)
        ]
        if not heads:
            return
        turn, bucket = min(heads, key=_turn_of)
        uid = turn[2]
        node = _node_for(state, bucket, uid)
        if node:
            _start(state, state.pods[uid], bucket.like, node)
            left -= 1
        elif waiting.excluded.get(uid):
            passed[bucket.like] = passed.get(bucket.like, 0) + 1
        else:
            bucket.full = True


def _turn_of(head: tuple[Turn, Bucket]) -> Turn:
    return head[0]


def _node_for(state: State, bucket: Bucket, uid: str) -> str:
    """The best node that suits a pod of the bucket now, "" for none."""
    looks, like = state.waiting.looks, bucket.like
    nodes = looks.get(like)
    if nodes is None:
        if len(looks) >= MOST_LOOKS:
            looks.clear()
        nodes = looks[like] = _look(state, bucket)
    excluded = state.waiting.excluded.get(uid, {})
    had_nodes, kept_out = bool(nodes), False
    at = len(nodes) - 1
    while at >= 0:
        name = nodes[at]
        is_offered = _offers(state, name, like.fit)
        if is_offered and _suits_now(state, like, name):
            if state.now >= excluded.get(name, 0.0):
                return name
        else:
            kept_out |= not is_offered
            del nodes[at]
        at -= 1
    if kept_out:
        _refuse(state, bucket, "selector: no free node is one that the pod allows (labels, taints)")
    elif had_nodes and not bucket.reason:
        _refuse(state, bucket, f"{Reason.GPU_BUSY}: {Reason.GPU_BUSY.text}")
    return ""


def _suits_now(state: State, like: Like, name: str) -> bool:
    """Whether a node holds one more, counting what the last reading does not show yet."""
    publish.refresh(state)
    view, ask = state.views.get(name), like.ask
    if view is None or judge_one(ask, view, state.settings.policy, state.wall) is not None:
        return False
    pause = state.waiting.nodes_after.get(name)
    if pause is not None and state.now < pause.until:
        return False
    read = 0.0 if state.snapshot is None else state.snapshot.began
    cpus, memory = view.cpus_free - ask.cpus, view.memory_free_mib - ask.memory_mib
    for other in state.by_node.get(view.slurm_node, {}).values():
        if other.request is not None and (other.claim is None or other.claim.granted >= read):
            cpus -= other.request.ask.cpus
            memory -= other.request.ask.memory_mib
    return cpus >= 0 and memory >= 0


def _look(state: State, bucket: Bucket) -> list[str]:
    """All nodes that suit a bucket, best last; what keeps its pods out if there is none."""
    waiting, ask = state.waiting, bucket.like.ask
    waiting.looked_at = state.now
    if refused := waiting.refused(ask, state.now):
        _refuse(state, bucket, refused)
        return []
    index = publish.index(state)
    horizon = state.settings.policy.plan_horizon_minutes
    codes = look(state, ask)
    fits = np.flatnonzero(codes == PASSES).astype(np.int32)
    if len(fits):
        broken = topology_key(topology(state, index), index.free[0], index.total[0])
        ranks = rank(
            ask, "", index, fits, state.wall, horizon_minutes=horizon,
            topology=broken.astype(np.int32),
        )  # fmt: skip
        fits = fits[np.argsort(ranks)]
    else:
        present = {REASONS[code] for code in np.unique(codes)}
        reason = next((r for r in _TOLD if r in present), Reason.GPU_BUSY)
        _refuse(
            state,
            bucket,
            f"{reason}: {texts_for(ask.reservation)[CODES[reason]]}{_kept(state, ask, reason)}",
        )
    return [index.names[row] for row in fits]


def _kept(state: State, ask: Ask, reason: Reason) -> str:
    """For whom the nodes are reserved, as the end of a reason."""
    return f" ({kept_for(state, ask)})" if reason is Reason.RESERVED else ""


def _offers(state: State, kube_node: str, fit: NodeFit) -> bool:
    """Whether kube-scheduler may use a node, as far as is easily known."""
    node = state.kube_nodes.get(kube_node)
    return node is not None and node.takes(fit)


def _start(state: State, pod: PodRecord, like: Like, kube_node: str) -> None:
    slurm_node = state.slurm_of[kube_node]
    request = request_for(state, pod, slurm_node, drawn(state, like.ask, kube_node))
    cause = pod.uid[:8]
    state.waiting.remove(pod.uid)
    state.waiting.asking.add(pod.uid)
    entry = Entry(
        uid=pod.uid,
        ref=pod.ref,
        kube_node=kube_node,
        slurm_node=slurm_node,
        phase=Phase.ASKING,
        since=state.now,
        request=request,
        gpus=asked_gpus(pod),
        boot=state.boot,
        cause=cause,
        planned=True,
    )
    state.put(entry)
    work = Queue if must_queue(state, like.ask) else Allocate
    state.out.append(work(pod.uid, request, cause))


def _forget_pauses(state: State) -> None:
    waiting, now = state.waiting, state.now
    waiting.nodes_after = {
        n: p for n, p in waiting.nodes_after.items() if now - p.until < LONGEST_PAUSE_S
    }
    waiting.asks_after = {
        a: p for a, p in waiting.asks_after.items() if now - p.until < LONGEST_PAUSE_S
    }


def _refuse(state: State, bucket: Bucket, text: str) -> None:
    if bucket.reason != text:
        bucket.reason, bucket.reason_since = text, state.now


def _tell(state: State) -> None:
    """Write on waiting pods why they wait: once, and again when it is for another reason."""
    left = MOST_TOLD
    for bucket in state.waiting.buckets.values():
        if not bucket.full or state.now - bucket.reason_since < SETTLED_S:
            continue
        if bucket.told != bucket.reason:
            if state.now - bucket.told_at < TELL_AGAIN_S:
                continue
            bucket.told, bucket.told_at = bucket.reason, state.now
            bucket.untold = dict.fromkeys(turn[2] for turn in bucket.turns)
        for uid in list(bucket.untold)[:left]:
            del bucket.untold[uid]
            if (pod := state.pods.get(uid)) is not None:
                _note(state, pod, bucket.reason)
                left -= 1


def _note(state: State, pod: PodRecord, text: str) -> None:
    if pod.annotations.get(keys.REASON) != text:
        note = {keys.REASON: text}
        state.out.append(AnnotatePod(pod.uid, pod.namespace, pod.name, note))
