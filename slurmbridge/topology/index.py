"""The topology of one generation as arrays: what requests work on.

Two numberings of nodes: *rows* are the caller's (the order of his names), *places* are ours: along
the tree, so that every domain is one range of places and its children are one range of the level
below. Heights count from the node: 0 is the node itself, 1 the closest domain.

A node that has no domain at a height stands alone there, or, where only a middle level is missing,
with what stands together below: such a *stand-in* never joins anything that is not joined lower
down already. So every node has exactly one domain at every height and no level needs a special
case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from slurmbridge.topology.source import NODE

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

UNPLACED = -1
"""In `TopologyRecord.of`: the node has no domain at that level, or none is known."""


class Level(msgspec.Struct, frozen=True):
    """One level above the node. names: the first is shown, the others are understood too."""

    names: tuple[str, ...]
    domains: tuple[str, ...]


class TopologyRecord(msgspec.Struct, frozen=True):
    """A topology as plain values, fit for a wire.

    nodes: in the caller's order. levels: closest to the node first.
    of: per level, per node, a number of the level's `domains`, or `UNPLACED`. Domains are nested:
    nodes that share one share everything above it.
    order: the nodes as numbers, in the order in which the sources list them.
    side: the accelerator dimension where it does not nest into the tree.
    """

    nodes: tuple[str, ...]
    levels: tuple[Level, ...]
    of: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    side: TopologyRecord | None = None


class TopologyIndex(msgspec.Struct, frozen=True, eq=False):
    """A `TopologyRecord`, compiled. N nodes, H levels above the node, D[h] domains at height h.

    nodes, row_of: the caller's rows. row[place]: int64[N], the row at a place; place[row]: back.
    levels: names by height, `levels[0]` is "node". height_of: also knows all other names.
    bounds[h]: int64[D[h] + 1], places of domain d are bounds[h][d] up to bounds[h][d + 1].
    children[h]: int64[D[h] + 1], the same for domains of height h - 1; empty at height 0.
    parent[h]: int64[D[h]], domain number at height h + 1; empty at the top.
    domain[h]: int64[N] by place. names[h][d]: the domain's name.
    Domains of the top level are not linked: nothing spans two of them.
    """

    nodes: tuple[str, ...]
    row_of: Mapping[str, int]
    row: Ints
    place: Ints
    levels: tuple[str, ...]
    height_of: Mapping[str, int]
    bounds: tuple[Ints, ...]
    children: tuple[Ints, ...]
    parent: tuple[Ints, ...]
    domain: tuple[Ints, ...]
    names: tuple[tuple[str, ...], ...]
    side: TopologyIndex | None = None

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def top(self) -> int:
        """The greatest height."""
        return len(self.levels) - 1

    def sums(self, by_place: Ints, height: int) -> Ints:
        """Sums over the domains of a height: int64[D[h]]. O(N)."""
        if not len(by_place):
            return np.zeros(0, np.int64)
        return np.add.reduceat(by_place, self.bounds[height][:-1])

    def path(self, row: int) -> tuple[str, ...]:
        """Names of a node's domains, closest first, for people."""
        place = self.place[row]
        return tuple(self.names[h][self.domain[h][place]] for h in range(1, self.top + 1))


def compile_index(record: TopologyRecord) -> TopologyIndex:
    """Compile a record. O(N * H), numpy sorts; a few milliseconds for 5,000 nodes."""
    count = len(record.nodes)
    numbers = [np.arange(count, dtype=np.int64)]
    names: list[Sequence[str]] = [record.nodes]
    for level, of in zip(record.levels, record.of, strict=True):
        known = np.asarray(of, np.int64).reshape(count)
        below = numbers[-1]
        lone = known == UNPLACED
        number = np.where(lone, len(level.domains) + below, known)
        numbers.append(number)
        names.append(_Names(level.domains, names[-1]))
    row = _along_the_tree(numbers, np.asarray(record.order, np.int64).reshape(count))
    place = np.empty(count, np.int64)
    place[row] = np.arange(count)
    bounds, domain, shown = [], [], []
    for number, having in zip(numbers, names, strict=True):
        here = number[row]
        starts = np.flatnonzero(np.r_[True, here[1:] != here[:-1]][:count])
        bounds.append(np.r_[starts, count].astype(np.int64))
        domain.append(np.repeat(np.arange(len(starts)), np.diff(bounds[-1])))
        shown.append(tuple(having[int(d)] for d in here[starts]))
    children = [np.zeros(0, np.int64)]
    parent = []
    for height in range(1, len(numbers)):
        children.append(np.searchsorted(bounds[height - 1], bounds[height]).astype(np.int64))
        parent.append(domain[height][bounds[height - 1][:-1]])
    parent.append(np.zeros(0, np.int64))
    levels = (NODE, *(level.names[0] for level in record.levels))
    height_of = {name: h for h, level in enumerate(record.levels, 1) for name in level.names}
    return TopologyIndex(
        nodes=record.nodes,
        row_of={name: number for number, name in enumerate(record.nodes)},
        row=row,
        place=place,
        levels=levels,
        height_of={NODE: 0, **height_of},
        bounds=tuple(bounds),
        children=tuple(children),
        parent=tuple(parent),
        domain=tuple(domain),
        names=tuple(shown),
        side=None if record.side is None else compile_index(record.side),
    )


class _Names(Sequence[str]):
    """Names of a level's domains, then those of the level below for its stand-ins."""

    def __init__(self, own: Sequence[str], below: Sequence[str]) -> None:
        self._own, self._below = own, below

    def __len__(self) -> int:
        return len(self._own) + len(self._below)

    def __getitem__(self, number: int) -> str:  # type: ignore[override]  # no slices are taken
        own = len(self._own)
        return self._own[number] if number < own else self._below[number - own]


def _along_the_tree(numbers: Sequence[Ints], order: Ints) -> Ints:
    """Rows in tree order: domains, and nodes in them, as they first appear in `order`."""
    appears = np.empty(len(order), np.int64)
    appears[order] = np.arange(len(order))
    keys = [appears]
    for number in numbers[1:]:
        _, inverse = np.unique(number, return_inverse=True)
        first = np.full(inverse.max(initial=-1) + 1, len(order), np.int64)
        np.minimum.at(first, inverse, appears)
        keys.append(first[inverse])
    return np.lexsort(keys).astype(np.int64)
