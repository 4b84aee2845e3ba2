"""The score: of the nodes that a pod may go to, which one leaves the pool in the best shape.

Best fit, GPU by GPU: a node that is partly used is filled before an empty one is broken, so that
jobs and gangs which need whole nodes find them. With granularity node, a node that Kubernetes
holds already is filled first, since nobody else may come there anyway. Nodes that Slurm wants back
soon come last.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from slurmbridge.pool.claim import Ask
from slurmbridge.pool.index import Bools, Ints, Longs, ViewIndex
from slurmbridge.pool.reserved import standing

MAX_SCORE: Final = 10
"""MaxExtenderPriority of k8s.io/kube-scheduler/extender/v1; larger values are not clamped."""
MAX_FIT: Final = 255
"""GPUs left on a node that are told apart; no node of today has more."""
MAX_TOPOLOGY: Final = 1023

_MIX: Final = np.uint32(0x9E3779B1)


def end_of(ask: Ask, now: float, horizon_minutes: int) -> float:
    """When a pod that starts now must be thought to end, Unix seconds.

    A rolling pod has no end of its own: it counts as there until the plan's horizon, or to the end
    of its first claim if that is later.
    """
    minutes = max(ask.minutes, horizon_minutes) if ask.rolling else ask.minutes
    return now + 60.0 * minutes


def rank(
    ask: Ask,
    pod_uid: str,
    index: ViewIndex,
    rows: Ints,
    now: float,
    *,
    horizon_minutes: int,
    topology: Ints | None = None,
) -> Longs:
    """How good each node is for a pod: int64[K], larger is better, all different in practice.

    Compared in turn: in the hands of Kubernetes already (granularity node only); in a MAGNETIC
    reservation that takes the pod in; not wanted by a plan or a reservation within the horizon
    after the pod's end; partly used; few GPUs left over; `topology`; a hash of pod and node, so
    that pods and extenders that choose at the same moment spread, and the same pod always chooses
    alike.

    Args:
        ask, pod_uid, index, rows, now, horizon_minutes: as for `judge`.
        topology: int32[N], 0..`MAX_TOPOLOGY` per row of the index: how little a pod on that node
            breaks of its rack or block; None: no topology is known.

    Cost: O(K + W).

    """
    free = index.of_type(index.free, ask.gpu.type)
    total = index.of_type(index.total, ask.gpu.type)
    if free is None or total is None:
        free, total = index.free[0], index.total[0]
    free, total = free[rows], total[rows]
    key = np.zeros(len(rows), np.int64)
    if ask.exclusive_user:
        key |= index.claimed[rows] > 0
    drawn = standing(ask, index, now, end_of(ask, now, horizon_minutes)).drawn[rows]
    key = key << 1 | drawn
    key = key << 1 | (drawn | ~_soon(ask, index, rows, now, horizon_minutes))
    key = key << 1 | (free < total)
    key = key << 8 | (MAX_FIT - np.clip(free - ask.gpu.count, 0, MAX_FIT))
    key <<= 10
    if topology is not None:
        key |= np.clip(topology[rows], 0, MAX_TOPOLOGY)
    return key << 32 | _spread(pod_uid, index, rows)


def score(
    ask: Ask,
    pod_uid: str,
    index: ViewIndex,
    rows: Ints,
    now: float,
    *,
    horizon_minutes: int,
    topology: Ints | None = None,
) -> npt.NDArray[np.int64]:
    """The scores that kube-scheduler adds up: int64[K], 0 <= score <= `MAX_SCORE`.

    The best of `rows` gets 10, the next 9 and so on, the rest 0: the distance between two nodes is
    always a whole step, so that a weight of 100 lets our order win over the in-tree scores.
    """
    ranks = rank(ask, pod_uid, index, rows, now, horizon_minutes=horizon_minutes, topology=topology)
    order = np.argsort(-ranks)
    scores = np.zeros(len(rows), np.int64)
    best = order[: MAX_SCORE + 1]
    scores[best] = np.arange(MAX_SCORE, MAX_SCORE - len(best), -1)
    return scores


def _soon(ask: Ask, index: ViewIndex, rows: Ints, now: float, horizon_minutes: int) -> Bools:
    """bool[K]: Slurm wants the node within the horizon after the pod's end."""
    limit = end_of(ask, now, horizon_minutes) + 60.0 * horizon_minutes
    windows = index.windows
    soon = index.plan_start < limit
    soon[windows.row[(windows.start < limit) & (windows.end > now)]] = True
    return soon[rows]


def _spread(pod_uid: str, index: ViewIndex, rows: Ints) -> Longs:
    """int64[K], 0 <= x < 2**32: a hash of pod and node (multiply-shift over two CRC-32)."""
    mixed = (index.salt[rows] ^ np.uint32(zlib.crc32(pod_uid.encode()))) * _MIX
    return (mixed ^ (mixed >> np.uint32(15))).astype(np.int64)
