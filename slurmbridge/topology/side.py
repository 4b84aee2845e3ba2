"""The accelerator dimension (NVLink domains) beside the tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmbridge.pool.errors import Problem
from slurmbridge.topology.index import UNPLACED
from slurmbridge.topology.merge import Merged, MergedLevel, merge
from slurmbridge.topology.source import Places


def side_levels(nodes: Sequence[str], tree: Merged, sources: Sequence[Places]) -> Merged | None:
    """The accelerator dimension: into the tree where it nests, else a small tree of its own.

    Of its own: its levels, cut where the tree's top domains end, under those top domains, so that
    nothing that is not linked is joined through the side.
    """
    if not sources:
        return None
    top = tree.levels[-1] if tree.levels else None
    own = merge(nodes, sources, linked=False)
    apart: list[MergedLevel] = []
    at = 0
    for level in own.levels:
        position = _nests(tree.levels, level, at) if not apart else None
        if position is None:
            apart.append(level)
        else:
            at = position + 1
    tree.problems += own.problems
    if not apart:
        return None
    text = f"level {apart[0].names[0]} does not nest into the tree: kept as a dimension of its own"
    tree.problems.append(Problem(sources[0].source, text))
    levels = [_cut(level, top) for level in apart]
    if top is not None:
        levels.append(MergedLevel(list(top.names), list(top.domains), top.of.copy(), top.source))
    return Merged(levels, tree.order, [])


def _nests(levels: list[MergedLevel], level: MergedLevel, at: int) -> int | None:
    """Put a level where it is exactly coarser than all below and finer than all above it."""
    for position in range(at, len(levels) + 1):
        below, above = levels[at:position], levels[position:]
        if position < len(levels) and _inside(level, levels[position]):
            if _inside(levels[position], level) and _covers(levels[position], level):
                levels[position].names += level.names
                return position
            if all(_fills(b, level) for b in below) and all(_inside(level, a) for a in above):
                levels.insert(position, level)
                return position
    return None


def _inside(one: MergedLevel, other: MergedLevel) -> bool:
    """Whether each group of one lies in one group of the other, over the nodes that both know."""
    both = (one.of != UNPLACED) & (other.of != UNPLACED)
    pairs = np.unique(np.stack((one.of[both], other.of[both])), axis=1)
    return bool(len(np.unique(pairs[0])) == pairs.shape[1])


def _fills(one: MergedLevel, other: MergedLevel) -> bool:
    """As `_inside`, and no group of one is only partly known to the other."""
    known = one.of != UNPLACED
    pairs = np.unique(np.stack((one.of[known], other.of[known])), axis=1)
    return bool(len(np.unique(pairs[0])) == pairs.shape[1])


def _covers(one: MergedLevel, other: MergedLevel) -> bool:
    return bool(np.array_equal(one.of != UNPLACED, other.of != UNPLACED))


def _cut(level: MergedLevel, top: MergedLevel | None) -> MergedLevel:
    """The level with domains that lie in two of the top's split into two."""
    if top is None:
        return level
    known = level.of != UNPLACED
    pairs, number = np.unique(
        np.stack((level.of[known], top.of[known])), axis=1, return_inverse=True
    )
    of = np.full(len(level.of), UNPLACED, np.int64)
    of[known] = number.reshape(-1)
    parts = np.bincount(pairs[0], minlength=len(level.domains))
    domains = [
        level.domains[d] if parts[d] == 1 else f"{level.domains[d]}@{_name(top, t)}"
        for d, t in pairs.T
    ]
    return MergedLevel(level.names, domains, of, level.source)


def _name(level: MergedLevel, domain: int) -> str:
    return level.domains[domain] if domain != UNPLACED else "unplaced"
