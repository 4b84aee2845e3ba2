"""What this process sees at the moment of a request: the view, compiled, and how far it holds.

The only reader of the link. A view is compiled when a request first needs it: about 0.4 ms for the
next generation, 10 ms when nodes have joined or left. All times of the view are on the clock of the
bridge; `now` is its `as_of` plus the age that the link has measured, so that a wrong clock of this
host moves no plan and no reservation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

import msgspec
import numpy as np

from extender.filter import Freshness, Situation, freshness_of
from extender.inflight import InFlight
from slurmbridge.clock import Clock
from slurmbridge.pool.index import Ints
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.verdict import ViewIndex, compile_view
from slurmbridge.pool.view import View
from slurmbridge.topology.index import TopologyIndex
from slurmbridge.topology.paths import index_of_paths
from slurmbridge.topology.score import topology_key

MAX_OUTSIDE: Final = 100_000
"""Names of nodes outside the pool that are remembered; Kubernetes itself goes to 5,000 nodes."""


class Source(Protocol):
    """Where views come from: the client of the link, or a value in a test."""

    @property
    def view(self) -> View | None:
        """The newest view, None before the first."""

    @property
    def policy(self) -> Policy | None:
        """The newest policy, None before the first."""

    @property
    def leader(self) -> str:
        """Address of the bridge that leads and streams to us; "" while there is none."""

    def age_s(self) -> float | None:
        """Age of `view` now: seconds since its `as_of`; None: there is no view."""


class Limits(msgspec.Struct, frozen=True):
    """Ages of the view in seconds.

    Older than `stale` (and than two poll intervals) it is stale, older than `blind` it is no view.
    """

    stale: float = 5.0
    blind: float = 30.0


class Sight:
    """The view as requests see it.

    Args:
        source: where views come from.
        inflight: binds under way; read here, changed by the binder alone.
        clock: for the time of entries in `inflight`.
        limits: ages.

    """

    def __init__(self, source: Source, inflight: InFlight, clock: Clock, limits: Limits) -> None:
        self._source = source
        self._inflight = inflight
        self._clock = clock
        self._limits = limits
        self._index: ViewIndex | None = None
        self._with_binds: tuple[ViewIndex, int, ViewIndex] | None = None
        self._outside: dict[str, None] = {}
        self._places: TopologyIndex | None = None
        self._broken: tuple[ViewIndex, Ints | None] | None = None

    def situation(self, uid: str) -> Situation:
        """Everything that an answer about one pod may depend on."""
        index, age_s = self.index(), self._source.age_s()
        self._inflight.settle(self._source.view, self._clock.monotonic())
        if index is None:
            return Situation(None, self._source.policy, Freshness.BLIND, 0.0, self._outside)
        return Situation(
            index=self._less_binds(index, uid),
            policy=self._source.policy,
            freshness=self.freshness(),
            now=index.view.as_of + (age_s or 0.0),
            outside=self._outside,
            pinned=self._inflight.home_of(uid),
            is_led=bool(self._source.leader),
            topology=self._topology(index),
        )

    def index(self) -> ViewIndex | None:
        """The newest view, compiled."""
        view = self._source.view
        if view is None:
            return self._index
        if self._index is None or self._index.view is not view:
            before, self._index = self._index, compile_view(view, self._index)
            if before is None or before.row_of is not self._index.row_of:
                paths = [node.domains for node in view.nodes.values()]
                self._places = index_of_paths(self._index.names, paths)
                for name in self._outside.keys() & self._index.row_of.keys():
                    del self._outside[name]
        return self._index

    def note_outside(self, names: Iterable[str]) -> None:
        """Nodes that were asked about and are not in a fresh view: not of the pool."""
        if self.freshness() is Freshness.FRESH:
            self._outside |= dict.fromkeys(names)
            while len(self._outside) > MAX_OUTSIDE:
                del self._outside[next(iter(self._outside))]

    def freshness(self) -> Freshness:
        """How far the newest view may be believed now."""
        view = self._source.view
        return freshness_of(
            None if view is None else self._source.age_s(),
            0.0 if view is None else view.interval_s,
            self._limits.stale,
            self._limits.blind,
        )

    def facts(self) -> Mapping[str, object]:
        """What `/debug/snapshot` shows of this."""
        view = self._source.view
        return {
            "freshness": self.freshness(),
            "age_s": self._source.age_s(),
            "view": view,
            "policy": self._source.policy,
            "in_flight": list(self._inflight),
        }

    def _topology(self, index: ViewIndex) -> Ints | None:
        """How little a pod breaks above each node, once per generation of the view."""
        if self._places is None:
            return None
        if self._broken is None or self._broken[0] is not index:
            key = topology_key(self._places, index.free[0], index.total[0])
            self._broken = index, key.astype(np.int32)
        return self._broken[1]

    def _less_binds(self, index: ViewIndex, uid: str) -> ViewIndex:
        if not len(self._inflight):
            return index
        if uid in self._inflight:
            return index.with_taken(self._inflight.taken(index, but=uid))
        cached = self._with_binds
        if cached is None or cached[0] is not index or cached[1] != self._inflight.version:
            less = index.with_taken(self._inflight.taken(index))
            cached = self._with_binds = (index, self._inflight.version, less)
        return cached[2]
