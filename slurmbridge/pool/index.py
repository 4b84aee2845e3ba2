"""The view as arrays: one row a node, made once a generation, read by every request.

Strings outside, row numbers inside: `row_of` is the only look-up by name. An index is immutable;
the next generation copies the arrays and rewrites the rows that changed (about 0.4 ms at 5,000
nodes), a change of the set of nodes compiles it anew (about 10 ms).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from itertools import compress, count, repeat
from operator import is_not
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slurmbridge.pool.reason import blocked_code
from slurmbridge.pool.record import GpuCount, GpuRequest
from slurmbridge.pool.view import HeldClaim, NodeView, Terms, View

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Salts = npt.NDArray[np.uint32]

FOREVER: Final = float("inf")
NO_ROW: Final = -1
MOST_RESERVATIONS: Final = 256
INT32_MAX: Final = 2**31 - 1


class Windows(NamedTuple):
    """Reserved times of all nodes, flat.

    row: int32[W]. start, end: float64[W], Unix seconds, end inf where there is none.
    reservation: int32[W], a number of `ViewIndex.reservations`. cpus: int64[W], see `Window`.
    """

    row: Ints
    start: Floats
    end: Floats
    reservation: Ints
    cpus: Longs


class Taken(NamedTuple):
    """What a bind under way takes of a node before the view shows it."""

    row: int
    gpu: GpuRequest
    cpus: int
    memory_mib: int


class ViewIndex(msgspec.Struct, frozen=True, eq=False):
    """A `View`, compiled. N nodes, T GPU types, W reservation windows.

    view: what it was made of. names[row], row_of[name]: the nodes, in the order of the view.
    free, total: int32[1 + T, N]; row 0 counts GPUs of all types, row `type_row[t]` those of one.
    cpus_free: int32[N]. memory_free: int64[N], MiB. claimed: int32[N], GPUs in claims of ours.
    blocked: int8[N], code of a `Reason`, 0 where Slurm may run new work.
    has_agent, has_native: bool[N]. plan_start: float64[N], inf where nothing is planned.
    salt: uint32[N], a stable hash of the name. reservations: numbered from 0 in their order.
    partitions: bool[N] by name, nodes that are in a partition of Slurm, or of which that is not
    known; "": the latter alone.
    """

    view: View
    names: tuple[str, ...]
    row_of: Mapping[str, int]
    type_row: Mapping[str, int]
    free: Ints
    total: Ints
    cpus_free: Ints
    memory_free: Longs
    claimed: Ints
    blocked: Codes
    has_agent: Bools
    has_native: Bools
    plan_start: Floats
    windows: Windows
    reservations: Mapping[tuple[str, Terms], int]
    salt: Salts
    partitions: Mapping[str, Bools]

    def __len__(self) -> int:
        """Number of pool nodes."""
        return len(self.names)

    @property
    def held(self) -> Mapping[str, HeldClaim]:
        """Claims whose pods are not bound yet, by pod UID."""
        return self.view.held

    def rows(self, names: Iterable[str], count: int) -> Ints:
        """Row numbers of `count` names: int32[count], `NO_ROW` for nodes outside the pool."""
        found = map(self.row_of.get, names, repeat(NO_ROW))
        return np.fromiter(found, np.int32, count=count)

    def of_type(self, table: Ints, gpu_type: str) -> Ints | None:
        """The row of `free` or `total` for a GPU type ("" any): int32[N]; None: no such type."""
        row = self.type_row.get(gpu_type) if gpu_type else 0
        if row is None:
            return None
        counts: Ints = table[row]
        return counts

    def with_taken(self, taken: Iterable[Taken]) -> ViewIndex:
        """The same nodes with less free on some of them; the caller's rows must exist.

        A bind that asked for any type takes from all types: which one it will get is not known,
        and unknown is never free. O(T * N) for the copy.
        """
        free, cpus, memory = self.free.copy(), self.cpus_free.copy(), self.memory_free.copy()
        claimed = self.claimed.copy()
        for item in taken:
            only = self.type_row.get(item.gpu.type) if item.gpu.type else None
            if only is None:
                free[:, item.row] -= item.gpu.count
            else:
                free[0, item.row] -= item.gpu.count
                free[only, item.row] -= item.gpu.count
            cpus[item.row] -= item.cpus
            memory[item.row] -= item.memory_mib
            claimed[item.row] += item.gpu.count
        return msgspec.structs.replace(
            self, free=free, cpus_free=cpus, memory_free=memory, claimed=claimed
        )


def compile_view(view: View, before: ViewIndex | None = None) -> ViewIndex:
    """The index of a view.

    Args:
        view: what to compile.
        before: the index of an earlier view. Node records that both views share (as `apply_delta`
            leaves them) are not read again.

    """
    if before is None:
        return _compile(view)
    if view is before.view:
        return before
    changed: list[tuple[int, NodeView]] = []
    if view.nodes is not before.view.nodes:
        if tuple(view.nodes) != before.names:
            return _compile(view)
        others = map(is_not, before.view.nodes.values(), view.nodes.values())
        for row in compress(count(), others):
            name = before.names[row]
            old, new = before.view.nodes[name], view.nodes[name]
            if (old.domains, old.partitions) != (new.domains, new.partitions):
                return _compile(view)
            changed.append((row, new))
    if any(g.type not in before.type_row for _, node in changed for g in node.total + node.free):
        return _compile(view)
    return _update(before, view, changed)


def _compile(view: View) -> ViewIndex:
    nodes = tuple(view.nodes.values())
    names = tuple(view.nodes)
    kinds = dict.fromkeys(g.type for node in nodes for g in node.total + node.free)
    type_row = {kind: row for row, kind in enumerate(kinds, start=1)}
    shape = (1 + len(type_row), len(nodes))
    free, total = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, node in enumerate(nodes):
        _put_counts(free, row, node.free, type_row)
        _put_counts(total, row, node.total, type_row)
    reservations: dict[tuple[str, Terms], int] = {}
    return ViewIndex(
        view=view,
        names=names,
        row_of={name: row for row, name in enumerate(names)},
        type_row=type_row,
        free=free,
        total=total,
        cpus_free=np.array([min(n.cpus_free, INT32_MAX) for n in nodes], np.int32),
        memory_free=np.array([n.memory_free_mib for n in nodes], np.int64),
        claimed=np.array([n.claimed for n in nodes], np.int32),
        blocked=np.array([blocked_code(n.blocked) for n in nodes], np.int8),
        has_agent=np.array([n.agent for n in nodes], np.bool_),
        has_native=np.array([n.native_jobs > 0 for n in nodes], np.bool_),
        plan_start=np.array([_or_forever(n.plan_start) for n in nodes], np.float64),
        windows=_flatten(enumerate(nodes), reservations),
        reservations=reservations,
        salt=np.array([zlib.crc32(name.encode()) for name in names], np.uint32),
        partitions=_partitions(nodes),
    )


def _partitions(nodes: tuple[NodeView, ...]) -> dict[str, Bools]:
    rows: dict[str, list[int]] = {}
    for row, node in enumerate(nodes):
        for name in node.partitions:
            rows.setdefault(name, []).append(row)
    unknown = np.array([not node.partitions for node in nodes], np.bool_)
    found = {"": unknown}
    for name, mine in rows.items():
        found[name] = unknown.copy()
        found[name][mine] = True
    return found


def _update(before: ViewIndex, view: View, changed: list[tuple[int, NodeView]]) -> ViewIndex:
    if not changed:
        return msgspec.structs.replace(before, view=view)
    free, total = before.free.copy(), before.total.copy()
    cpus_free, memory_free = before.cpus_free.copy(), before.memory_free.copy()
    claimed, blocked = before.claimed.copy(), before.blocked.copy()
    has_agent, has_native = before.has_agent.copy(), before.has_native.copy()
    plan_start = before.plan_start.copy()
    for row, node in changed:
        free[:, row] = 0
        total[:, row] = 0
        _put_counts(free, row, node.free, before.type_row)
        _put_counts(total, row, node.total, before.type_row)
        cpus_free[row] = min(node.cpus_free, INT32_MAX)
        memory_free[row] = node.memory_free_mib
        claimed[row] = node.claimed
        blocked[row] = blocked_code(node.blocked)
        has_agent[row] = node.agent
        has_native[row] = node.native_jobs > 0
        plan_start[row] = _or_forever(node.plan_start)
    reservations = dict(before.reservations)
    stay = np.isin(before.windows.row, np.array([row for row, _ in changed]), invert=True)
    added = _flatten(changed, reservations)
    if len(reservations) > MOST_RESERVATIONS + len(view.nodes):
        return _compile(view)  # most of them are over
    windows = Windows(
        np.concatenate((before.windows.row[stay], added.row)),
        np.concatenate((before.windows.start[stay], added.start)),
        np.concatenate((before.windows.end[stay], added.end)),
        np.concatenate((before.windows.reservation[stay], added.reservation)),
        np.concatenate((before.windows.cpus[stay], added.cpus)),
    )
    return msgspec.structs.replace(
        before,
        view=view,
        free=free,
        total=total,
        cpus_free=cpus_free,
        memory_free=memory_free,
        claimed=claimed,
        blocked=blocked,
        has_agent=has_agent,
        has_native=has_native,
        plan_start=plan_start,
        windows=windows,
        reservations=reservations,
    )


def _put_counts(
    table: Ints, row: int, counts: tuple[GpuCount, ...], type_row: Mapping[str, int]
) -> None:
    for gpus in counts:
        table[0, row] += gpus.count
        table[type_row[gpus.type], row] += gpus.count


def _flatten(
    nodes: Iterable[tuple[int, NodeView]], reservations: dict[tuple[str, Terms], int]
) -> Windows:
    """All windows of some rows; reservations not seen before get the next number."""
    flat = [
        (
            row,
            w.start,
            _or_forever(w.end),
            reservations.setdefault((w.reservation, w.terms), len(reservations)),
            w.cpus,
        )
        for row, node in nodes
        for w in node.windows
    ]
    rows, starts, ends, numbers, cpus = zip(*flat, strict=True) if flat else ((),) * 5
    return Windows(
        np.array(rows, np.int32),
        np.array(starts, np.float64),
        np.array(ends, np.float64),
        np.array(numbers, np.int32),
        np.array(cpus, np.int64),
    )


def _or_forever(moment: float | None) -> float:
    return FOREVER if moment is None else moment
