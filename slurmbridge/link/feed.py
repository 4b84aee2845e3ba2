"""What the leader has published, and how far each stream has come with it: no sockets in here.

A view is encoded once and shared by all streams. A stream that is too far behind loses its queue
and gets the whole view next: memory is bounded, and nobody falls behind for good.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

import msgspec

from slurmbridge.clock import Clock
from slurmbridge.link import codec
from slurmbridge.link import fault as faults
from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.delta import difference
from slurmbridge.link.fault import Fault
from slurmbridge.link.freshness import TermGuard
from slurmbridge.link.message import VERSION
from slurmbridge.log import get_logger
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.view import View

_log = get_logger(__name__)


class LinkCounts(msgspec.Struct):
    """What happened since the start, for metrics."""

    wholes: int = 0
    deltas: int = 0
    heartbeats: int = 0
    collapsed: int = 0
    claims: int = 0
    overloaded: int = 0


class _Published(NamedTuple):
    view: View
    policy: Policy
    policy_bytes: bytes
    born: float
    """Our monotonic time at which the reading behind the view began."""


class _Change(NamedTuple):
    generation: int
    delta: bytes
    policy: bytes | None
    born: float


class Watcher:
    """One stream: what it has not been sent yet.

    wake: set when there is something new to send, or it is over. over: why it must end.
    """

    def __init__(self, bound: int) -> None:
        self.queue: deque[_Change] = deque()
        self.wants_whole = True
        self.over: Fault | None = None
        self.wake = asyncio.Event()
        self._bound = bound

    def offer(self, change: _Change) -> bool:
        """Queue a change; whether that made the queue collapse into "whole view next"."""
        self.wake.set()
        if self.wants_whole:
            return False
        if len(self.queue) >= self._bound:
            self.start_anew()
            return True
        self.queue.append(change)
        return False

    def start_anew(self) -> None:
        """Forget the queue: the whole view is next."""
        self.queue.clear()
        self.wants_whole = True
        self.wake.set()

    def end(self, fault: Fault) -> None:
        """Close the stream after what is being written."""
        self.over = fault
        self.wake.set()


class Feed:
    """All streams of one bridge, and what they are fed with. It follows until told to lead.

    Args:
        clock: injected clock.
        bound: changes that a stream may be behind.

    """

    def __init__(self, clock: Clock, bound: int) -> None:
        self._clock = clock
        self._bound = bound
        self._hint = ""
        self._terms = TermGuard()
        self._published: _Published | None = None
        self._whole: bytes | None = None
        self.leads = False
        self.term = ""
        self.watchers: set[Watcher] = set()
        self.counts = LinkCounts()

    @property
    def not_leader(self) -> Fault:
        """What a client is told while we follow."""
        return Fault(faults.NOT_LEADER, text="this bridge does not lead", leader=self._hint)

    def set_leader(self, is_leader: bool, leader_hint: str = "", *, term: str = "") -> None:
        """Lead or follow.

        Args:
            is_leader: whether we hold the Lease.
            leader_hint: address of the leader as clients reach it, as far as known.
            term: what the views of this leadership will carry, as `make_term` makes it. Empty: that
                of the first view published.

        """
        self._hint = leader_hint
        if is_leader and self.leads and term in ("", self.term):
            return
        if self.leads:
            # Whatever comes later of this leadership (a reading that was under way) is void, also
            # when we lead again: others have granted claims meanwhile.
            self._terms.retire(self.term, self._clock.monotonic())
            self._published, self._whole, self.term = None, None, ""
            for watcher in self.watchers:
                watcher.end(self.not_leader)
        self.leads = is_leader
        if is_leader and term:
            self._take_up(term)

    def publish(self, view: View, policy: Policy) -> None:
        """Stream a view; to be called for each new view, also when only `as_of` is newer.

        Does nothing while we follow, and nothing with a view of another leadership.

        Cost at 5,000 nodes: see docs/adr/0004-link-encoding.md; independent of the watchers but for
        one queue entry each.

        Raises:
            InvariantError: the generation went back, or stands while the content changed.

        """
        if not self.leads:
            return
        if view.term != self.term and not (self.term == "" and self._take_up(view.term)):
            _log.warning("view of another term not published", of=view.term, term=self.term)
            return
        old, now = self._published, self._clock.monotonic()
        if old is None:
            born = now - max(self._clock.wall() - view.as_of, 0.0)
            new = _Published(view, policy, codec.encode(policy), born)
            self._published, self._whole = new, None
            for watcher in self.watchers:
                watcher.start_anew()
            return
        delta = difference(old.view, view)
        if view.as_of == old.view.as_of:
            # The same reading does not get younger when someone sets the wall clock.
            born = old.born
        else:
            born = now - max(self._clock.wall() - view.as_of, 0.0)
        same_policy = policy == old.policy
        policy_bytes = old.policy_bytes if same_policy else codec.encode(policy)
        self._published = _Published(view, policy, policy_bytes, born)
        self._whole = None
        if delta is None:
            for watcher in self.watchers:
                watcher.start_anew()
            return
        change = _Change(
            view.generation, codec.encode(delta), None if same_policy else policy_bytes, born
        )
        for watcher in self.watchers:
            self.counts.collapsed += watcher.offer(change)

    def _take_up(self, term: str) -> bool:
        if not self._terms.admits(term, self._clock.monotonic()):
            return False
        self.term = term
        return True

    def join(self) -> Watcher:
        """A new stream; the whole view is its first message."""
        watcher = Watcher(self._bound)
        self.watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """A stream has ended."""
        self.watchers.discard(watcher)

    def end(self, fault: Fault) -> None:
        """Follow from now on and close all streams."""
        self.leads = False
        for watcher in self.watchers:
            watcher.end(fault)

    def next_for(self, watcher: Watcher) -> pb.ViewMessage | None:
        """What the stream is to be sent now, aged as of now; None: it has everything."""
        published, now = self._published, self._clock.monotonic()
        if published is None:
            return None
        if watcher.wants_whole:
            watcher.wants_whole = False
            self.counts.wholes += 1
            if self._whole is None:
                self._whole = codec.encode(published.view)
            return pb.ViewMessage(
                version=VERSION,
                term=self.term,
                age_s=now - published.born,
                generation=published.view.generation,
                whole=self._whole,
                policy=published.policy_bytes,
            )
        if not watcher.queue:
            return None
        change = watcher.queue.popleft()
        self.counts.deltas += 1
        return pb.ViewMessage(
            version=VERSION,
            term=self.term,
            age_s=now - change.born,
            generation=change.generation,
            delta=change.delta,
            policy=change.policy,
        )

    def heartbeat(self) -> pb.ViewMessage:
        """For a stream that has everything: that is so, and how old it is now."""
        self.counts.heartbeats += 1
        published = self._published
        if published is None:
            return pb.ViewMessage(version=VERSION, term=self.term)
        return pb.ViewMessage(
            version=VERSION,
            term=self.term,
            age_s=self._clock.monotonic() - published.born,
            generation=published.view.generation,
        )
