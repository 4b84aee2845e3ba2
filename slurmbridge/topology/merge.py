"""Several sources, one set of levels.

Precedence is the order of the sources. Per level and node the first source that knows counts;
later ones fill in nodes and levels that it does not know. Levels of different sources are matched
by name, and else by what they hold together: the same groups of nodes under another name are the
same level (`level0` of Slurm is the `rack` of the labels), finer groups go below, coarser ones
above; a level that cuts across is left out, and reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec
import numpy as np

from slurmbridge.pool.errors import Problem
from slurmbridge.pool.hostlist import natural
from slurmbridge.topology.index import UNPLACED, Ints
from slurmbridge.topology.source import CLUSTER, NODE, Places, sample

TOLERATED = 0.1
"""Share of the nodes that may contradict before two levels are taken to be unrelated: one wrong
label must not cost a whole level. The nodes that do are reported."""


class MergedLevel(msgspec.Struct):
    """One level. names: all that it is called, the shown one first. of: int64[N], by row."""

    names: list[str]
    domains: list[str]
    of: Ints
    source: str


class Merged(msgspec.Struct):
    """levels: closest first. order: rows as the sources list them."""

    levels: list[MergedLevel]
    order: list[int]
    problems: list[Problem]


class _Relation(Enum):
    SAME = "same"
    BELOW = "below"
    ABOVE = "above"
    ACROSS = "across"
    UNKNOWN = "unknown"


def merge(
    nodes: Sequence[str],
    sources: Sequence[Places],
    *,
    linked: bool | None = None,
) -> Merged:
    """Merge sources, the most trusted first.

    Args:
        nodes: the pool's nodes; others in the sources are counted in a problem, not used.
        sources: none with `side`.
        linked: whether nodes without a common domain may work together; None: as the sources say
            (one that says no is enough).

    """
    rows = {name: row for row, name in enumerate(nodes)}
    merged = Merged([], [], [])
    ends: tuple[Places, MergedLevel] | None = None
    for places in sources:
        own = _levels_of(places, rows)
        placed = _place(merged, own, places.source)
        if not places.linked and ends is None and placed:
            ends = places, placed[-1]
        _note_strangers(merged, places, rows)
    if linked is not True and ends is not None:
        _end_at(merged, *ends, nodes)
    elif linked is not False:
        _join_all(merged, len(nodes))
    listed = (rows[name] for places in sources for name in places.of if name in rows)
    unlisted = sorted(range(len(nodes)), key=lambda row: natural(nodes[row]))
    merged.order = list(dict.fromkeys((*listed, *unlisted)))
    return merged


def _levels_of(places: Places, rows: dict[str, int]) -> list[MergedLevel]:
    """The levels of one source by row; levels without any of our nodes are left out."""
    found = []
    for height, name in enumerate(places.levels):
        if name == NODE:
            continue  # every index has that level
        number: dict[str, int] = {}
        of = np.full(len(rows), UNPLACED, np.int64)
        for node, chain in places.of.items():
            domain = chain[height]
            if domain is not None and node in rows:
                of[rows[node]] = number.setdefault(domain, len(number))
        if number:
            found.append(MergedLevel([name], list(number), of, places.source))
    return found


def _place(merged: Merged, own: Iterable[MergedLevel], source: str) -> list[MergedLevel]:
    """Match each level of a source with one that is there, or put it between them.

    Returns:
        The levels that the source's own became, closest first.

    """
    at = 0
    placed: list[MergedLevel] = []
    for level in own:
        name = level.names[0]
        named = next((i for i, m in enumerate(merged.levels) if name in m.names), None)
        if named is not None and named < at:
            text = f"level {name} lies elsewhere than in {merged.levels[named].source}; left out"
            merged.problems.append(Problem(source, text))
            continue
        position, relation = _find(merged.levels, level, at) if named is None else (named, None)
        if relation is _Relation.ACROSS:
            other = merged.levels[position]
            text = f"level {name} cuts across {other.names[0]} of {other.source}; left out"
            merged.problems.append(Problem(source, text))
            continue
        if relation is _Relation.BELOW:
            merged.levels.insert(position, level)
        else:
            _fill(merged, merged.levels[position], level, source)
        placed.append(merged.levels[position])
        at = position + 1
    return placed


def _find(levels: Sequence[MergedLevel], level: MergedLevel, at: int) -> tuple[int, _Relation]:
    """Where a level belongs: a position and SAME, BELOW (what is there now) or ACROSS (it)."""
    for position in range(at, len(levels)):
        relation = _relate(level.of, levels[position].of)
        if relation is _Relation.UNKNOWN:
            return position, _Relation.SAME  # no common node: level by level from the bottom
        if relation is not _Relation.ABOVE:
            return position, relation
    return len(levels), _Relation.BELOW


def _relate(one: Ints, other: Ints) -> _Relation:
    """How the groups of one level lie in those of the other, over the nodes that both know."""
    both = (one != UNPLACED) & (other != UNPLACED)
    shared = int(both.sum())
    if not shared:
        return _Relation.UNKNOWN
    limit = int(TOLERATED * shared)
    inside = shared - int(_main_parents(one[both], other[both])[2].sum()) <= limit
    around = shared - int(_main_parents(other[both], one[both])[2].sum()) <= limit
    if inside and around:
        return _Relation.SAME
    if inside:
        return _Relation.BELOW
    return _Relation.ABOVE if around else _Relation.ACROSS


def _main_parents(child: Ints, parent: Ints) -> tuple[Ints, Ints, Ints]:
    """For each child group the parent group that most of its nodes are in.

    Returns:
        children, their parents, and how many nodes each such pair has: int64[groups] each.

    """
    pairs, counts = np.unique(np.stack((child, parent)), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))
    first = np.r_[True, np.diff(pairs[0][order]) != 0]
    best = order[first]
    return pairs[0][best], pairs[1][best], counts[best].astype(np.int64)


def _fill(merged: Merged, into: MergedLevel, level: MergedLevel, source: str) -> None:
    """Give nodes that `into` does not know their domain by `level`, in `into`'s words."""
    both = (into.of != UNPLACED) & (level.of != UNPLACED)
    number = {name: i for i, name in enumerate(into.domains)}
    words: dict[int, int] = {}
    if both.any():
        children, parents, _ = _main_parents(level.of[both], into.of[both])
        words = dict(zip(children.tolist(), parents.tolist(), strict=True))
    for domain, name in enumerate(level.domains):
        if domain not in words:
            if name not in number:
                number[name] = len(into.domains)
                into.domains.append(name)
            words[domain] = number[name]
    translate = np.array([words[d] for d in range(len(level.domains))], np.int64)
    meant = translate[level.of]
    differ = np.flatnonzero(both & (meant != into.of))
    if len(differ):
        text = (
            f"level {level.names[0]} differs from {into.names[0]} of {into.source}, which counts, "
            f"for {len(differ)} nodes"
        )
        merged.problems.append(Problem(source, text))
    missing = (into.of == UNPLACED) & (level.of != UNPLACED)
    into.of = np.where(missing, meant, into.of)
    into.names += [name for name in level.names if name not in into.names]


def _note_strangers(merged: Merged, places: Places, rows: dict[str, int]) -> None:
    strangers = [name for name in places.of if name not in rows]
    if strangers:
        text = f"{len(strangers)} nodes are not in the pool: {sample(strangers)}"
        merged.problems.append(Problem(places.source, text))


def _end_at(merged: Merged, tree: Places, last: MergedLevel, nodes: Sequence[str]) -> None:
    """Leave out what lies above the roots of a switch tree, and nodes outside of it.

    Slurm lets no job span two roots, nor use a node without a switch together with others. Whoever
    asks for an upper level is served by the roots, which are closer still.
    """
    position = next(i for i, level in enumerate(merged.levels) if level is last)
    for level in merged.levels[position + 1 :]:
        if len(set(last.of[level.of != UNPLACED].tolist())) > 1:
            text = f"level {level.names[0]} joins switches that Slurm does not link; not used"
            merged.problems.append(Problem(level.source, text))
        last.names += [name for name in level.names if name not in last.names]
    del merged.levels[position + 1 :]
    outside = np.array([name not in tree.of for name in nodes], np.bool_)
    placed = outside & np.logical_or.reduce([level.of != UNPLACED for level in merged.levels])
    if placed.any():
        names = sample(nodes[row] for row in np.flatnonzero(placed).tolist())
        text = f"nodes without a switch, which Slurm uses alone only: {names}"
        merged.problems.append(Problem(tree.source, text))
    for level in merged.levels:
        level.of = np.where(outside, UNPLACED, level.of)


def _join_all(merged: Merged, count: int) -> None:
    """Put one domain above everything, unless the top level is that already."""
    top = merged.levels[-1] if merged.levels else None
    if top is not None and len(top.domains) == 1 and not (top.of == UNPLACED).any():
        top.names += [CLUSTER] if CLUSTER not in top.names else []
    else:
        name = CLUSTER
        while any(name in level.names for level in merged.levels):
            name = f"whole-{name}"
        of = np.zeros(count, np.int64)
        merged.levels.append(MergedLevel([name], [name], of, name))
