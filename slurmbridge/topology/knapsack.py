"""Exact packing inside a tree: the cheapest way to lay so many pods under a domain.

A tree knapsack. The table of a domain says for every number of pods (for mixed sizes: every vector
of numbers, one a size) the least cost of laying exactly these under it; tables of siblings are
joined two by two by a (min, +) convolution, whose result is the table of their parent once its own
cost is added. A cost is one integer that packs several counts, the most important in its highest
bits, so that one addition adds all of them and one comparison compares them in order.

All siblings of a level are joined at once, in numpy, in rounds that halve their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
State = tuple[int, ...]

COST_BITS = 60
INFEASIBLE = 1 << 61
"""Two of them still fit into an int64."""
WORK_LIMIT = 100_000_000
"""Additions that one packing may cost, about a tenth of a second; beyond that it is not exact."""


_AT_ONCE = 1 << 18
"""Sums that are held in memory at once (2 MiB), to save calls of numpy."""


class TooLargeError(Exception):
    """The exact answer would take too long; never leaves this package."""


class Floor(NamedTuple):
    """One height of the tree while it is solved.

    parent: int64[items], number of the parent among the items of the floor above, ascending.
    touch: int64[items], cost of using the item at all.
    """

    parent: Ints
    touch: Ints


class _Round(NamedTuple):
    """left, right: items that were joined, right -1: none. table: all items before the round."""

    left: Ints
    right: Ints
    table: Ints


class Laid(NamedTuple):
    """A solution.

    pods: node item -> pods on it by size. pieces: item of the segment floor -> pieces in it by
    kind; empty without segments.
    """

    pods: dict[int, State]
    pieces: dict[int, State]


class Segments(NamedTuple):
    """From floor `height` on, pods come in pieces only.

    kinds: int64[kinds, sizes], pods by size of each kind of piece.
    """

    height: int
    kinds: Ints


class Knapsack:
    """Tables of a forest, and the way back from a table to the nodes."""

    def __init__(self, want: State, segments: Segments | None, want_pieces: State) -> None:
        self._want = want
        self._segments = segments
        self._want_pieces = want_pieces
        self._rounds: list[list[_Round]] = []
        self._work = 0

    def solve(
        self, sizes: Ints, types: Ints, free: Ints, slots: Ints | None, floors: Sequence[Floor]
    ) -> Ints:
        """Least cost of laying everything under each root: int64[roots], `INFEASIBLE` if not.

        Args:
            sizes: int64[sizes], GPUs per pod.
            types: int64[sizes], the row of `free` that a pod takes from.
            free: int64[1 + types, items of floor 0], free GPUs per node: all, then by type.
            slots: int64[items of floor 0], pods that a node can take at most; None: no limit.
            floors: from the nodes up to the children of the roots; the roots' touch costs nothing.

        Raises:
            TooLargeError: more than `WORK_LIMIT`.

        """
        table = self._node_table(sizes, types, free, slots, floors[0].touch)
        goal = self._want
        for height, floor in enumerate(floors):
            if self._segments is not None and height == self._segments.height:
                table, goal = self._in_pieces(table, self._segments.kinds), self._want_pieces
            table = self._join(table, floor.parent, goal)
            if height + 1 < len(floors):
                flat = table.reshape(len(table), -1)
                flat[:, 1:] += floors[height + 1].touch[:, None]
                np.minimum(flat, INFEASIBLE, out=flat)
        if any(width <= goal_of for width, goal_of in zip(table.shape[1:], goal, strict=True)):
            return np.full(len(table), INFEASIBLE, np.int64)
        costs: Ints = table[(slice(None), *goal)]  # type: ignore[arg-type]  # mypy: a plain index
        return costs

    def lay(self, root: int) -> Laid:
        """The cheapest solution under a root that `solve` found feasible."""
        segments = self._segments
        in_pieces = segments is not None and segments.height < len(self._rounds)
        items: dict[int, State] = {root: self._want_pieces if in_pieces else self._want}
        pieces: dict[int, State] = {}
        for height in range(len(self._rounds) - 1, -1, -1):
            items = _unjoin(items, self._rounds[height])
            if segments is not None and height == segments.height:
                pieces = items
                items = {
                    item: tuple(int(c) for c in np.asarray(state) @ segments.kinds)
                    for item, state in items.items()
                }
        return Laid(items, pieces)

    def _node_table(
        self, sizes: Ints, types: Ints, free: Ints, slots: Ints | None, touch: Ints
    ) -> Ints:
        most = (free.max(axis=1, initial=0)[types] // sizes).tolist()
        box = [min(wanted, fit) for wanted, fit in zip(self._want, most, strict=True)]
        self._spend(free.shape[1] * int(np.prod([b + 1 for b in box], dtype=float)))
        states = np.indices([b + 1 for b in box]).reshape(len(box), -1)
        fits = (sizes @ states)[None, :] <= free[0][:, None]
        for one in np.unique(types[types > 0]):
            fits &= ((sizes * (types == one)) @ states)[None, :] <= free[one][:, None]
        if slots is not None:
            fits &= states.sum(axis=0)[None, :] <= slots[:, None]
        table = np.where(fits, touch[:, None], INFEASIBLE)
        table[:, 0] = 0
        return table.reshape(free.shape[1], *(b + 1 for b in box))

    def _in_pieces(self, table: Ints, kinds: Ints) -> Ints:
        """Of each table only what is a sum of whole pieces."""
        widths = np.array(table.shape[1:], np.int64)
        box = []
        for kind, wanted in zip(kinds, self._want_pieces, strict=True):
            used = kind > 0
            box.append(min(wanted, int(((widths[used] - 1) // kind[used]).min())) + 1)
        states = np.indices(box).reshape(len(box), -1)
        pods = kinds.T @ states
        inside = (pods < widths[:, None]).all(axis=0)
        self._spend(len(table) * states.shape[1])
        pieces = np.full((len(table), states.shape[1]), INFEASIBLE, np.int64)
        pieces[:, inside] = table[(slice(None), *pods[:, inside])]
        return pieces.reshape(len(table), *box)

    def _join(self, table: Ints, parent: Ints, goal: State) -> Ints:
        """Join all siblings; remembers the rounds. int64[parents, ...]."""
        rounds: list[_Round] = []
        while True:
            changes = np.flatnonzero(np.diff(parent, prepend=-1))
            if len(changes) == len(parent):
                break
            position = np.arange(len(parent)) - np.repeat(
                changes, np.diff(np.append(changes, len(parent)))
            )
            left = np.flatnonzero(position % 2 == 0)
            paired = np.append(parent, -1)[left + 1] == parent[left]
            right = np.where(paired, left + 1, -1)
            rounds.append(_Round(left, right, table))
            table = self._round(table, left, right, goal)
            parent = parent[left]
        self._rounds.append(rounds)
        return table

    def _round(self, table: Ints, left: Ints, right: Ints, goal: State) -> Ints:
        paired = right >= 0
        old = table.shape[1:]
        box = tuple(min(want, 2 * (w - 1)) + 1 for want, w in zip(goal, old, strict=True))
        one, other = table[left[paired]], table[right[paired]]
        states = float(np.prod(old, dtype=float)) * float(np.prod(box, dtype=float))
        self._spend(len(one) * states)
        joined = _convolved(one, other, box)
        result = np.full((len(left), *box), INFEASIBLE, np.int64)
        result[paired] = joined
        alone = table[left[~paired]]
        wide = np.full((len(alone), *box), INFEASIBLE, np.int64)
        wide[tuple(slice(0, w) for w in alone.shape)] = alone
        result[~paired] = wide
        np.minimum(result, INFEASIBLE, out=result)
        return _trimmed(result)

    def _spend(self, work: float) -> None:
        self._work += int(min(work, 2.0 * WORK_LIMIT))
        if self._work > WORK_LIMIT:
            raise TooLargeError


def _convolved(one: Ints, other: Ints, box: State) -> Ints:
    """(min, +) convolution, pair by pair: int64[pairs, *box]; infeasible sums are not cut."""
    old = one.shape[1:]
    if len(old) == 1 and len(one) * old[0] * box[0] <= _AT_ONCE:
        padded = np.full((len(one), box[0] + old[0] - 1), INFEASIBLE, np.int64)
        width = min(old[0], box[0])
        padded[:, old[0] - 1 : old[0] - 1 + width] = other[:, :width]
        shifted = np.lib.stride_tricks.sliding_window_view(padded, old[0], axis=1)
        joined: Ints = (shifted + one[:, None, ::-1]).min(axis=2)
        return joined
    joined = np.full((len(one), *box), INFEASIBLE, np.int64)
    for shift in np.ndindex(*old):
        column = one[(slice(None), *shift)]
        if column.min() >= INFEASIBLE:
            continue
        here, there = [slice(None)], [slice(None)]
        for s, width, limit in zip(shift, old, box, strict=True):
            here.append(slice(s, min(s + width, limit)))
            there.append(slice(0, min(width, limit - s)))
        target = joined[tuple(here)]
        spread = column.reshape(-1, *(1 for _ in box))
        np.minimum(target, spread + other[tuple(there)], out=target)
    return joined


def _trimmed(table: Ints) -> Ints:
    """Without the ends of all axes that no item can fill."""
    feasible = (table < INFEASIBLE).any(axis=0)
    cut = [slice(None)]
    for axis in range(feasible.ndim):
        others = tuple(a for a in range(feasible.ndim) if a != axis)
        last = int(np.flatnonzero(np.logical_or.reduce(feasible, axis=others))[-1])
        cut.append(slice(0, last + 1))
    return np.ascontiguousarray(table[tuple(cut)])


def _unjoin(items: dict[int, State], rounds: Sequence[_Round]) -> dict[int, State]:
    """From states of parents to states of their children; those that get nothing are left out."""
    for one in reversed(rounds):
        below: dict[int, State] = {}
        for item, state in items.items():
            left, right = int(one.left[item]), int(one.right[item])
            if right < 0:
                below[left] = state
                continue
            first = _split(one.table[left], one.table[right], state)
            second = tuple(s - f for s, f in zip(state, first, strict=True))
            if any(first):
                below[left] = first
            if any(second):
                below[right] = second
        items = below
    return items


def _split(left: Ints, right: Ints, state: State) -> State:
    """How much of a state goes left in a cheapest split; of several the one that fills it most."""
    low = [max(0, s - (w - 1)) for s, w in zip(state, right.shape, strict=True)]
    high = [min(s, w - 1) for s, w in zip(state, left.shape, strict=True)]
    given = left[tuple(slice(lo, hi + 1) for lo, hi in zip(low, high, strict=True))]
    kept = right[
        tuple(slice(s - hi, s - lo + 1) for s, lo, hi in zip(state, low, high, strict=True))
    ]
    total = given + np.flip(kept)
    best = total.size - 1 - int(np.argmin(total.ravel()[::-1]))
    return tuple(
        lo + int(at) for lo, at in zip(low, np.unravel_index(best, total.shape), strict=True)
    )
