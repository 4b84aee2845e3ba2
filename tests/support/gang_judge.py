"""Judges the plans of gangs from the bridge's log, by means of its own.

A plan in the log (`gang laid`, level debug) says what room the planner saw and where it put each
member. Two questions, answered without any code of the product: was what it saw the truth (Slurm's
jobs, by their start and end), and was what it chose the least that this room allowed (every set of
domains tried)?
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, NamedTuple

from ClusterShell.NodeSet import NodeSet

from tests.support.checker import read_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.support.checker import Job

Key = tuple[int, ...]
"""Height of the lowest domain that holds the gang (0: a node), then how many domains are used of
each level below it, from the top down. Less is better."""


class Plan(NamedTuple):
    """A plan as the log tells it. at: Unix seconds. seats: (pod, GPUs, node) by rank."""

    at: float
    gang: str
    seats: tuple[tuple[str, int, str], ...]
    room: dict[str, int]
    beside: tuple[str, ...]


class Tree(NamedTuple):
    """Where nodes stand: rack and zone by node."""

    rack: Callable[[str], int]
    zone: Callable[[str], int]

    def levels(self, node: str) -> tuple[object, object, object, object]:
        """Domains of a node, closest first; the last one holds all."""
        return node, self.rack(node), self.zone(node), 0


def read_plans(log: str) -> list[Plan]:
    """All plans of a bridge's log, in order."""
    plans = []
    for line in log.splitlines():
        if '"gang laid"' not in line:
            continue
        told = json.loads(line)
        room = {node: int(n) for n, nodes in told["room"].items() for node in NodeSet(nodes)}
        seats = tuple((pod, gpus, node) for pod, gpus, node in told["seats"])
        plans.append(Plan(_moment(told["ts"]), told["gang"], seats, room, tuple(told["beside"])))
    return plans


def refusals(log: str) -> list[tuple[float, str]]:
    """When Slurm refused a claim on which node: the planner leaves such a node out for a while."""
    told = [json.loads(line) for line in log.splitlines() if '"claim refused"' in line]
    return [(_moment(line["ts"]), line["node"]) for line in told]


class Placed(NamedTuple):
    """A member where it is bound. pod: `namespace/name`. claim: its own, or its gang's."""

    pod: str
    node: str
    claim: Job


def unplanned(members: Sequence[Placed], plans: Sequence[Plan]) -> list[str]:
    """Members of a gang that stand where no plan has put them from which their claim was made.

    The last plan need not be the one that was carried out: a leader may plan while the claim that
    the one before it has asked for is being granted, and finds that then. So in one claim for all
    they stand on the nodes of any plan that is older than the claim; with one each, everyone does.
    """
    found = []
    for claim in {member.claim.id: member.claim for member in members}.values():
        mates = [member for member in members if member.claim.id == claim.id]
        laid = [
            sorted(node for pod, _, node in plan.seats if claim.group or pod == mates[0].pod)
            for plan in plans
            if plan.at < local_time(claim.start) + 1  # Slurm's times are whole seconds
            and any(pod == mates[0].pod for pod, *_ in plan.seats)
        ]
        if sorted(member.node for member in mates) not in laid:
            found.append(f"job {claim.id} of {mates[0].pod} and {len(mates) - 1} more: {mates}")
    return found


def key_of(plan: Plan, tree: Tree) -> Key:
    """What a plan uses."""
    used = [{tree.levels(node)[h] for *_, node in plan.seats} for h in range(4)]
    height = next(h for h in range(4) if len(used[h]) == 1)
    return (height, *(len(used[h]) for h in range(height - 1, -1, -1)))


def least(plan: Plan, tree: Tree) -> Key | None:
    """The least that the room of a plan allowed for pods of one size, by trying every way."""
    gpus = plan.seats[0][1]
    assert all(seat[1] == gpus for seat in plan.seats)
    wanted = len(plan.seats)
    fits = {node: free // gpus for node, free in plan.room.items() if free >= gpus}
    if any(n >= wanted for n in fits.values()):
        return (0,)
    racks = sorted({tree.rack(n) for n in fits})
    found: list[Key] = []
    for count in range(1, len(racks) + 1):
        for some in combinations(racks, count):
            inside = sorted(
                (n for node, n in fits.items() if tree.rack(node) in some), reverse=True
            )
            if sum(inside) < wanted:
                continue
            nodes = next(k for k in range(1, len(inside) + 1) if sum(inside[:k]) >= wanted)
            zones = {tree.zone(node) for node in fits if tree.rack(node) in some}
            if count == 1:
                found.append((1, nodes))
            elif len(zones) == 1:
                found.append((2, count, nodes))
            else:
                found.append((3, len(zones), count, nodes))
    return min(found, default=None)


def best_beside(plan: Plan, tree: Tree) -> int | None:
    """For members that came beside others: the lowest height of a domain around these with room."""
    gpus = plan.seats[0][1]
    for height in range(4):
        around = {tree.levels(node)[height] for node in plan.beside}
        room = sum(
            n // gpus for node, n in plan.room.items() if tree.levels(node)[height] in around
        )
        if len(around) == 1 and room >= len(plan.seats):
            return height
    return None


def breaks(names: Sequence[object]) -> int:
    """How often a walk by rank comes back to a domain that it had left."""
    changes = sum(a != b for a, b in pairwise(names))
    return changes - (len(set(names)) - 1)


class Truth:
    """What was in use when, from Slurm's own job records (`scontrol show job -d -o`)."""

    def __init__(self, text: str, total: int, slack_s: float) -> None:
        """Args:

        total: GPUs of each node.
        slack_s: Slurm's times are whole seconds, and a reading is as old as its poll.
        """
        self._total, self._slack = total, slack_s
        ends = {
            int(job_id): end
            for job_id, end in re.findall(r"^JobId=(\d+).*? EndTime=(\S+)", text, re.MULTILINE)
        }
        # Of a job that is over Slurm tells no more which GPUs it had, but what it asked for.
        asked = {
            int(job_id): int(count)
            for job_id, count in re.findall(
                r"^JobId=(\d+).* TresPerNode=gres[:/]gpu[:=](?:\w+:)?(\d+)\s", text, re.MULTILINE
            )
        }
        self._held: list[tuple[float, float, str, int, int]] = []
        for job in read_jobs(text):
            if job.start == "Unknown":
                continue
            start, is_over = local_time(job.start), job.state != "RUNNING"
            end = local_time(ends[job.id]) if is_over else float("inf")
            for node in job.nodes:
                least, most = asked.get(job.id, 0), asked.get(job.id, total)
                if not is_over and node in job.gpus:
                    least = most = job.gpus[node][0]
                self._held.append((start, end, node, least, most))

    def limits(self, node: str, at: float) -> tuple[int, int]:
        """The fewest and the most GPUs that may have been free then, as far as can be told."""
        sure = maybe = 0
        for start, end, where, least, most in self._held:
            if where != node:
                continue
            if start < at - self._slack and end > at + self._slack:
                sure += least
            if start < at + self._slack and end > at - self._slack:
                maybe += most
        return max(0, self._total - maybe), self._total - sure


def untrue(
    plans: Iterable[Plan], truth: Truth, nodes: Sequence[str], refused: Sequence[tuple[float, str]]
) -> list[str]:
    """Where a plan saw more or less room than there was.

    A node on which not even the smallest member fits is of no use to a plan, and need not be in it.
    """
    found = []
    for plan in plans:
        smallest = min(gpus for _, gpus, _ in plan.seats)
        paused = {node for at, node in refused if at <= plan.at <= at + 60}
        for node in nodes:
            seen = plan.room.get(node, 0)
            low, high = truth.limits(node, plan.at)
            hidden = not seen and (low < smallest or node in paused)
            if not (low <= seen <= high or hidden):
                found.append(f"{plan.gang}: {node} had {low} to {high} free, the plan saw {seen}")
    return found


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def local_time(text: str) -> float:
    """Unix seconds of a time as scontrol prints it."""
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
