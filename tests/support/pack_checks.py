"""Turn an oracle case into a call of the product, and its answer into the oracle's terms."""

from collections import Counter
from itertools import pairwise

import numpy as np

from slurmbridge.topology.gang import Gang, Placement
from slurmbridge.topology.index import Level, TopologyIndex, TopologyRecord, compile_index
from slurmbridge.topology.pack import pack
from tests.support.pack_oracle import Case


def index_of(paths: list[tuple[str, ...]]) -> TopologyIndex:
    """An index of nodes by their domains, closest first."""
    levels, of = [], []
    for number, column in enumerate(zip(*paths, strict=True), 1):
        domains = tuple(dict.fromkeys(column))
        levels.append(Level((f"level{number}",), domains))
        of.append(tuple(domains.index(d) for d in column))
    names = tuple(f"n{i:02}" for i in range(len(paths)))
    return compile_index(TopologyRecord(names, tuple(levels), tuple(of), tuple(range(len(names)))))


def answer(case: Case, **options):
    """The product's answer to a case."""
    index = index_of(case.paths)
    gang = Gang(case.gpus, case.segment, index.levels[case.segment_height], case.types)
    slots = None if case.slots is None else np.array(case.slots)
    free = np.array(case.free)
    if case.by_type:
        free = np.array([case.free, *zip(*case.by_type, strict=True)])
    return index, pack(index, free, gang, slots=slots, **options)


def key_of(case: Case, index: TopologyIndex, placement: Placement) -> tuple[int, ...]:
    """(height, spread from the top down) of a placement, counted from its rows."""
    levels = [list(range(len(case.paths))), *map(list, zip(*case.paths, strict=True))]
    used = [len({level[row] for row in placement.rows}) for level in levels]
    height = used.index(1)
    return (height, *(used[h] for h in range(height - 1, -1, -1)))


def fit_of(case: Case, placement: Placement) -> tuple[int, ...]:
    """Free GPUs in the domain and in all that is used below it."""
    levels = [list(range(len(case.paths))), *map(list, zip(*case.paths, strict=True))]
    height = next(
        h for h, level in enumerate(levels) if len({level[r] for r in placement.rows}) == 1
    )
    sums = []
    for level in levels[height::-1]:
        used = {level[row] for row in placement.rows}
        sums.append(sum(f for f, d in zip(case.free, level, strict=True) if d in used))
    return tuple(sums)


def breaks_of(case: Case, placement: Placement) -> list[int]:
    """Per level from the node up: how often the next rank is in another domain, beyond need."""
    levels = [list(range(len(case.paths))), *map(list, zip(*case.paths, strict=True))]
    breaks = []
    for level in levels:
        walk = [level[row] for row in placement.rows]
        changes = sum(a != b for a, b in pairwise(walk))
        breaks.append(changes - (len(set(walk)) - 1))
    return breaks


def faults_of(case: Case, placement: Placement) -> list[str]:
    """What makes a placement impossible: a node over its free GPUs, a segment over two domains."""
    faults = []
    load = Counter()
    for row, gpus in zip(placement.rows, case.gpus, strict=True):
        load[row] += gpus
    faults += [f"node {r} has {case.free[r]}, got {g}" for r, g in load.items() if g > case.free[r]]
    for row, (one, two) in enumerate(case.by_type):
        here = [pod for r, pod in zip(placement.rows, case.pods, strict=True) if r == row]
        asked = [sum(gpus for gpus, kind in here if kind == k) for k in (1, 2)]
        if asked[0] > one or asked[1] > two:
            faults.append(f"node {row} has {one} and {two} of the two types, got {asked}")
    pods = Counter(placement.rows)
    if case.slots:
        faults += [f"node {r} may take {case.slots[r]}" for r in pods if pods[r] > case.slots[r]]
    if case.segment:
        height = case.segment_height
        for start in range(0, len(case.gpus), case.segment):
            rows = placement.rows[start : start + case.segment]
            where = {r if height == 0 else case.paths[r][height - 1] for r in rows}
            if len(where) > 1:
                faults.append(f"segment at rank {start} is in {where}")
    return faults
