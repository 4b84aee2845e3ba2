"""The GPUs of each node group that pods hold, and how many more they may take.

Counted from the ledgers as they are made: whatever stands in them under a pod's name counts, from
the moment at which its claim is asked for until Slurm shows it no more. So the bridge, which
decides one pod after the other, never lets two of them take the last GPU below a ceiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from slurmbridge.core.groupcount import GroupCount, GroupCounts
from slurmbridge.core.state import State
from slurmbridge.pool.hostlist import expand
from slurmbridge.pool.ledger import GpuState, NodeLedger
from slurmbridge.pool.share import NodeGroup, most_for_jobs, most_for_pods


def build(state: State) -> None:
    """Find the nodes of each group: after a change of the configuration, or of the nodes.

    A node belongs to the first group that names it. Only nodes of the pool count.
    """
    groups = state.settings.groups
    if state.snapshot is None or not (groups or state.shares.groups):
        return
    counts = GroupCounts(held=state.shares.held)
    for group in groups:
        names = [n for n in _nodes_of(state, group) if n in state.kube_of and n not in counts.of]
        sizes = [node.gpu_total for n in names if (node := state.snapshot.nodes.get(n))]
        total = sum(sizes)
        count = GroupCount(
            group, tuple(sorted(names)), total, max(sizes, default=0), most_for_pods(group, total)
        )
        counts.groups[group.name] = count
        counts.of.update(dict.fromkeys(count.nodes, count))
        for name in count.nodes:
            pods, native = counts.held.get(name, (0, 0))
            count.pods += pods
            count.native += native
    state.dirty.update(state.shares.of, counts.of)
    counts.held = {name: held for name, held in counts.held.items() if name in counts.of}
    state.shares = counts


def recount(state: State, slurm_nodes: Collection[str]) -> set[str]:
    """Count some nodes again; the nodes whose room may have changed by it."""
    counts = state.shares
    if not counts.groups:
        return set()
    before: dict[str, int] = {}
    for name in slurm_nodes:
        count = counts.of.get(name)
        if count is None:
            continue
        before.setdefault(count.group.name, count.room)
        ledger = state.ledgers.get(name)
        pods, native = (0, 0) if ledger is None else _held(ledger)
        old_pods, old_native = counts.held.get(name, (0, 0))
        counts.held[name] = (pods, native)
        count.pods += pods - old_pods
        count.native += native - old_native
    changed: set[str] = set()
    for group, room_before in before.items():
        count = counts.groups[group]
        # A room that is larger than any node bounds nobody.
        if count.room != room_before and min(count.room, room_before) < count.largest:
            changed.update(count.nodes)
    return changed


def room(state: State, slurm_node: str) -> int | None:
    """GPUs that pods may still take in a node's group; None: it is in no group."""
    count = state.shares.of.get(slurm_node)
    return None if count is None else count.room


def too_many(state: State, gpus_on: Mapping[str, int], uid: str = "") -> str:
    """Why so many more GPUs (by Slurm node) are too many for a group; "" when they are not.

    uid: of a claim that may be counted already.
    """
    wanted: Counter[str] = Counter()
    for name, gpus in gpus_on.items():
        if (count := state.shares.of.get(name)) is not None:
            ledger = state.ledgers.get(name) if uid else None
            counted = 0 if ledger is None else sum(1 for o in ledger.gpus if o.uid == uid)
            wanted[count.group.name] += max(0, gpus - counted)
    for name, gpus in sorted(wanted.items()):
        left = state.shares.groups[name].room
        if gpus > left:
            return f"group {name} leaves {left} GPUs to Kubernetes, {gpus} are asked for"
    return ""


def told(state: State) -> list[dict[str, Any]]:
    """The groups for `status`: who holds what, what pods may hold, and what is over its bound."""
    return [
        {
            "name": name,
            "nodes": len(count.nodes),
            "gpus": count.total,
            "pods": count.pods,
            "podsMost": count.most,
            "native": count.native,
            "nativeMost": most_for_jobs(count.group, count.total),
            "over": over(count),
        }
        for name, count in state.shares.groups.items()
    ]


def over(count: GroupCount) -> list[str]:
    """Which side holds more than it should: a bound was lowered, or Slurm does not keep its own."""
    found = []
    if count.pods > count.most:
        found.append("kubernetes")
    if count.native > most_for_jobs(count.group, count.total):
        found.append("slurm")
    return found


def _held(ledger: NodeLedger) -> tuple[int, int]:
    pods = sum(1 for owner in ledger.gpus if owner.uid)
    native = sum(1 for owner in ledger.gpus if owner.state is GpuState.NATIVE and not owner.uid)
    return pods, native


def _nodes_of(state: State, group: NodeGroup) -> list[str]:
    if group.nodes:
        return expand(group.nodes)
    if group.partition:
        partitions = {} if state.snapshot is None else state.snapshot.partitions
        partition = partitions.get(group.partition)
        return [] if partition is None else list(partition.nodes)
    wanted = group.selector.items()
    return [
        slurm
        for kube, slurm in state.slurm_of.items()
        if (node := state.kube_nodes.get(kube)) is not None
        and all(node.labels.get(key) == value for key, value in wanted)
    ]
