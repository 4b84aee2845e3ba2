"""Gangs that run, told by what is there: the planner forgets them with a restart of the bridge."""

from __future__ import annotations

from slurmbridge.core.state import State
from slurmbridge.core.waiting import GangState
from slurmbridge.pool import keys
from slurmbridge.pool.claim import group_uid
from slurmbridge.pool.group import Group
from slurmbridge.pool.record import PodRecord
from slurmbridge.topology.source import NODE


def found(state: State, group: Group) -> GangState | None:
    """A gang that the planner does not know, for people; changes nothing.

    None: its pods were not claimed as a gang (no claim for all, and not let go together).
    """
    uid, pods = group_uid(group.key), state.pods_of_group(group.key)
    sharers = state.sharing.get(uid, set())
    if not sharers and not any(keys.TOGETHER in pod.annotations for pod in pods):
        return None
    members = {pod.uid for pod in pods} | sharers
    return GangState(group.key, since=state.now, uid=uid, members=members, size=group.size)


def place(state: State, members: list[PodRecord]) -> tuple[str, str, dict[str, int]]:
    """Where a gang stands: the lowest level that holds all of it, its domain, and the spread below.

    Returns:
        level, domain; of each level below, the top one first, how many of its domains are used. All
        are empty where a member has no node yet, or nothing links the nodes.

    """
    nodes = set()
    for pod in members:
        entry = state.book.get(pod.uid)
        nodes.add(pod.node or ("" if entry is None else entry.kube_node))
    made = state.placed_by
    if not nodes or "" in nodes or (len(nodes) > 1 and (made is None or not made.top)):
        return "", "", {}
    paths = [(state.slurm_of.get(name, name), *state.domains.get(name, ())) for name in nodes]
    levels = (NODE,) if made is None else made.levels
    used = [set(domains) for domains in zip(*paths, strict=False)]
    for height, domains in enumerate(used):
        if len(domains) == 1:
            spread = {levels[below]: len(used[below]) for below in range(height - 1, -1, -1)}
            return levels[height], domains.pop(), spread
    return "", "", {}
