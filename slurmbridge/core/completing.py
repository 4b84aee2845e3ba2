"""Jobs that are over and whose nodes Slurm has not back: their Epilogs run, or hang.

slurmctld gives nothing of such a node to anyone, and we no pod. That is no fault for seconds; where
it lasts, somebody has to look at the node.
"""

from __future__ import annotations

from typing import NamedTuple

from slurmbridge.core.state import State
from slurmbridge.pool.record import SlurmJob

LONG_S = 60.0
"""A job that is over for so long is told of."""


class Completing(NamedTuple):
    """Jobs on pool nodes that are completing for long; nodes by their Slurm names, sorted.

    longest_s: since when the first of them is over, seconds; 0.0: there is none.
    """

    longest_s: float = 0.0
    nodes: tuple[str, ...] = ()
    jobs: tuple[int, ...] = ()


def longest_s(state: State) -> float:
    """Seconds since the end of the job that completes for longest on pool nodes; 0.0: none does."""
    return max((since_s for _, since_s in _all(state).values()), default=0.0)


def long_ones(state: State) -> Completing:
    """The jobs that are completing for `LONG_S` and more, and the pool nodes that wait for it."""
    found = {i: (job, s) for i, (job, s) in _all(state).items() if s >= LONG_S}
    if not found:
        return Completing()
    nodes = {name for job, _ in found.values() for name in job.nodes if name in state.kube_of}
    longest = max(since_s for _, since_s in found.values())
    return Completing(longest, tuple(sorted(nodes)), tuple(sorted(found)))


def _all(state: State) -> dict[int, tuple[SlurmJob, float]]:
    """Jobs that complete on pool nodes, and for how long they did at the time of the reading.

    Not until now: what is not read any more may have come to its end long ago.
    """
    if state.snapshot is None:
        return {}
    read = state.snapshot.config.told_at or state.snapshot.ended + state.ahead_s
    return {
        job.id: (job, max(0.0, read - job.end))
        for name in state.kube_of
        for job in state.jobs_on.get(name, ())
        if "COMPLETING" in job.state.flags and job.end is not None
    }
