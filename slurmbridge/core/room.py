"""The room that the missing members of a gang have, kind by kind, and their packing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from slurmbridge.core import publish
from slurmbridge.core.state import State
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Ask
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.index import Codes, ViewIndex
from slurmbridge.pool.index import Ints as Counts
from slurmbridge.pool.nodefit import NodeFit
from slurmbridge.pool.record import PodRecord
from slurmbridge.pool.reserved import keepers
from slurmbridge.pool.score import end_of
from slurmbridge.pool.verdict import PASSES, judge
from slurmbridge.topology.gang import (
    Gang,
    Placement,
    Refusal,
    SegmentWish,
    Wish,
    parse_segment,
    parse_topology_wish,
)
from slurmbridge.topology.index import Bools, Ints, TopologyIndex
from slurmbridge.topology.pack import pack


class Wishes(msgspec.Struct, frozen=True):
    """What a gang's members say of its shape; the first one that says something counts."""

    topology: Wish = Wish()
    segment: SegmentWish = SegmentWish()


class Kind(NamedTuple):
    """What decides which nodes are open to a member.

    fit: what it says of nodes. excluded: nodes that kube-scheduler could not use for it.
    """

    gpu_type: str
    partition: str
    reservation: str
    fit: NodeFit
    excluded: tuple[str, ...] = ()


def wishes_of(members: Sequence[PodRecord]) -> Wishes | str:
    """The wishes of a gang, or what of them cannot be read."""
    key = keys.TOPOLOGY
    try:
        wish = parse_topology_wish(said(members, key) or "none")
        key = keys.SEGMENT
        return Wishes(wish, parse_segment(said(members, key)))
    except ParseError as error:
        return f"annotation: {key}: {error.text}"


def said(members: Sequence[PodRecord], key: str) -> str:
    """What the first member that has an annotation says in it, "" when none has it."""
    return next((text for p in members if (text := p.annotations.get(key))), "")


class Room:
    """What is open to the missing members of a gang; arrays by row of the view, N nodes.

    Attributes:
        kinds: the different kinds of members.
        free: int64[1 + kinds, N], free GPUs: all that may be used, then what each kind may use;
            of a single kind int64[1, N].
        total: int64[N], all GPUs of these types.
        slots: int64[N], members that a node has CPUs and memory for, counted by the largest.

    """

    def __init__(
        self,
        state: State,
        index: ViewIndex,
        missing: Sequence[PodRecord],
        asks: Mapping[str, Ask],
        useless: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.asks = asks
        self.kind_of = {p.uid: _kind(p, asks[p.uid], useless[p.uid]) for p in missing}
        self.kinds = sorted(set(self.kind_of.values()))
        rows, masks = [], []
        for kind in self.kinds:
            mine = [asks[uid] for uid, of in self.kind_of.items() if of == kind]
            masks.append(_open_nodes(state, index, kind, mine))
            of_type = index.of_type(index.free, kind.gpu_type)
            counts = np.zeros(len(index), np.int64) if of_type is None else of_type
            rows.append(np.where(masks[-1], np.maximum(counts, 0), 0).astype(np.int64))
        self.total = self._sum(index, index.total, [np.ones(len(index), np.bool_)] * len(masks))
        every = self._sum(index, index.free, masks)
        self.free: Ints = np.stack(rows if len(rows) == 1 else [every, *rows])
        cpus = max(1, *(a.cpus for a in asks.values()), 1)
        memory = max(1, *(a.memory_mib for a in asks.values()), 1)
        slots = np.minimum(index.cpus_free // cpus, index.memory_free // memory)
        self.slots: Ints = slots.astype(np.int64)

    def _sum(self, index: ViewIndex, table: Counts, masks: Sequence[Bools]) -> Ints:
        """GPUs of all types that the kinds ask for, each type once, where its kinds may go."""
        by_type: dict[str, Bools] = {}
        for kind, mask in zip(self.kinds, masks, strict=True):
            by_type[kind.gpu_type] = by_type.get(kind.gpu_type, np.bool_(False)) | mask
        if "" in by_type:
            by_type = {"": np.logical_or.reduce(list(by_type.values()))}
        counts = np.zeros(len(index), np.int64)
        for gpu_type, mask in by_type.items():
            of_type = index.of_type(table, gpu_type)
            if of_type is not None:
                counts += np.where(mask, np.maximum(of_type, 0), 0)
        return counts

    def _types(self, pods: Sequence[PodRecord]) -> tuple[int, ...]:
        if len(self.kinds) == 1:
            return ()
        return tuple(1 + self.kinds.index(self.kind_of[pod.uid]) for pod in pods)

    def pack(
        self,
        places: TopologyIndex,
        pods: Sequence[PodRecord],
        wishes: Wishes,
        climb: bool,
        candidates: Bools | None = None,
    ) -> Placement | Refusal:
        """Lay some members as a whole."""
        segment = wishes.segment
        sizes = tuple(self.asks[pod.uid].gpu.count for pod in pods)
        return pack(
            places,
            self.free,
            Gang(sizes, segment.pods, segment.level, self._types(pods)),
            wishes.topology,
            climb=climb,
            candidates=candidates,
            total=self.total,
            slots=self.slots,
        )

    def free_for(self, pod: PodRecord) -> Ints:
        """Free GPUs that one member may use: int64[N], 0 where CPUs or memory are short."""
        (number,) = self._types([pod]) or (0,)
        free: Ints = np.minimum(self.free[0], self.free[number])
        return np.where(self.slots > 0, free, 0)

    def take(self, pod: PodRecord, row: int) -> None:
        """A member goes there."""
        mine = self.kind_of[pod.uid].gpu_type
        count = self.asks[pod.uid].gpu.count
        self.free[0, row] -= count
        for number, kind in enumerate(self.kinds, 1):
            if len(self.kinds) > 1 and (not mine or kind.gpu_type in ("", mine)):
                self.free[number, row] -= count
        self.slots[row] -= 1


def _kind(pod: PodRecord, ask: Ask, excluded: tuple[str, ...]) -> Kind:
    return Kind(ask.gpu.type, ask.partition, ask.reservation, pod.fit, excluded)


def useless_nodes(
    state: State, members: Sequence[PodRecord]
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Nodes that members may not go to for a while, since kube-scheduler could not use them.

    Returns:
        By pod UID, twice: as if what one could not use were of no use to any of them (a taint, as a
        rule), and to itself alone (a volume), unless two have tried in vain.

    """
    mine = {
        pod.uid: {n for n, until in nodes.items() if until > state.now}
        for pod in members
        if (nodes := state.waiting.excluded.get(pod.uid)) is not None
    }
    counts = Counter(name for names in mine.values() for name in names)
    of_all = {name for name, count in counts.items() if count > 1}
    return (
        {pod.uid: tuple(sorted(counts)) for pod in members},
        {pod.uid: tuple(sorted(mine.get(pod.uid, set()) | of_all)) for pod in members},
    )


def look(state: State, ask: Ask) -> Codes:
    """The verdict on every node of the view, as it is compiled now: int8[N]."""
    index = publish.index(state)
    rows = np.arange(len(index), dtype=np.int32)
    horizon = state.settings.policy.plan_horizon_minutes
    return judge(ask, "", index, rows, state.wall, horizon_minutes=horizon)


def kept_for(state: State, ask: Ask) -> str:
    """Names of the reservations that keep a pod off some nodes, as a list to read."""
    end = end_of(ask, state.wall, state.settings.policy.plan_horizon_minutes)
    return ", ".join(keepers(ask, state.views.values(), state.wall, end))


def _open_nodes(state: State, index: ViewIndex, kind: Kind, asks: Sequence[Ask]) -> Bools:
    """Nodes that the smallest member of a kind may use, as far as is easily known: bool[N]."""
    smallest = min(asks, key=lambda a: a.gpu.count)
    most = msgspec.structs.replace(
        smallest,
        cpus=max(a.cpus for a in asks),
        memory_mib=max(a.memory_mib for a in asks),
        minutes=max(a.minutes for a in asks),
        rolling=any(a.rolling for a in asks),
    )
    is_open: Bools = look(state, most) == PASSES
    for row in np.flatnonzero(is_open):
        name = index.names[row]
        node = state.kube_nodes.get(name)
        pause = state.waiting.nodes_after.get(name)
        is_open[row] = (
            node is not None
            and node.takes(kind.fit)
            and name not in kind.excluded
            and (pause is None or state.now >= pause.until)
        )
    return is_open
