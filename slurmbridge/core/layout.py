"""Where the members of a gang go: its wishes, the room that each kind of member has, the packing.

A gang of which nobody stands yet is packed as a whole. Members that are missing while others stand
(replaced ones, those left over after a kill) come beside them one by one, each at its old seat if
that is free; a segment that is missing as a whole is packed near the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from slurmbridge.core import publish
from slurmbridge.core.action import LogPlan
from slurmbridge.core.places import topology
from slurmbridge.core.room import Room, Wishes, kept_for, look, useless_nodes, wishes_of
from slurmbridge.core.state import State
from slurmbridge.core.waiting import GangState
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Ask
from slurmbridge.pool.index import ViewIndex
from slurmbridge.pool.reason import REASONS, Reason
from slurmbridge.pool.record import PodRecord
from slurmbridge.topology.beside import place_beside
from slurmbridge.topology.gang import Placement, Refusal, Wish
from slurmbridge.topology.index import Bools, TopologyIndex
from slurmbridge.topology.pack import dimension

MOST_TEXT = 480
"""Longest reason: it goes into an annotation."""
MOST_KEPT = 480


class Layout(NamedTuple):
    """A gang on its nodes. node_of: Kubernetes node by pod UID.

    level, domain, shorts: of a gang packed as a whole; None: its level is what it was.
    """

    node_of: dict[str, str]
    found: Placement | None


class _Attempt(NamedTuple):
    """What came of laying a gang out. offered: free GPUs by node."""

    rows: list[int] | Refusal
    found: Placement | None
    offered: tuple[tuple[str, int], ...]


def lay_out(
    state: State,
    gang: GangState,
    members: Sequence[PodRecord],
    missing: Sequence[PodRecord],
    asks: Mapping[str, Ask],
) -> Layout | str:
    """Find a node for each missing member, or say why there is no place.

    Args:
        state: the state; its view is brought up to date.
        gang: the gang; the seats of its members are remembered in it.
        members: all of them, by rank.
        missing: those without a place, by rank.
        asks: what each missing member asks of Slurm, by UID.

    """
    wishes = wishes_of(members)
    if isinstance(wishes, str):
        return wishes
    index = publish.index(state)
    places = topology(state, index)
    standing = _standing(state, index, members)
    for position, row in standing.items():
        gang.seats[_seat(members[position])] = index.names[row]
    since = gang.complete_at if gang.complete_at is not None else state.now
    limit = wishes.topology.climb_s
    climb = state.now - since > (state.settings.climb_s if limit is None else limit)

    def attempt(useless: Mapping[str, tuple[str, ...]]) -> _Attempt:
        room = Room(state, index, missing, asks, useless)
        offered = tuple(zip(index.names, room.free[0].tolist(), strict=True))
        if standing:
            beside = _Beside(places, room, wishes, climb, gang.seats, index.row_of)
            return _Attempt(beside.lay(members, missing, standing), None, offered)
        placed = room.pack(places, missing, wishes, climb)
        if isinstance(placed, Refusal):
            return _Attempt(placed, None, offered)
        return _Attempt(list(placed.rows), placed, offered)

    of_all, of_each = useless_nodes(state, members)
    rows, found, offered = attempt(of_all)
    if isinstance(rows, Refusal) and of_all != of_each:
        rows, found, offered = attempt(of_each)
    if isinstance(rows, Refusal):
        return _why(rows, wishes)[:MOST_TEXT]
    node_of = {pod.uid: index.names[row] for pod, row in zip(missing, rows, strict=True)}
    for pod in missing:
        gang.seats[_seat(pod)] = node_of[pod.uid]
    state.out.append(
        LogPlan(
            gang=gang.key,
            level="" if found is None else found.level,
            domain="" if found is None else found.domain,
            seats=tuple((p.ref, asks[p.uid].gpu.count, node_of[p.uid]) for p in missing),
            room=offered,
            beside=tuple(index.names[row] for row in standing.values()),
        )
    )
    return Layout(node_of, found)


def _why(refusal: Refusal, wishes: Wishes) -> str:
    """Why there is no place; what can never be as it is written is told of its annotation."""
    if refusal.reason in ("level", "segment"):
        is_segment = refusal.reason == "segment" or refusal.level != wishes.topology.level
        return f"annotation: {keys.SEGMENT if is_segment else keys.TOPOLOGY}: {refusal.text}"
    lines = "; ".join(str(short) for short in refusal.shorts)
    return f"topology: {lines or refusal.text}"


def why_kept(state: State, asks: Iterable[Ask]) -> str:
    """Which reservations keep a gang out, as the end of a reason; "" if none does."""
    words = []
    for ask in dict.fromkeys(asks):
        codes = {REASONS[code] for code in np.unique(look(state, ask))}
        if Reason.RESERVATION_DENIED in codes:
            words.append(f"its account may not use the reservation {ask.reservation}")
        elif codes == {Reason.OUTSIDE_RESERVATION}:
            words.append(f"no node is open to it in the reservation {ask.reservation}")
        elif Reason.RESERVED in codes:
            words.append(f"nodes are reserved in Slurm ({kept_for(state, ask)})")
    return "".join(f"; {text}" for text in dict.fromkeys(words))[:MOST_KEPT]


def _seat(pod: PodRecord) -> str:
    """What a member has in common with the pod that replaces it: its rank, else its name."""
    rank = () if pod.group is None else pod.group.rank
    return ".".join(map(str, rank)) or pod.name


def _standing(state: State, index: ViewIndex, members: Sequence[PodRecord]) -> dict[int, int]:
    """Rows of the members that have their places, by position in the gang."""
    found = {}
    for position, pod in enumerate(members):
        entry = state.book.get(pod.uid)
        name = pod.node or ("" if entry is None else entry.kube_node)
        if name in index.row_of:
            found[position] = index.row_of[name]
    return found


class _Beside(NamedTuple):
    """How missing members come to those that stay where they are."""

    places: TopologyIndex
    room: Room
    wishes: Wishes
    climb: bool
    seats: Mapping[str, str]
    row_of: Mapping[str, int]

    def lay(
        self,
        members: Sequence[PodRecord],
        missing: Sequence[PodRecord],
        standing: Mapping[int, int],
    ) -> list[int] | Refusal:
        """Rows of the missing members. standing: rows of the others, by position."""
        at = dict(standing)
        inside = self._inside(list(standing.values()))
        positions = {pod.uid: position for position, pod in enumerate(members)}
        size = self.wishes.segment.pods
        for pod in missing:
            position = positions[pod.uid]
            if position in at:
                continue
            piece = range(position, position + 1)
            if size:
                first = position // size * size
                piece = range(first, min(first + size, len(members)))
            mates = [at[p] for p in piece if p in at]
            if size and not mates and len(piece) > 1:
                rows = self._whole([members[p] for p in piece], list(at.values()), inside)
            else:
                others = mates or list(at.values())
                rows = self._one(pod, others, inside, is_segment=bool(mates))
                piece = range(position, position + 1)
            if isinstance(rows, Refusal):
                return rows
            for place, row in zip(piece, rows, strict=True):
                at[place] = row
                self.room.take(members[place], row)
        return [at[positions[pod.uid]] for pod in missing]

    def _inside(self, standing: Sequence[int]) -> Bools:
        """Nodes of the domains that the wish keeps the gang in; all, where it keeps it in none."""
        wish = self.wishes.topology
        places = dimension(self.places, wish.level)
        if places is None or (wish.mode == "preferred" and self.climb):
            return np.ones(len(self.places), np.bool_)
        domain = places.domain[places.height_of[wish.level]][places.place]
        found: Bools = np.isin(domain, domain[standing])
        return found

    def _one(
        self, pod: PodRecord, others: Sequence[int], inside: Bools, *, is_segment: bool
    ) -> list[int] | Refusal:
        free = self.room.free_for(pod)
        wish = self._segment_wish() if is_segment else self.wishes.topology
        seat = self.row_of.get(self.seats.get(_seat(pod), ""))
        at_seat = np.zeros(len(free), np.bool_)
        if seat is not None:
            at_seat[seat] = True
        row: int | Refusal = Refusal("room", "no seat")
        for candidates in (at_seat & inside, inside):
            if isinstance(row, Refusal):
                row = place_beside(
                    self.places,
                    free,
                    self.room.asks[pod.uid].gpu.count,
                    others,
                    wish,
                    climb=self.climb,
                    candidates=candidates,
                    total=self.room.total,
                )
        return row if isinstance(row, Refusal) else [row]

    def _whole(
        self, pods: Sequence[PodRecord], others: Sequence[int], inside: Bools
    ) -> list[int] | Refusal:
        """A segment of which nobody stands: as near to the others as it fits."""
        places, wish = self.places, self.wishes.topology
        limit = places.top
        if wish.level in places.height_of and (wish.mode == "required" or not self.climb):
            limit = places.height_of[wish.level]
        apart = msgspec.structs.replace(self.wishes, topology=self._segment_wish())
        refusal = Refusal("room", "the pool has no nodes")
        for height in range(limit + 1):
            domain = places.domain[height][places.place]
            near = np.isin(domain, domain[list(others)]) & inside
            found = self.room.pack(places, pods, apart, False, near)
            if isinstance(found, Placement):
                return list(found.rows)
            refusal = found
        return refusal

    def _segment_wish(self) -> Wish:
        """Inside one domain of the segment level, or of the wish's own if that is lower."""
        places, wish = self.places, self.wishes.topology
        level = self.wishes.segment.level or places.levels[min(1, places.top)]
        holds = wish.mode == "required" or not self.climb
        if holds and places.height_of.get(wish.level, places.top) < places.height_of.get(level, 0):
            level = wish.level
        return Wish("required", level)
