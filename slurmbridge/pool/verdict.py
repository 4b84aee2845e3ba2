"""The verdict: which nodes a pod may go to now, as the view tells it, and why not to the others.

A pure function of (ask, pod UID, view, time). The first reason that holds is told, in this order:
what does not change by itself (state, type, size, reservation asked for), then what is in use, then
what is promised to others.

`judge` is for many nodes at once (the extender), `judge_one` for one node that is not compiled (the
bridge, before it asks Slurm); tests/property holds them to the same answers.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from slurmbridge.pool.claim import Ask
from slurmbridge.pool.index import (
    NO_ROW,
    Bools,
    Codes,
    Ints,
    Taken,
    ViewIndex,
    compile_view,
)
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.reason import (
    ABOUT,
    CODES,
    PASSES,
    REASONS,
    TEXTS,
    About,
    Reason,
    blocked_code,
)
from slurmbridge.pool.record import GpuCount
from slurmbridge.pool.reserved import DENIED, NAMED, is_kept, is_usable, role, standing
from slurmbridge.pool.score import end_of, rank, score
from slurmbridge.pool.view import NodeView

__all__ = [
    "ABOUT",
    "CODES",
    "NO_ROW",
    "PASSES",
    "REASONS",
    "TEXTS",
    "About",
    "Reason",
    "Taken",
    "ViewIndex",
    "compile_view",
    "end_of",
    "judge",
    "judge_one",
    "rank",
    "score",
]

_ELSEWHERE: Final = CODES[Reason.CLAIMED_ELSEWHERE]


def judge(
    ask: Ask,
    pod_uid: str,
    index: ViewIndex,
    rows: Ints,
    now: float,
    *,
    horizon_minutes: int,
    evicting: bool = False,
) -> Codes:
    """The verdict on each of some nodes.

    Args:
        ask: what the pod asks for; at least one GPU.
        pod_uid: whose claim to look for: where there is one, only its node passes, and it does so
            whatever else is said of that node, since the GPUs are the pod's already.
        index: the compiled view.
        rows: int32[K], 0 <= row < N, in any order, repeats allowed.
        now: Unix seconds by the clock that made the view.
        horizon_minutes: `Policy.plan_horizon_minutes`.
        evicting: judge as if claims of Kubernetes pods on each node could be ended: only what
            eviction cannot cure is told.

    Returns:
        int8[K], 0 (`PASSES`) or the code of a `Reason`.

    Cost: O(K + W), or O(N + W) for large K.

    """
    held = index.held.get(pod_uid)
    if held is not None:
        mine = index.row_of.get(held.kube_node, NO_ROW)
        return np.where(rows == mine, PASSES, _ELSEWHERE).astype(np.int8)
    if 2 * len(rows) < len(index):
        return _judge(ask, index, rows, now, horizon_minutes=horizon_minutes, evicting=evicting)
    return _judge(ask, index, slice(None), now, horizon_minutes=horizon_minutes, evicting=evicting)[
        rows
    ]


def _judge(
    ask: Ask,
    index: ViewIndex,
    pick: Ints | slice,
    now: float,
    *,
    horizon_minutes: int,
    evicting: bool,
) -> Codes:
    codes = index.blocked[pick].copy()
    if evicting:
        codes[codes == CODES[Reason.CEILING]] = PASSES  # fewer pods are below it again

    def refuse(reason: Reason, where: Bools) -> None:
        np.copyto(codes, CODES[reason], where=where & (codes == PASSES))

    refuse(Reason.NO_AGENT, ~index.has_agent[pick])
    free = index.of_type(index.free, ask.gpu.type)
    total = index.of_type(index.total, ask.gpu.type)
    if free is None or total is None:
        refuse(Reason.GPU_TYPE, np.ones(len(codes), np.bool_))
        return codes
    free, total = free[pick], total[pick]
    if ask.gpu.type:
        refuse(Reason.GPU_TYPE, total == 0)
    refuse(Reason.GPU_TOTAL, total < ask.gpu.count)
    if ask.partition:
        refuse(Reason.OUTSIDE_PARTITION, ~_in_partition(ask, index)[pick])
    end = end_of(ask, now, horizon_minutes)
    stands = standing(ask, index, now, end)
    if ask.reservation:
        refuse(Reason.RESERVATION_DENIED, stands.denied[pick])
        refuse(Reason.OUTSIDE_RESERVATION, ~stands.inside[pick])
    if evicting:
        free = np.minimum(total, free + index.claimed[pick])
    refuse(Reason.GPU_BUSY, free < ask.gpu.count)
    if not evicting:
        refuse(Reason.CPU_BUSY, index.cpus_free[pick] - stands.cpus[pick] < ask.cpus)
        refuse(Reason.MEMORY_BUSY, index.memory_free[pick] < ask.memory_mib)
    if ask.exclusive_user:
        refuse(Reason.NATIVE_ON_NODE, index.has_native[pick])
    refuse(Reason.RESERVED, stands.reserved[pick])
    refuse(Reason.PLANNED, index.plan_start[pick] < end)
    return codes


def _in_partition(ask: Ask, index: ViewIndex) -> Bools:
    """bool[N]: not in another partition only than the one asked for."""
    return index.partitions.get(ask.partition, index.partitions[""])


def judge_one(ask: Ask, node: NodeView, policy: Policy, now: float) -> Reason | None:
    """The verdict on one node for a pod that holds no claim; None: it passes. O(windows)."""
    if node.blocked:
        return REASONS[blocked_code(node.blocked)]
    if not node.agent:
        return Reason.NO_AGENT
    total = _count(node.total, ask.gpu.type)
    if ask.gpu.type and total == 0:
        return Reason.GPU_TYPE
    if total < ask.gpu.count:
        return Reason.GPU_TOTAL
    if ask.partition and node.partitions and ask.partition not in node.partitions:
        return Reason.OUTSIDE_PARTITION
    end = end_of(ask, now, policy.plan_horizon_minutes)
    mine = [w for w in node.windows if ask.reservation and w.reservation == ask.reservation]
    if any(
        role(w.terms, w.reservation, ask) == DENIED and (w.end is None or w.end > now) for w in mine
    ):
        return Reason.RESERVATION_DENIED
    if ask.reservation and not any(
        role(w.terms, w.reservation, ask) == NAMED and is_usable(ask, w, now, end) for w in mine
    ):
        return Reason.OUTSIDE_RESERVATION
    kept = [w for w in node.windows if is_kept(ask, w, now, end)]
    if _count(node.free, ask.gpu.type) < ask.gpu.count:
        return Reason.GPU_BUSY
    if node.cpus_free - sum(w.cpus for w in kept) < ask.cpus:
        return Reason.CPU_BUSY
    if node.memory_free_mib < ask.memory_mib:
        return Reason.MEMORY_BUSY
    if ask.exclusive_user and node.native_jobs > 0:
        return Reason.NATIVE_ON_NODE
    if any(not w.cpus for w in kept):
        return Reason.RESERVED
    if node.plan_start is not None and node.plan_start < end:
        return Reason.PLANNED
    return None


def _count(counts: tuple[GpuCount, ...], gpu_type: str) -> int:
    return sum(g.count for g in counts if not gpu_type or g.type == gpu_type)
