"""Node groups, and how many of their GPUs each side may have. Pure.

Slurm gives GPUs to its jobs as it likes; what we decide is what pods get. So of the four numbers of
a group two bind pods (the ceiling of Kubernetes, and the floor of Slurm: GPUs that pods never
take); the other two (the ceiling of Slurm, the floor of Kubernetes) bind Slurm, which has to be
told so by its own means, and are watched here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.hostlist import expand

Amount = int | str
"""GPUs: a number, or a share of the group's GPUs such as `25%`."""

_PERCENT: Final = re.compile(r"(\d{1,3})%", re.ASCII)
MOST: Final = 10_000_000


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What one side has of a group.

    floor: GPUs, as a number or a share such as `25%`, that the other side leaves to it. ceiling:
        GPUs that it has at most; null: all but the floor of the other.
    """

    floor: Amount = 0
    ceiling: Amount | None = None


class NodeGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Some nodes of the pool, named by exactly one of `nodes`, `partition` and `selector`.

    name: for people, metrics and `slurmbridge status`.
    nodes: host list of Slurm nodes (`gpu[001-064]`).
    partition: the nodes of a Slurm partition.
    selector: labels of Kubernetes nodes.
    kubernetes: what pods have. Its ceiling is kept by slurmbridge; its floor must be kept by Slurm
        (GrpTRES of a QOS, a reservation), and is watched.
    slurm: what native jobs have. Its floor is kept by slurmbridge: pods never take these GPUs; its
        ceiling must be kept by Slurm, and is watched.
    """

    name: str
    nodes: str = ""
    partition: str = ""
    selector: Mapping[str, str] = {}
    kubernetes: Side = Side()
    slurm: Side = Side()


def gpus_of(amount: Amount, total: int) -> int:
    """GPUs of an amount, of a group with so many; a share is rounded down.

    Raises:
        ParseError: neither a number nor a share from 0% to 100%.

    """
    if isinstance(amount, int):
        if not 0 <= amount <= MOST:
            raise ParseError(str(amount), f"must be from 0 to {MOST} GPUs")
        return amount
    match = _PERCENT.fullmatch(amount)
    if match is None or int(match[1]) > 100:
        raise ParseError(amount, "must be a number of GPUs, or a share from 0% to 100%")
    return total * int(match[1]) // 100


def most_for_pods(group: NodeGroup, total: int) -> int:
    """How many GPUs of a group with `total` of them pods may hold: 0 to total."""
    most = max(0, total - gpus_of(group.slurm.floor, total))
    if group.kubernetes.ceiling is not None:
        most = min(most, gpus_of(group.kubernetes.ceiling, total))
    return most


def most_for_jobs(group: NodeGroup, total: int) -> int:
    """How many GPUs of a group with `total` of them native jobs should hold: 0 to total."""
    most = max(0, total - gpus_of(group.kubernetes.floor, total))
    if group.slurm.ceiling is not None:
        most = min(most, gpus_of(group.slurm.ceiling, total))
    return most


def faults(groups: Iterable[NodeGroup]) -> Iterator[tuple[str, str]]:
    """What is wrong with groups: (path below the list, sentence)."""
    names: set[str] = set()
    taken: dict[str, str] = {}
    for i, group in enumerate(groups):
        if not group.name or group.name in names:
            yield f"[{i}].name", "must be there, and be another group's nowhere"
        names.add(group.name)
        if [bool(group.nodes), bool(group.partition), bool(group.selector)].count(True) != 1:
            yield f"[{i}]", "needs exactly one of nodes, partition and selector"
        try:
            found = expand(group.nodes)
        except ParseError as error:
            yield f"[{i}].nodes", f"is not a host list: {error}"
            found = []
        for name in found:
            if taken.setdefault(name, group.name) != group.name:
                yield f"[{i}].nodes", f"{name} is in group {taken[name]} already"
                break
        yield from _amounts(i, group)


def _amounts(i: int, group: NodeGroup) -> Iterator[tuple[str, str]]:
    sides = (("kubernetes", group.kubernetes), ("slurm", group.slurm))
    good = True
    for word, side in sides:
        for what, amount in (("floor", side.floor), ("ceiling", side.ceiling)):
            try:
                gpus_of(amount or 0, 100)
            except ParseError as error:
                good = False
                yield f"[{i}].{word}.{what}", error.text
    if not good:
        return
    for word, side in sides:
        if type(side.floor) is type(side.ceiling) and (
            gpus_of(side.floor, 100) > gpus_of(side.ceiling or 0, 100)
        ):
            yield f"[{i}].{word}.floor", "is more than the ceiling"
    floors = [side.floor for _, side in sides]
    if all(isinstance(f, str) for f in floors) and sum(gpus_of(f, 100) for f in floors) > 100:
        yield f"[{i}]", "the floors of both sides are more than 100%"
