"""A gang in numbers, and how much of it each domain has room for."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from slurmbridge.topology.gang import Gang, Short
from slurmbridge.topology.index import Bools, Ints, TopologyIndex


class Need(msgspec.Struct, frozen=True, eq=False):
    """A gang in numbers.

    sizes: int64[S], GPUs per pod, largest first. types: int64[S], the row of `Room.free` that they
    take from. Size and type together are distinct. count: int64[S], pods of each.
    kinds: int64[K, S], the different pieces (without segments: one, the whole gang); amount:
    int64[K], pieces of each. kind_of: int64[pieces], kind of each piece by rank.
    size_of: int64[pods], which size a pod has, by rank.
    height: of the level whose domains hold whole pieces. segment: pods in a piece.
    """

    sizes: Ints
    types: Ints
    count: Ints
    kinds: Ints
    amount: Ints
    kind_of: Ints
    size_of: Ints
    height: int
    segment: int

    @property
    def pods(self) -> int:
        """All pods."""
        return int(self.count.sum())

    @property
    def has_segments(self) -> bool:
        """Whether there is more than one piece."""
        return len(self.kind_of) > 1


def need_of(gang: Gang, height: int) -> Need:
    """Numbers of a gang whose segment, if any, divides it; `height` is the segment level's."""
    gpus = np.asarray(gang.gpus, np.int64)
    types = np.asarray(gang.types or np.zeros(len(gpus)), np.int64)
    distinct, size_of = np.unique(np.stack((-gpus, types)), axis=1, return_inverse=True)
    size_of = size_of.reshape(-1).astype(np.int64)
    segment = gang.segment if 0 < gang.segment < len(gpus) else len(gpus)
    by_size = (size_of.reshape(-1, segment)[:, :, None] == np.arange(distinct.shape[1])).sum(axis=1)
    kinds, kind_of, amount = np.unique(by_size, axis=0, return_inverse=True, return_counts=True)
    return Need(
        sizes=-distinct[0],
        types=distinct[1],
        count=by_size.sum(axis=0),
        kinds=kinds,
        amount=amount.astype(np.int64),
        kind_of=kind_of.reshape(-1).astype(np.int64),
        size_of=size_of,
        height=height,
        segment=segment,
    )


class Room:
    """What the nodes have room for; arrays by place or by domain, N nodes, S sizes.

    Attributes:
        index: the topology.
        need: the gang.
        free: int64[1 + T, N], free GPUs of the nodes that may be used: of all types, then by type.
        worth: int64[S, S], how many places of the first size a pod of the second one takes.
        whole: bool[N], nodes of which nothing is in use; None: not known.
        slots: int64[N], pods that a node may take; None: no limit.
        words: how to call a level, by height, where the caller used another of its names.

    """

    def __init__(
        self,
        index: TopologyIndex,
        need: Need,
        free: Ints,
        whole: Bools | None,
        slots: Ints | None,
        words: Mapping[int, str],
    ) -> None:
        self.index = index
        self.need = need
        self.free = free
        self.whole = whole
        self.slots = slots
        self.words = words
        sizes, types = need.sizes, need.types
        # What is asked of any type may lie on anything; a place of a type only its own pods take.
        shares = (types[:, None] == 0) | (types[:, None] == types[None, :])
        larger = sizes[None, :] >= sizes[:, None]
        self.worth: Ints = np.where(shares & larger, sizes[None, :] // sizes[:, None], 0)
        self._pods: list[Ints] = []

    def level(self, height: int) -> str:
        """The name of a level for people."""
        return self.words.get(height, self.index.levels[height])

    def slots_for(self, wanted: Ints) -> Ints:
        """For each size: int64[S], pods of that size worth of room that `wanted` pods take.

        A larger pod takes as many whole places of a smaller size as it holds.
        """
        taken: Ints = self.worth @ wanted
        return taken

    def pods(self, height: int) -> Ints:
        """Places of each size: int64[S, D[height]].

        A gang of one size fits under a domain exactly if it has as many places, and so does one
        whose sizes divide each other if it has enough for each size, larger pods included; for
        other gangs that is necessary, not sufficient.
        """
        if not self._pods:
            most_free = np.minimum(self.free[0], self.free[self.need.types])
            places = most_free // self.need.sizes[:, None]
            if self.slots is not None:
                most = self.worth.max(axis=1)  # places that one pod may fill
                places = np.minimum(places, self.slots[None, :] * most[:, None])
            self._pods.append(places)
        while len(self._pods) <= height:
            starts = self.index.children[len(self._pods)][:-1]
            self._pods.append(np.add.reduceat(self._pods[-1], starts, axis=1))
        return self._pods[height]

    def pieces(self, height: int) -> Ints:
        """Upper bound of pieces under each domain: int64[D[height]], height >= need.height."""
        pods = self.pods(self.need.height)
        most = np.zeros(pods.shape[1], np.int64)
        for kind in self.need.kinds:
            takes = self.slots_for(kind)
            used = takes > 0
            most = np.maximum(most, (pods[used] // takes[used, None]).min(axis=0))
        for below in range(self.need.height, height):
            most = np.add.reduceat(most, self.index.children[below + 1][:-1])
        return most

    def values(self, height: int) -> Ints:
        """How much is spoiled by touching a domain: int64[D[height]].

        Twice its free GPUs, and one more if nothing of it is in use.
        """
        value = 2 * self.index.sums(self.free[0], height)
        if self.whole is not None:
            whole = self.index.sums(self.whole.astype(np.int64), height)
            value += whole == np.diff(self.index.bounds[height])
        return value

    def lacking(self, height: int) -> Ints:
        """Places that each domain lacks: int64[S, D[height]], <= 0 where it has enough."""
        lacking = self.slots_for(self.need.count)[:, None] - self.pods(height)
        if self.need.has_segments and height > self.need.height:
            short = len(self.need.kind_of) - self.pieces(height)
            lacking[-1] = np.maximum(lacking[-1], short * self.need.segment)
        return lacking

    def short(self, lacking: Ints, height: int, among: Bools | None = None) -> Short:
        """The domain that comes closest, and the fewest pods that it has no room for.

        Large pods are the first to be counted out: one of them frees at least as many places of
        every size as a smaller one.
        """
        worst = (np.maximum(lacking, 0) * self.need.sizes[:, None]).max(axis=0)
        if among is not None:
            worst = np.where(among, worst, np.iinfo(np.int64).max)
        domain = int(worst.argmin())
        missing = lacking[:, domain].copy()
        pods = gpus = 0
        for size, gpus_each in enumerate(self.need.sizes.tolist()):
            worth = self.worth[:, size]
            used = worth > 0
            wanted = int((-(-missing[used] // worth[used])).max(initial=0))
            out = min(wanted, int(self.need.count[size]))
            missing -= out * worth
            pods += out
            gpus += out * gpus_each
        if not pods:  # it has the places, but the pods cannot be split up so as to fill them
            pods, gpus = 1, int(self.need.sizes[-1])
        return Short(self.level(height), self.index.names[height][domain], pods, gpus)
