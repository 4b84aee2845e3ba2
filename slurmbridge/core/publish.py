"""From the book and the reading to what others see: the view, and the node annotation."""

from __future__ import annotations

import msgspec

from slurmbridge.core import agents, shares
from slurmbridge.core.action import AnnotateNode
from slurmbridge.core.places import ask, is_wanted, place_nodes
from slurmbridge.core.state import State
from slurmbridge.pool import keys
from slurmbridge.pool.gres import format_indices
from slurmbridge.pool.index import ViewIndex, compile_view
from slurmbridge.pool.ledger import GpuState, NodeLedger, build_node
from slurmbridge.pool.nodestate import why_not_usable
from slurmbridge.pool.plan import plan_start
from slurmbridge.pool.reason import Reason
from slurmbridge.pool.record import GpuCount, KubeNode, NodeState, SlurmNode
from slurmbridge.pool.view import NodeView, View, Window

QUIET_FACTOR = 4
"""Node annotations wake every pod that the extender has refused: while pods wait they are written
this many times less often."""


def refresh(state: State) -> None:
    """Make ledgers and node views of all dirty nodes again."""
    if not state.dirty or state.snapshot is None:
        return
    charges = state.charges(state.dirty)
    for slurm_node in state.dirty:
        node = state.snapshot.nodes.get(slurm_node)
        if node is None:
            state.ledgers.pop(slurm_node, None)
        else:
            jobs = state.jobs_on.get(slurm_node, ())
            claims = {j.id: state.ours[j.id].uid for j in jobs if j.id in state.ours}
            state.ledgers[slurm_node] = build_node(node, jobs, claims, charges.get(slurm_node, ()))
    for slurm_node in state.dirty | shares.recount(state, state.dirty):
        node = state.snapshot.nodes.get(slurm_node)
        if kube_name := state.kube_of.get(slurm_node, ""):
            view = _view_of(state, kube_name, slurm_node, node)
            old = state.views.get(kube_name)
            if old != view:
                state.waiting.grew = state.waiting.grew or _has_grown(old, view)
                state.views[kube_name] = view
                state.view_changed = True
    state.dirty.clear()


def _view_of(state: State, kube_name: str, slurm_node: str, node: SlurmNode | None) -> NodeView:
    kube_node = state.kube_nodes.get(kube_name)
    blocked = state.problems.get(kube_name, "")
    if node is None or kube_node is None:
        return NodeView(kube_name, slurm_node, blocked=blocked or "unknown to Slurm")
    ledger = state.ledgers[slurm_node]
    windows = state.windows.get(slurm_node, ())
    blocked = blocked or (why_not_usable(_judged_by_windows(state, node, windows)) or "")
    if not blocked and _offered(state, kube_node) > node.gpu_total:
        # Which of them Slurm knows cannot be told, so a pod might get one that it does not.
        blocked = Reason.GPU_COUNT
    if not blocked and agents.exposed(state, kube_name):
        blocked = Reason.GPU_FAULT
    total, free = _agree(state, node, kube_node, ledger)
    room = shares.room(state, slurm_node)
    if room is not None:
        free = tuple(GpuCount(g.type, min(g.count, room)) for g in free)
        blocked = blocked or (Reason.CEILING if room == 0 else "")
    return NodeView(
        kube_node=kube_name,
        slurm_node=slurm_node,
        total=total,
        free=free,
        cpus_free=ledger.cpus_free,
        memory_free_mib=ledger.memory_free_mib,
        blocked=blocked,
        native_jobs=len(ledger.native_jobs),
        claimed=len(ledger.in_state(GpuState.CLAIM)),
        plan_start=plan_start(slurm_node, state.starts, state.alone, state.now, state.ahead_s),
        windows=windows,
        agent=agents.takes_pods(state, kube_name),
        domains=state.domains.get(kube_name, ()),
        partitions=state.partitions_on.get(slurm_node, ()),
    )


def _judged_by_windows(state: State, node: SlurmNode, windows: tuple[Window, ...]) -> NodeState:
    """The node's state, without the MAINTENANCE that a reservation of its stands for.

    Whoever may use that reservation may use the node (tried); to all others it is reserved.
    """
    is_told = any(w.terms.maint and not w.cpus and w.start <= state.wall for w in windows)
    if not is_told or "MAINTENANCE" not in node.state.flags:
        return node.state
    return NodeState(node.state.base, node.state.flags - {"MAINTENANCE"})


def _has_grown(old: NodeView | None, new: NodeView) -> bool:
    """Whether a pod may fit on a node now that did not before."""
    return (
        old is None
        or new.free_total > old.free_total
        or new.cpus_free > old.cpus_free
        or new.memory_free_mib > old.memory_free_mib
        or new.native_jobs < old.native_jobs
        or (new.blocked, new.agent) != (old.blocked, old.agent)
        or (new.plan_start, new.windows) != (old.plan_start, old.windows)
    )


def blocked_view(kube_name: str, text: str) -> NodeView:
    """The view of a pool node that cannot be used at all."""
    return NodeView(kube_name, "", blocked=text)


def _agree(
    state: State, node: SlurmNode, kube_node: KubeNode, ledger: NodeLedger
) -> tuple[tuple[GpuCount, ...], tuple[GpuCount, ...]]:
    """Totals and free GPUs that both sides stand for.

    Where Kubernetes offers fewer GPUs than Slurm has (a broken one, a plugin not registered), the
    missing ones may be any: they are taken off the free ones. While a pod without a claim is on the
    node nothing is free, since Slurm may give its GPUs to the next claim.
    """
    missing = max(0, node.gpu_total - _offered(state, kube_node))
    free = tuple(
        # Of which type the missing ones are is not known, so each type counts without them.
        GpuCount(g.type, 0 if ledger.uncovered else max(0, g.count - missing))
        for g in ledger.free()
    )
    total = tuple(g for g in node.gpus if g.count > 0)
    return total, free


def _offered(state: State, kube_node: KubeNode) -> int:
    return sum(kube_node.gpus.get(r, 0) for r in state.settings.policy.resources)


def follow_topology(state: State) -> None:
    """Have the next generation of the topology built, if something about it may have changed."""
    if is_wanted(state):
        refresh(state)
        ask(state, tuple(state.views))


def view(state: State) -> View:
    """The view as it is now; its generation grows with each call."""
    refresh(state)
    if place_nodes(state, index(state)):
        state.dirty.update(state.kube_of)
        refresh(state)
    state.generation += 1
    state.view_changed = False
    return View(
        term=state.term,
        generation=state.generation,
        as_of=state.snapshot.began + state.ahead_s if state.snapshot is not None else 0.0,
        interval_s=state.interval_s,
        nodes=dict(state.views),
        held=dict(state.held),
    )


def index(state: State) -> ViewIndex:
    """All node views as arrays, for judging many pods at once."""
    refresh(state)
    nodes = View(state.term, 0, 0.0, 0.0, dict(state.views))
    state.index = compile_view(nodes, state.index)
    return state.index


def node_annotation(state: State, kube_name: str) -> str:
    """The value of `slurmbridge.dev/pool` on a node (JSON, version 1)."""
    node_view = state.views[kube_name]
    ledger = state.ledgers.get(node_view.slurm_node)
    slurm_node = state.snapshot.nodes.get(node_view.slurm_node) if state.snapshot else None
    value: dict[str, object] = {
        "version": 1,
        "slurmNode": node_view.slurm_node,
        "state": str(slurm_node.state) if slurm_node is not None else "unknown to Slurm",
        "usable": not node_view.blocked,
    }
    if slurm_node is not None and slurm_node.reason:
        value["reason"] = slurm_node.reason[:200]
    if ledger is not None:
        value["numbered"] = ledger.numbered
        value["gpus"] = gpus_by_owner(ledger)
    if node_view.plan_start is not None:
        value["planStart"] = int(node_view.plan_start)
    if node_view.windows:
        value["reservations"] = [
            {
                "name": w.reservation,
                "start": int(w.start),
                "end": None if w.end is None else int(w.end),
            }
            for w in node_view.windows[:8]
        ]
    return msgspec.json.encode(value).decode()


def gpus_by_owner(ledger: NodeLedger) -> dict[str, str]:
    """`{"free": "4-7", "native:12": "0-1", "claim:13": "2-3"}`: index lists by owner."""
    found: dict[str, list[int]] = {}
    for index, owner in enumerate(ledger.gpus):
        name = str(owner.state)
        if owner.job_id and owner.state in (GpuState.NATIVE, GpuState.CLAIM, GpuState.RELEASING):
            name = f"{owner.state}:{owner.job_id}"
        found.setdefault(name, []).append(index)
    return {name: format_indices(tuple(i)) for name, i in sorted(found.items())}


def annotate_nodes(state: State) -> None:
    """Write changed node annotations, all together and seldom: each wakes every refused pod."""
    if state.snapshot is None or state.is_stale:
        return
    waiting = any(p.waiting_on_us and not p.node for p in state.pods.values())
    every_s = state.settings.node_annotation_s * (QUIET_FACTOR if waiting else 1)
    if state.now - state.annotated_at < every_s:
        return
    state.annotated_at = state.now
    refresh(state)
    for name in state.views:
        kube_node = state.kube_nodes.get(name)
        if kube_node is None:
            continue
        value = node_annotation(state, name)
        # After a start of ours most are right already: what the nodes say is what we wrote last.
        if state.annotated.get(name, kube_node.annotations.get(keys.POOL)) != value:
            state.annotated[name] = value
            state.out.append(AnnotateNode(name, value))
