"""Exhaustive packing: tries every set of nodes. Shares no code with the product.

A tree here is one tuple of domain names per node, closest first, all of the same length.
"""

from functools import cache
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """One question: where nodes stand, what is free, what is asked.

    types: of each pod, 0 for GPUs of any type, 1 or 2; by_type: free GPUs of types 1 and 2 by node.
    Both are empty where there is one type.
    """

    paths: list[tuple[str, ...]]
    free: list[int]
    gpus: tuple[int, ...]
    segment: int = 0
    segment_height: int = 1
    slots: list[int] | None = None
    types: tuple[int, ...] = ()
    by_type: list[tuple[int, int]] = []  # noqa: RUF012 - never changed

    @property
    def pods(self):
        """(GPUs, type) by rank."""
        return list(zip(self.gpus, self.types or (0,) * len(self.gpus), strict=True))

    @property
    def names(self):
        return [f"n{i:02}" for i in range(len(self.paths))]


def random_case(seed: int) -> Case:
    """Up to 12 nodes and 3 levels above them, uneven, with loaded nodes, all kinds of gangs."""
    rng = np.random.default_rng(seed)

    def pick(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    count = min(12, pick(1, 16))
    depth = pick(1, 3)
    paths = _random_paths(rng, count, depth)
    biggest = int(rng.choice([1, 2, 4, 8]))
    free = [(0, biggest, biggest, pick(0, biggest))[pick(0, 3)] for _ in range(count)]
    if rng.random() < 0.6:
        size = pick(1, biggest)
        room = sum(f // size for f in free)
        gpus = (size,) * pick(1, max(1, min(24, room + 1)))
    else:
        sizes = sorted({pick(1, biggest) for _ in range(pick(2, 3))})
        gpus = tuple(int(rng.choice(sizes)) for _ in range(pick(2, 8)))
    segment = 0
    if rng.random() < 0.4:
        segment = int(rng.choice([d for d in range(1, len(gpus) + 1) if len(gpus) % d == 0]))
    slots = [pick(0, 4) for _ in range(count)] if rng.random() < 0.2 else None
    case = Case(paths, free, gpus, segment, pick(0, depth), slots)
    return case if rng.random() < 0.7 else _of_two_types(rng, case)


def _of_two_types(rng: np.random.Generator, case: Case) -> Case:
    """Most nodes have GPUs of one type, some of both; some gangs have pods that take either."""
    by_type = []
    for free in case.free:
        first = int(rng.choice([0, free, free, rng.integers(0, free + 1)]))
        by_type.append((first, free - first))
    kinds = [0, 1, 2] if rng.random() < 0.3 else [1, 2]
    types = tuple(int(rng.choice(kinds)) for _ in case.gpus)
    return case._replace(types=types, by_type=by_type)


def _random_paths(rng: np.random.Generator, count: int, depth: int) -> list[tuple[str, ...]]:
    """Nested random groups; mostly with one at the top."""
    group = list(range(count))
    columns = []
    for height in range(depth):
        groups = max(group) + 1
        wanted = int(rng.integers(1, groups + 1))
        if height == depth - 1 and rng.random() < 0.8:
            wanted = 1
        lump = rng.integers(0, wanted, groups).tolist()
        group = [lump[g] for g in group]
        columns.append([f"d{g}" for g in group])
    return list(zip(*columns, strict=True))


def best(case: Case) -> tuple[int, ...] | None:
    """(height, domains used of each level from the top down to the nodes), least; None: no way.

    Over every set of nodes: the height of the lowest domain around it, what it uses, and whether
    the gang fits on it.
    """
    return min((key for key, _ in _feasible(case)), default=None)


def best_fit(case: Case) -> tuple[int, ...] | None:
    """The same, then the free GPUs of the domain and of all that is used below it, least."""
    return min((key + fit for key, fit in _feasible(case)), default=None)


def _feasible(case: Case):
    """Keys of the sets that hold the gang, at least all that are least by height and spread."""
    count = len(case.paths)
    sets = (np.arange(1, 1 << count)[:, None] >> np.arange(count)) & 1
    sets = sets[(sets * (np.array(case.free) > 0)).sum(axis=1) == sets.sum(axis=1)]
    free = np.array(case.free)
    sets = sets[sets @ free >= sum(case.gpus)]
    sets = sets[sets.sum(axis=1) <= len(case.gpus)]
    levels = [[f"n{i}" for i in range(count)], *map(list, zip(*case.paths, strict=True))]
    used, spoiled = [], []
    for level in levels:
        touched = np.zeros(len(sets), np.int64)
        value = np.zeros(len(sets), np.int64)
        for domain in set(level):
            inside = np.array([d == domain for d in level])
            hit = (sets @ inside.astype(int)) > 0
            touched += hit
            value += hit * int(free[inside].sum())
        used.append(touched)
        spoiled.append(value)
    found = []
    for number, line in enumerate(sets):
        height = next((h for h in range(len(levels)) if used[h][number] == 1), None)
        if height is None:
            continue
        key = (height, *(int(used[h][number]) for h in range(height - 1, -1, -1)))
        fit = tuple(int(spoiled[h][number]) for h in range(height, -1, -1))
        found.append((key, fit, line))
    found.sort(key=lambda item: item[:2])
    least = None
    for key, fit, line in found:
        if least is not None and key > least:
            return
        if _fits(case, np.flatnonzero(line).tolist()):
            least = key
            yield key, fit


def _fits(case: Case, nodes: list[int]) -> bool:
    """Whether the gang fits on these nodes, by trying every way."""
    pods = case.pods
    slots = case.slots or [len(pods)] * len(case.free)
    by_type = case.by_type or [(free, 0) for free in case.free]
    space = [(*free, slot) for free, slot in zip(by_type, slots, strict=True)]
    segment = case.segment if 0 < case.segment < len(pods) else len(pods)
    pieces = [tuple(sorted(pods[i : i + segment])) for i in range(0, len(pods), segment)]
    if not case.segment:
        return _pods_fit(tuple(sorted(pods)), tuple(sorted(space[n] for n in nodes)))
    height = case.segment_height
    groups: dict[str, list[int]] = {}
    for n in nodes:
        name = f"n{n}" if height == 0 else case.paths[n][height - 1]
        groups.setdefault(name, []).append(space[n])
    frees = [tuple(sorted(g)) for g in groups.values()]
    return _pieces_fit(tuple(sorted(pieces)), tuple(frees))


@cache
def _pieces_fit(pieces, groups) -> bool:
    """Each piece in one group; a group holds the pods of all its pieces."""
    if not groups:
        return not pieces
    kinds = sorted(set(pieces))
    counts = [pieces.count(k) for k in kinds]
    for taken in np.ndindex(*(c + 1 for c in counts)):
        pods = tuple(sorted(p for k, t in zip(kinds, taken, strict=True) for p in k * t))
        if not _pods_fit(pods, groups[0]):
            continue
        rest = tuple(k for k, c, t in zip(kinds, counts, taken, strict=True) for _ in range(c - t))
        if _pieces_fit(rest, groups[1:]):
            return True
    return False


@cache
def _pods_fit(pods, free) -> bool:
    """Bin packing by trying every node for the largest pod, and every way to take its GPUs there.

    free: GPUs of type 1, of type 2, and number of pods, of each node.
    """
    if not pods:
        return True
    if sum(gpus for gpus, _ in pods) > sum(one + two for one, two, _ in free):
        return False
    largest, kind = pods[-1]
    for one, two, slots in set(free):
        low, high = max(0, largest - two), min(largest, one)
        ways = {0: range(low, high + 1), 1: [largest], 2: [0]}[kind]
        for taken in ways if slots else ():
            if one >= taken and two >= largest - taken:
                left = list(free)
                left.remove((one, two, slots))
                left.append((one - taken, two - (largest - taken), slots - 1))
                if _pods_fit(pods[:-1], tuple(sorted(left))):
                    return True
    return False
