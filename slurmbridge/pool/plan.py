"""The plan: when Slurm's backfill means to start pending jobs, and on which nodes.

Sources: `squeue -o "%S|%Y"` (StartTime, SchedNodeList) and the node flag PLANNED
(sched/backfill; visible one backfill cycle after the submit).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurmbridge.pool.record import Reservation, SlurmJob, SlurmNode
from slurmbridge.pool.reserved import cpus_of, terms_of
from slurmbridge.pool.view import Window

PLANNED_ALONE_S = 600
"""A node that stays PLANNED this long while no pending job names it: the flag was not cleared
(seen in Slurm before 24.11.2). After that the flag alone no longer keeps pods away."""


def planned_starts(jobs: Iterable[SlurmJob]) -> dict[str, float]:
    """The earliest planned start on each node, Unix seconds."""
    starts: dict[str, float] = {}
    for job in jobs:
        if job.state.base != "PENDING" or job.start is None:
            continue
        for name in job.planned_nodes:
            if job.start < starts.get(name, float("inf")):
                starts[name] = job.start
    return starts


def planned_alone(
    nodes: Iterable[SlurmNode],
    starts: Mapping[str, float],
    since: Mapping[str, float],
    now: float,
) -> dict[str, float]:
    """Nodes that are PLANNED although no job that we can see is planned there.

    Args:
        nodes: all nodes.
        starts: result of `planned_starts`.
        since: result of the reading before.
        now: Unix seconds.

    Returns:
        node name -> since when; those older than `PLANNED_ALONE_S` count as planned no more.

    """
    return {
        node.name: since.get(node.name, now)
        for node in nodes
        if "PLANNED" in node.state.flags and node.name not in starts
    }


def plan_start(
    name: str,
    starts: Mapping[str, float],
    alone: Mapping[str, float],
    now: float,
    ahead_s: float = 0.0,
) -> float | None:
    """When the first pending job is planned to start on a node; None: nothing is planned.

    Of a flag without a job it is not known for when: from when on it was seen, so that the answer
    stays the same from reading to reading.
    """
    if name in starts:
        return starts[name]
    if name in alone and now - alone[name] < PLANNED_ALONE_S:
        return alone[name] + ahead_s
    return None


def windows_by_node(
    reservations: Iterable[Reservation],
    nodes: Mapping[str, SlurmNode],
    user: str = "",
    *,
    exact: bool = True,
) -> dict[str, tuple[Window, ...]]:
    """The reserved times of each node, by start. Reservations without nodes reserve no node.

    Args:
        reservations: all of them.
        nodes: all nodes; those that are not known are reserved as a whole.
        user: the Slurm user of our claims, "" when its name is not known.
        exact: see `reserved.terms_of`.

    """
    found: dict[str, list[Window]] = {}
    for reservation in reservations:
        terms = terms_of(reservation, user, exact=exact)
        cpus = cpus_of(reservation, nodes)
        for name in reservation.nodes:
            part = cpus if cpus and cpus < nodes[name].cpus_total else 0
            window = Window(reservation.name, reservation.start, reservation.end, terms, part)
            found.setdefault(name, []).append(window)
    return {name: tuple(sorted(ws, key=lambda w: w.start)) for name, ws in found.items()}
